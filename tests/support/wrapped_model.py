"""A fixed-cost model around another one; what a test changes is its run."""

from __future__ import annotations

from services.worker.batcher.models.model import FixedCostModel, ModelFacts, Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch, Row


class WrappedModel:
    """Implements ``FixedCostModel``."""

    def __init__(self, inner: FixedCostModel) -> None:
        self._inner = inner

    @property
    def facts(self) -> ModelFacts:
        return self._inner.facts

    def problem(self, row: Row) -> str:
        """See ``FixedCostModel``."""
        return self._inner.problem(row)

    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``."""
        return self._inner.run(batch, pause)
