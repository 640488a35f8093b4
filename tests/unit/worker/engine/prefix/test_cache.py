"""What is found, kept and given up, through an engine whose KV says what it is the KV of."""

from __future__ import annotations

from random import Random

import pytest
from msgspec import structs

from services.core.generation import Prompt
from services.core.prefix import prefix_chain
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.prefix.cache import PrefixCache
from services.worker.engine.prefix.eviction import EvictionLimits
from services.worker.engine_protocol import Cancel
from tests.unit.worker.engine.prefix.cache_rig import VOCABULARY, CacheRig, ask, sample

PROMPT = [place % 90 for place in range(150)]


def unique(rng: Random, tokens: int = 200) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def test_a_prompt_asked_again_is_found() -> None:
    rig = CacheRig(64)
    rig.run(ask(0, PROMPT))
    rig.run(ask(1, PROMPT), ask(2, PROMPT[:70]), ask(3, PROMPT[:40]))
    assert rig.cached == {0: 0, 1: 149, 2: 64, 3: 32}
    assert rig.tokens[1] == rig.tokens[0]
    assert set(rig.names) == set(prefix_chain(1, PROMPT))


def test_a_prompt_that_ends_with_a_cached_block_copies_it_for_its_last_token() -> None:
    rig = CacheRig(64)
    rig.run(ask(0, PROMPT[:128]))
    computed = rig.executor.computed
    rig.run(ask(1, PROMPT[:128], 1))
    assert rig.cached[1] == 127
    assert rig.executor.computed == computed + 1
    assert rig.tokens[1] == rig.tokens[0][:1]


def test_the_next_turn_of_a_conversation_finds_the_output() -> None:
    rig = CacheRig(64)
    rig.run(ask(0, PROMPT, 30))
    text = PROMPT + rig.tokens[0]
    rig.run(ask(1, [*text, 1, 2, 3]))
    assert rig.cached[1] == len(text) - 1  # of the last token there is no KV
    rig.run(ask(2, PROMPT, 40, produced=rig.tokens[0]))  # a stream that goes on elsewhere
    assert rig.cached[2] == len(text) - 1


def test_domains_share_nothing() -> None:
    rig = CacheRig(64)
    rig.run(ask(0, PROMPT, domain=1))
    rig.run(ask(1, PROMPT, domain=2), ask(2, PROMPT, domain=0), ask(3, PROMPT, domain=0))
    for handle in range(4, 7):
        rig.run(ask(handle, [90, 91, 92], domain=handle))
        rig.run(ask(10 + handle, [90, 91, 92], domain=handle))
    assert rig.cached == dict.fromkeys(range(7), 0) | dict.fromkeys(range(14, 17), 2)


def test_names_that_are_lacking_are_made() -> None:
    """Of a root alone, and of more names than the prompt has blocks."""
    rig = CacheRig(64)
    bare = ask(0, PROMPT)
    rig.run(structs.replace(bare, credit_limit=99, prompt=Prompt(bare.prompt.ids, (), 1)))
    surplus = (*bare.prompt.prefix_hashes, 5, 6, 7)
    rig.run(structs.replace(bare, handle=1, credit_limit=99, prompt=Prompt(bare.prompt.ids, surplus, 1)))
    assert rig.cached[1] == 149
    assert set(rig.names) == set(bare.prompt.prefix_hashes)


def test_of_prompts_that_begin_alike_one_is_computed() -> None:
    rig = CacheRig(256, token_budget=64, max_sequences=8)
    prompts = [[*PROMPT[:128], 90, handle] for handle in range(6)]
    rig.run(*(ask(handle, prompt, 1) for handle, prompt in enumerate(prompts)))
    assert rig.executor.computed == 128 + 6 * 2
    assert sorted(rig.cached.values()) == [0] + [128] * 5
    for handle, prompt in enumerate(prompts):
        assert rig.tokens[handle] == [sample(1, prompt)]


