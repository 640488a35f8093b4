"""One interface of all fixed-cost models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from services.core.fixed_cost.signature import Operation, TensorSpec
from services.worker.batcher.models.rows import Batch, Row

Outputs = Mapping[str, NDArray[Any]]  # a row's output tensors by name
Pause = Callable[[], None]  # runs what has arrived meanwhile


def no_pause() -> None:
    """A ``Pause`` of a batch that nothing interrupts."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is fixed for a loaded model: its part of the batch key, and its limits."""

    operation: Operation
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dtype: str  # number format of the computation
    max_tokens: int = 0  # longest row in tokens, or largest image in tiles; 0: rows have no length
    accepts_packed: bool = False
    pauses: bool = False  # other batches may run between its layers
    weight_bytes: int = 0
    exact: bool = False  # a row has the same bits alone and in company, as a trial has shown


class FixedCostModel(Protocol):
    """A forward pass without state: a row's outputs do not depend on the other rows of its batch."""

    @property
    def facts(self) -> ModelFacts: ...

    def problem(self, row: Row) -> str:
        """Return why the row cannot be computed, or an empty text. A row is checked before it is batched."""

    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """Return the outputs of each row, in the order of the batch. All rows have one batch key.

        A model that ``pauses`` calls ``pause`` between its layers; ``run`` may be called from there.
        """
