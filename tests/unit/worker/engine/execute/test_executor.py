"""A runner as an executor, in the caller's own thread."""

from __future__ import annotations

import pytest

from services.worker.engine.execute.executor import Batch, Inline, Samples


class Runner:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, batch: Batch) -> Samples:
        if batch.proposals:
            raise RuntimeError("the device is gone")
        return Samples([len(batch.decodes)])

    def resize(self, blocks: int) -> None:
        if blocks > 100:
            raise MemoryError
        self.sizes.append(blocks)


def test_what_is_submitted_is_what_is_collected() -> None:
    executor = Inline(Runner())
    for _ in range(3):
        executor.submit(Batch([], []))
        assert executor.collect().tokens == [0]


def test_a_failure_is_the_collectors() -> None:
    executor = Inline(Runner())
    executor.submit(Batch([], [], {0: [1]}))
    with pytest.raises(RuntimeError, match="device"):
        executor.collect()
    executor.submit(Batch([], []))
    assert executor.collect().tokens == [0]


def test_a_resize_is_over_when_it_returns_and_its_failure_is_the_callers() -> None:
    runner = Runner()
    executor = Inline(runner)
    executor.resize(7)
    assert runner.sizes == [7]
    with pytest.raises(MemoryError):
        executor.resize(101)
    executor.submit(Batch([], []))
    assert executor.collect().tokens == [0]