def test_who_computes_for_others_may_go_away() -> None:
    rig = CacheRig(256, token_budget=16, max_sequences=8)
    for handle in range(3):
        rig.engine.apply(ask(handle, [*PROMPT[:128], handle], 2))
    rig.step()
    rig.step()
    rig.engine.apply(Cancel([0]))
    rig.run()
    assert rig.executor.computed == 128 + 2 * (1 + 1)
    assert rig.finished == {1: "length", 2: "length"}


def test_a_preempted_sequence_finds_its_own_blocks() -> None:
    rig = CacheRig(24, token_budget=64, max_sequences=2, max_model_len=384)
    rig.engine.apply(ask(0, unique(Random(1), 150), 90))
    rig.engine.apply(ask(1, unique(Random(2), 150), 60, priority=1))
    while rig.engine.planner.preemptions == 0:
        rig.step()
    computed = rig.executor.computed
    rig.run()
    assert rig.cached[1] >= 128  # told anew, of the second start
    assert rig.executor.computed - computed < 150
    assert rig.finished == {0: "length", 1: "length"}


def test_what_failed_is_not_kept() -> None:
    rig = CacheRig(64)
    rig.run(ask(0, PROMPT[:70]))
    rig.executor.broken.add(1)
    rig.run(ask(1, PROMPT))
    rig.run(ask(2, PROMPT))
    assert (rig.finished[1], rig.cached[2]) == ("not_finite", 70)  # what the first left, its last slots too


def test_what_fails_is_not_taken_over_by_who_computed_the_same() -> None:
    """Ends of prompts have no names, so both compute them in one step; the first of them fails."""
    rig = CacheRig(64)
    rig.executor.broken.add(0)
    rig.run(ask(0, PROMPT[:40]), ask(1, PROMPT[:40]))
    rig.run(ask(2, PROMPT[:40]))
    assert rig.finished == {0: "not_finite", 1: "length", 2: "length"}
    assert rig.tokens[1] == rig.tokens[2]


def test_what_others_hold_takes_no_room() -> None:
    rig = CacheRig(26, token_budget=256, max_model_len=320)
    rig.engine.apply(ask(0, unique(Random(1), 256), 40))
    rig.step()
    rig.engine.apply(ask(1, [*unique(Random(1), 256), 1], 40))
    assert rig.step().running == 2
    rig.run()
    assert rig.cached[1] == 256


