"""How a ``Runner`` becomes an ``Executor``: in the caller's own thread."""

from __future__ import annotations

from services.worker.engine.execute.executor import Batch, Runner, Samples


class Inline:
    """Runs the batch in ``collect``: nothing happens at the same time."""

    runs_ahead = False

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

    def resize(self, blocks: int) -> None:
        """See ``Executor``."""
        self._runner.resize(blocks)
