"""Who gives way where those that wait for their readers share blocks, and what that frees."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.prefix.cache import PrefixCache
from services.worker.engine.sequence import SequenceState, sequence_of
from tests.unit.worker.engine.prefix.cache_rig import CacheRig, ask

PROMPT = [place % 90 for place in range(128)]  # eight blocks
OTHER = [(place * 7 + 5) % 90 for place in range(240)]


def stalled_on_one_prefix() -> CacheRig:
    """Of 16 blocks one sequence that decodes and two without credit hold eight together and one each."""
    rig = CacheRig(16)
    rig.engine.apply(ask(0, [*PROMPT, 90], 14))
    while 0 not in rig.tokens:
        rig.step()
    for handle in (1, 2):
        rig.engine.apply(ask(handle, [*PROMPT, 90 + handle], 8, credit=1))
        rig.step()
    rig.step()
    assert (rig.engine.planner.running, rig.cache.blocks_free) == (3, 5)
    return rig


def test_they_keep_their_kv_where_what_they_hold_is_held_by_others() -> None:
    rig = stalled_on_one_prefix()
    rig.engine.apply(ask(3, OTHER[:112], 1))  # seven blocks and one in reach: three are missing
    rig.step()
    assert rig.engine.planner.preemptions == 0
    assert rig.engine.planner.running == 3
    rig.run()
    assert {0, 3} <= rig.finished.keys()


def test_they_give_way_where_their_own_blocks_are_enough() -> None:
    rig = stalled_on_one_prefix()
    rig.engine.apply(ask(3, OTHER[:96], 1))  # two are missing
    rig.step()
    assert rig.engine.planner.preemptions == 2
    rig.run()
    assert rig.finished == {0: "length", 3: "length"}


def test_a_prefix_that_the_head_shares_with_them_is_no_room_for_it() -> None:
    rig = CacheRig(16)
    rig.run(ask(0, [*PROMPT, 90], 8, credit=1))
    rig.engine.apply(ask(1, OTHER[:50], 12))
    while 1 not in rig.tokens:
        rig.step()
    assert rig.cache.blocks_free == 3
    rig.engine.apply(ask(2, [*PROMPT, *OTHER[:80]], 1))  # eight blocks are there, three are missing
    rig.step()
    assert rig.engine.planner.preemptions == 0
    rig.run()
    assert {1, 2} <= rig.finished.keys()


def test_a_decode_takes_from_one_that_frees_a_block() -> None:
    """The youngest holds nothing but what the first one shares; the second has a block of its own."""
    rig = CacheRig(12)
    rig.engine.apply(ask(0, PROMPT, 60))
    while 0 not in rig.tokens:
        rig.step()
    rig.engine.apply(ask(1, [*PROMPT, 91], 8, credit=1))
    rig.engine.apply(ask(2, PROMPT, 8, credit=1))
    while rig.engine.planner.waiting:
        rig.step()
    while rig.cache.blocks_free:
        rig.step()
    assert (rig.engine.planner.running, rig.engine.planner.preemptions) == (3, 0)
    while 0 not in rig.finished:
        rig.step()
    assert (rig.engine.planner.running, rig.engine.planner.preemptions) == (1, 1)


def test_a_decode_takes_nothing_from_those_that_free_nothing() -> None:
    """The stalled one shares all that it holds: of those that decode the youngest gives way."""
    rig = CacheRig(12)
    rig.engine.apply(ask(0, PROMPT, 40))
    while 0 not in rig.tokens:
        rig.step()
    rig.engine.apply(ask(1, PROMPT, 8, credit=1))
    rig.step()
    rig.engine.apply(ask(2, [*PROMPT, 92], 40))
    while rig.engine.planner.preemptions == 0:
        rig.step()
    assert (rig.engine.planner.running, rig.engine.planner.preemptions) == (2, 1)
    assert len(rig.tokens[1]) == 1
    rig.run()
    assert rig.finished == {0: "length", 2: "length"}


starts = st.tuples(
    st.sampled_from([16, 63, 64, 80, 128]),  # in common
    st.integers(0, 40),  # of its own
    st.sampled_from(["publish", "publish", "discard", "nothing"]),
    st.booleans(),  # whether it is let go
)


@settings(max_examples=200, deadline=None)
@given(st.lists(starts, max_size=8), st.integers(0, 100))
def test_as_many_are_free_afterwards(drawn: list[tuple[int, int, str, bool]], closed: int) -> None:
    """Tables that share beginnings, some of them withdrawn or closed."""
    cache = PrefixCache(BlockManager(100, 16))
    sequences: list[tuple[SequenceState, bool]] = []
    for handle, (common, own, then, leaves) in enumerate(drawn):
        prompt = [*PROMPT[:common], *([handle] * own)]
        sequence = sequence_of(ask(handle, prompt), arrival=handle, eos_ids=frozenset())
        sequence.blocks, sequence.cached, _ = cache.attach(sequence)
        sequence.blocks += cache.allocate(cache.blocks_for(len(prompt)) - len(sequence.blocks))
        if then != "nothing":
            sequence.computed = len(prompt)
            cache.publish(sequence)
        sequences.append((sequence, leaves))
    for (sequence, _), (_, _, then, _) in zip(sequences, drawn, strict=True):
        if then == "discard":
            cache.discard(sequence)
    cache.shrink(closed)
    head = sequence_of(ask(99, [*PROMPT, 1]), arrival=99, eos_ids=frozenset())
    gone = [sequence.blocks for sequence, leaves in sequences if leaves]
    freed, room = cache.freed_by(gone), cache.freed_by(gone, kept=cache.found(head))
    free, shared = cache.blocks_free, cache.reusable(head)[1]
    for table in gone:
        cache.release(table)
    assert cache.blocks_free == free + freed
    assert cache.blocks_free + cache.reusable(head)[1] == free + shared + room
