"""How a ``Runner`` becomes an ``Executor``: in the caller's own thread, or in one of its own."""

from __future__ import annotations

import queue
import threading

from services.worker.engine.executor import Batch, Runner, Samples


class Inline:
    """Runs the batch in ``collect``: nothing happens at the same time."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._batch: Batch | None = None

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        self._batch = batch

    def collect(self) -> Samples:
        """See ``Executor``."""
        batch, self._batch = self._batch, None
        assert batch is not None, "nothing was submitted"
        return self._runner.run(batch)


class Threaded:
    """Runs the batch in a thread of its own, so that the caller's Python runs while the device computes.

    The thread owns the runner; it ends with the process.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Samples | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="engine-executor", daemon=True).start()

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        self._batches.put(batch)

    def collect(self) -> Samples:
        """See ``Executor``."""
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def _work(self) -> None:
        while True:
            batch = self._batches.get()
            try:
                self._results.put(self._runner.run(batch))
            except Exception as error:  # it belongs to whoever collects
                self._results.put(error)