# --- eviction ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flooding", [1, 2])
@pytest.mark.parametrize("asks", [2, 5])
def test_a_hot_prefix_survives_a_flood_of_unique_prompts(flooding: int, asks: int) -> None:
    """Of its own domain or another: ten times what the pool holds, without an ask in between."""
    rig = CacheRig(128, max_model_len=512)
    hot = unique(Random(0), 640 // 2)
    for handle in range(asks):
        rig.run(ask(handle, [*hot, handle], 1))
    rng, flood = Random(9), 10 * 128 * 16 // 200
    for number in range(flood):
        rig.run(ask(100 + number, unique(rng), 1, domain=flooding))
    rig.run(ask(99, [*hot, 50], 1))
    assert rig.cached[99] == len(hot)


def test_a_prompt_asked_for_once_does_not_survive_it() -> None:
    rig = CacheRig(128, max_model_len=512)
    rig.run(ask(0, PROMPT))
    rng = Random(9)
    for number in range(40):
        rig.run(ask(100 + number, unique(rng), 1))
    rig.run(ask(1, PROMPT))
    assert rig.cached[1] == 0


def test_the_second_ask_is_known_after_the_blocks_are_gone() -> None:
    """Admission by the second hit: what was evicted in between is kept once it is computed again."""
    rig = CacheRig(128, max_model_len=512)
    rng = Random(9)
    rig.run(ask(0, PROMPT[:128], 1))
    for number in range(12):
        rig.run(ask(100 + number, unique(rng), 1))
    rig.run(ask(1, [*PROMPT[:128], 1], 1))
    assert rig.cached[1] == 0
    for number in range(60):
        rig.run(ask(200 + number, unique(rng), 1))
    rig.run(ask(2, [*PROMPT[:128], 2], 1))
    assert rig.cached[2] == 128


def test_a_domain_beyond_its_share_evicts_its_own_first() -> None:
    """Also where it asks for everything twice, and what it evicts would be of more use than another's."""
    rig = CacheRig(128, max_model_len=512)
    rig.run(ask(0, PROMPT[:128], 1, domain=2))
    rng = Random(9)
    for number in range(60):
        prompt = unique(rng)
        rig.run(ask(100 + 2 * number, prompt, 1), ask(101 + 2 * number, prompt, 1))
        if number == 20:
            rig.run(ask(1, [*PROMPT[:128], 1], 1, domain=2))
    assert rig.cached[1] == 128
    rig.run(ask(2, [*PROMPT[:128], 2], 1, domain=2))
    assert rig.cached[2] == 128


def test_what_nobody_asked_for_during_turnovers_is_nobodys_share() -> None:
    rig = CacheRig(128, max_model_len=512)
    for number in range(4):
        rig.run(ask(number, unique(Random(number)), 1, domain=2))
    rng = Random(9)
    for number in range(120):
        rig.run(ask(100 + number, unique(rng), 1))
    rig.run(ask(9, unique(Random(0)), 1, domain=2))
    assert rig.cached[9] == 0


def test_what_costs_more_to_compute_stays_longer() -> None:
    """Attention makes late blocks dearer: of prompts that were asked for as often, the long one stays."""
    kept = {}
    for half in (32, 1 << 30):
        rig = CacheRig(128, max_model_len=512, attention_half_tokens=half)
        long, short = unique(Random(1), 400), unique(Random(2), 32)
        for handle in range(2):
            rig.run(ask(handle, [*long, handle], 1))
        for handle in range(2, 4):
            rig.run(ask(handle, [*short, handle], 1))
        rng = Random(9)
        for number in range(30 * 128 * 16 // 200):
            rig.run(ask(100 + number, unique(rng), 1))
        rig.run(ask(8, [*long, 7], 1), ask(9, [*short, 7], 1))
        kept[half] = (rig.cached[8], rig.cached[9])
    assert kept[1 << 30] == (0, 0)
    assert kept[32][0] >= 384 > kept[32][1] == 0


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    rig = CacheRig(32, max_model_len=256)
    rig.run(ask(0, PROMPT, 1))
    rng, lengths = Random(3), []
    for number in range(8):
        rig.run(ask(100 + number, unique(rng, 60), 1))
        names = prefix_chain(1, PROMPT)
        lengths.append([name in rig.names for name in names])
    assert [True, False] in lengths
    assert [False, True] not in lengths


# --- slabs -------------------------------------------------------------------------------------------


def test_a_shrink_gives_back_what_is_idle_and_what_is_above_it_drains() -> None:
    rig = CacheRig(64, max_model_len=256)
    rig.run(ask(0, PROMPT), ask(1, unique(Random(1))))
    rig.engine.apply(ask(2, unique(Random(2), 220), 30))
    rig.step()
    given = rig.cache.shrink(48)
    assert rig.cache.blocks_total == 64 - given
    rig.run()
    rig.cache.drain()
    assert rig.cache.blocks_total == 16
    rig.cache.grow(20)
    rig.run(ask(3, PROMPT), ask(4, PROMPT))
    assert rig.cache.blocks_total == 36
    assert rig.tokens[3] == rig.tokens[0]


def test_blocks_that_do_not_divide_a_prefix_block_are_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        PrefixCache(BlockManager(10, 24))
    with pytest.raises(ValueError, match="no limits"):
        EvictionLimits(domain_ratio=0.0)
