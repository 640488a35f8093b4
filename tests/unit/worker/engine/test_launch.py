"""Both ways to run a batch: in the caller's thread and in another. What holds for one holds for the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from services.worker.engine.executor import Batch, Executor, Samples
from services.worker.engine.launch import Inline, Threaded


class Runner:
    def __init__(self) -> None:
        self.threads: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def run(self, batch: Batch) -> Samples:
        self.threads.append(threading.get_ident())
        assert self.may_go.wait(10)
        if batch.proposals:
            raise RuntimeError("the device is gone")
        return Samples([len(batch.decodes)])


@pytest.mark.parametrize("launch", [Inline, Threaded])
def test_what_is_submitted_is_what_is_collected(launch: Callable[[Any], Executor]) -> None:
    executor = launch(Runner())
    for _ in range(3):
        executor.submit(Batch([], []))
        assert executor.collect().tokens == [0]


@pytest.mark.parametrize("launch", [Inline, Threaded])
def test_a_failure_is_the_collectors(launch: Callable[[Any], Executor]) -> None:
    executor = launch(Runner())
    executor.submit(Batch([], [], {0: [1]}))
    with pytest.raises(RuntimeError, match="device"):
        executor.collect()
    executor.submit(Batch([], []))
    assert executor.collect().tokens == [0]


def test_a_thread_of_its_own_runs_while_the_caller_goes_on() -> None:
    runner = Runner()
    runner.may_go.clear()
    executor = Threaded(runner)
    executor.submit(Batch([], []))
    runner.may_go.set()  # reached although the batch waits for it
    assert executor.collect().tokens == [0]
    assert runner.threads != [threading.get_ident()]
