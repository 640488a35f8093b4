"""A pool that changes its size under running sequences: none is lost, and it comes to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from services.worker.engine.sequence import SequenceState
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine_protocol import Cancel, Credit, Resize, Resized
from services.worker.policy.speculation import SpeculationPolicy
from tests.unit.worker.engine.conftest import Bench

Make = Callable[..., Bench]
Submits = Callable[..., Any]


def resize(bench: Bench, blocks: int) -> Resized | None:
    bench.engine.apply(Resize(blocks))
    return bench.engine.resized()


def tokens_of(make_bench: Make, submit: Submits, count: int) -> dict[int, list[int]]:
    bench = make_bench(blocks=64)
    for handle in range(count):
        bench.engine.apply(submit(handle, range(8), 20))
    bench.run()
    return bench.tokens


@pytest.mark.parametrize("blocks", [8, 32, 40])
def test_an_idle_pool_has_its_size_at_once(make_bench: Make, blocks: int) -> None:
    bench = make_bench(blocks=32)
    assert resize(bench, blocks) == Resized(blocks)
    assert bench.engine.resized() is None, "it is said once"
    assert not bench.engine.has_work


def test_the_youngest_gives_way_first(make_bench: Make, submit: Submits) -> None:
    bench = make_bench(blocks=32)
    for handle in range(3):
        bench.engine.apply(submit(handle, range(20), 20, credit=2))
    bench.run()
    assert resize(bench, 9) is None
    bench.step()
    assert resize(bench, 32) == Resized(32)
    for handle, computed in ((1, 0), (2, 22)):
        bench.engine.apply(Credit([handle], [20]))
        before = bench.executor.prefilled
        bench.run()
        assert bench.executor.prefilled - before == computed, "what is computed again was preempted"


def test_holders_give_way_one_at_a_step(make_bench: Make, submit: Submits) -> None:
    bench = make_bench(blocks=32)
    for handle in range(4):
        bench.engine.apply(submit(handle, range(8), 20))
    for _ in range(4):
        bench.step()
    assert bench.engine.heartbeat().running == 4
    assert resize(bench, 15) is None, "the blocks are held"
    gave_way = []
    while (resized := bench.engine.resized()) is None:
        bench.step()
        gave_way.append(bench.engine.planner.preemptions)
    assert resized == Resized(15)
    assert gave_way == [1, 2], "those of the last two sequences, one at a step"
    bench.run()
    expected = tokens_of(make_bench, submit, 4)
    for handle, tokens in bench.tokens.items():
        assert tokens == expected[handle][: len(tokens)]
        assert bench.finished[handle] == "length" or handle in (2, 3), "the older ones are computed here"
    assert bench.finished.keys() == expected.keys()


def test_who_waits_for_a_reader_gives_way_too(make_bench: Make, submit: Submits) -> None:
    bench = make_bench(blocks=32)
    for handle in range(3):
        bench.engine.apply(submit(handle, range(20), 20, credit=2))
    bench.run()
    assert bench.engine.heartbeat().running == 3, "stalled, with their blocks"
    assert resize(bench, 9) is None
    assert bench.engine.has_work, "or the shrink would wait for the readers"
    bench.run()
    assert bench.engine.resized() == Resized(9)
    assert bench.engine.heartbeat().running == 1


def test_blocks_that_come_free_by_themselves_end_it(make_bench: Make, submit: Submits) -> None:
    bench = make_bench(blocks=32)
    bench.engine.apply(submit(0, range(60), 20))
    bench.step()
    assert resize(bench, 5) is None
    bench.engine.apply(Cancel([0]))
    assert bench.engine.resized() == Resized(5)
    assert bench.engine.planner.preemptions == 0


def test_the_last_word_counts(make_bench: Make, submit: Submits) -> None:
    bench = make_bench(blocks=32)
    bench.engine.apply(submit(0, range(60), 20))
    bench.step()
    assert resize(bench, 5) is None
    assert resize(bench, 40) == Resized(40), "what was closed is open again"
    bench.run()
    assert (bench.finished, bench.engine.planner.preemptions) == ({0: "length"}, 0)


def test_without_memory_it_stays_as_it_is(make_bench: Make, submit: Submits) -> None:
    bench = make_bench(blocks=32)
    bench.executor.memory_blocks = 32
    assert resize(bench, 33) == Resized(32)
    bench.executor.memory_blocks = 0  # moving takes memory too
    assert resize(bench, 16) == Resized(32)
    bench.engine.apply(submit(0, [1] * 100, 28))
    bench.run()
    assert bench.finished == {0: "length"}, "it has all of its blocks"


class _Proposer:
    """Proposes nothing, and has memory for so many blocks."""

    def __init__(self, memory_blocks: int) -> None:
        self.memory_blocks = memory_blocks
        self.sizes: list[int] = []

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        return [[] for _ in wanted]

    def forget(self, handle: int) -> None: ...

    def resize(self, blocks: int) -> None:
        if blocks > self.memory_blocks:
            raise MemoryError
        self.sizes.append(blocks)


def test_the_proposers_pool_is_as_large_or_neither_changes(make_bench: Make) -> None:
    proposer = _Proposer(40)
    speculation = Speculator(proposer, SpeculationPolicy(most_tokens=4), clock=lambda: 0.0)
    bench = make_bench(blocks=32, speculation=speculation)
    assert resize(bench, 16) == Resized(16)
    assert resize(bench, 50) == Resized(16), "the target's memory went back"
    assert resize(bench, 40) == Resized(40)
    assert proposer.sizes == [16, 40]
