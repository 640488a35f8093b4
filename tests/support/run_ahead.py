"""An executor that runs ahead without a device."""

from __future__ import annotations

from collections import deque

from services.worker.engine.execute.executor import Batch, Runner, Samples
from services.worker.engine.sequence import SequenceState


class RunsAhead:
    """Implements ``Executor``: a batch is computed when it is submitted, and reported when it is collected.

    ``ahead`` counts the batches that were submitted before another was collected.
    """

    runs_ahead = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._results: deque[Samples] = deque()
        self._tokens: list[int] = []  # of the newest batch's rows
        self.ahead = 0

    def submit(self, batch: Batch) -> None:
        """See ``Executor``; the runner sees the tokens that the sequences do not have yet."""
        assert len(self._results) < 2, "more than one batch ahead"
        self.ahead += len(self._results)
        newest = [(sequence, sequence.tokens[-1]) for sequence in _sequences(batch)]
        unknown = [(sequence, token) for sequence, token in newest if token < 0]
        for sequence, token in unknown:
            sequence.tokens[-1] = max(0, self._tokens[-1 - token])
        samples = self._runner.run(batch)
        for sequence, token in unknown:
            sequence.tokens[-1] = token
        self._tokens = samples.tokens
        self._results.append(samples)

    def collect(self) -> Samples:
        """See ``Executor``."""
        return self._results.popleft()

    def resize(self, blocks: int) -> None:
        """See ``Executor``."""
        assert not self._results, "a batch is being computed"
        self._runner.resize(blocks)


def _sequences(batch: Batch) -> list[SequenceState]:
    return [*batch.decodes, *(chunk.sequence for chunk in batch.prefills)]
