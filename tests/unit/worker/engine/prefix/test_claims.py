"""Who computes, and who waits for what another computes in the same step."""

from __future__ import annotations

from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.prefix.cache import PrefixCache
from services.worker.engine.prefix.reuse import claims
from services.worker.engine.sequence import SequenceState, sequence_of
from tests.unit.worker.engine.prefix.cache_rig import ask

SAME = list(range(64))


def starts(cache: PrefixCache, handle: int, prompt: list[int], *, priority: int = 0) -> SequenceState:
    submit = ask(handle, prompt, priority=priority)
    sequence = sequence_of(submit, arrival=handle, eos_ids=frozenset())
    sequence.blocks = cache.allocate(cache.blocks_for(len(prompt)))
    return sequence


def test_the_shortest_rest_leads_with_the_place_in_line_of_the_oldest() -> None:
    cache = PrefixCache(BlockManager(64, 16))
    long, short = starts(cache, 1, [*SAME, *range(50)]), starts(cache, 2, [*SAME, 1, 2])
    other = starts(cache, 3, [5] * 80)
    movers, claimed = claims([long, short, other], cache)
    assert movers == [short, other]
    assert [(claim.tokens, claim.order) for claim in claimed] == [(66, (0, 1)), (80, (0, 3))]


def test_who_waited_goes_on_behind_what_was_computed() -> None:
    cache = PrefixCache(BlockManager(64, 16))
    long, short = starts(cache, 1, [*SAME, *range(50)]), starts(cache, 2, [*SAME, 1, 2])
    short.computed = 66
    cache.publish(short)
    used = cache.blocks_used
    movers, claimed = claims([long], cache)
    assert (movers, claimed[0].tokens, long.computed, long.cached) == ([long], 50, 64, 64)
    assert long.blocks[:4] == short.blocks[:4]
    assert cache.blocks_used == used - 4
    cache.check_integrity([long.blocks, short.blocks])


def test_ends_of_prompts_have_no_names_and_wait_for_nobody() -> None:
    cache = PrefixCache(BlockManager(64, 16))
    prompts = [starts(cache, handle, SAME[:40]) for handle in range(3)]
    assert claims(prompts, cache)[0] == prompts


def test_who_enters_nothing_leads_nobody() -> None:
    """What comes before was taken out of the cache, so nobody can take over what this one computes."""
    cache = PrefixCache(BlockManager(64, 16))
    failed, cut_off, other = (starts(cache, handle, SAME * 2) for handle in range(3))
    for sequence in (failed, cut_off):
        sequence.computed = 64
        cache.publish(sequence)
    cache.discard(failed)
    cut_off.computed = other.computed = 80
    cache.publish(other)
    assert cache.next_name(cut_off) is None
    movers, claimed = claims([cut_off, other], cache)
    assert movers == [cut_off, other]
    assert [claim.order for claim in claimed] == [(0, 1), (0, 2)]


def test_without_a_cache_all_compute() -> None:
    cache = PrefixCache(BlockManager(64, 16))
    prompts = [starts(cache, handle, SAME) for handle in range(2)]
    movers, claimed = claims(prompts, None)
    assert movers == prompts
    assert [claim.order for claim in claimed] == [(0, 0), (0, 1)]
