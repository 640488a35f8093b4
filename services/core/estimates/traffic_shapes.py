"""The shapes of a model's requests, as sums that merge, and those that a new version is probed with. Pure.

A shape has lengths and a kind of sampling, and nothing of the content. What a tenant writes stays with the
request: a copy of it in the control plane's store, in assignments and on every worker would outlive it.

Shapes fall into cells by powers of two of both lengths. A cell keeps a weight and its largest lengths, so
that what is probed was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from msgspec import Struct

MOST_CELLS: Final = 48
MOST_PROBES: Final = 6
_LEAST_WEIGHT: Final = 0.05


class SamplingKind(StrEnum):
    """Which parts of the sampler a request uses. A row of a fixed-cost model has none."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    PENALISED = "penalised"
    LOGPROBS = "logprobs"
    ROW = "row"


class RequestShape(Struct, frozen=True, gc=False):
    """``input_tokens`` is the length of the prompt or row, or an image's tiles; 0: rows have no length."""

    input_tokens: int
    output_tokens: int
    sampling: SamplingKind


# Shapes that are assumed for a version without traffic so far.
DEFAULT_SHAPES: Final = (
    RequestShape(256, 8, SamplingKind.SAMPLED),
    RequestShape(32, 16, SamplingKind.GREEDY),
    RequestShape(48, 8, SamplingKind.PENALISED),
    RequestShape(16, 4, SamplingKind.LOGPROBS),
)
DEFAULT_ROWS: Final = tuple(RequestShape(width, 0, SamplingKind.ROW) for width in (128, 16, 1))

_Cell = tuple[SamplingKind, int, int]


@dataclass(slots=True)
class ShapeSum:
    """The requests of one cell: how many, weighted, and the largest lengths among them."""

    weight: float
    input_tokens: int
    output_tokens: int


@dataclass(slots=True)
class TrafficShapes:
    """At most ``MOST_CELLS`` cells: beyond, the lightest goes that is not the longest."""

    _cells: dict[_Cell, ShapeSum] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, shape: RequestShape, weight: float = 1.0) -> None:
        """Count a request, or several of the cell of ``shape``."""
        cell = shape.sampling, shape.input_tokens.bit_length(), shape.output_tokens.bit_length()
        found = self._cells.get(cell)
        if found is None:
            self._cells[cell] = ShapeSum(weight, shape.input_tokens, shape.output_tokens)
            if len(self._cells) > MOST_CELLS:
                self._drop_one()
            return
        found.weight += weight
        found.input_tokens = max(found.input_tokens, shape.input_tokens)
        found.output_tokens = max(found.output_tokens, shape.output_tokens)

    def merge(self, other: TrafficShapes) -> None:
        for shape, weight in other.items():
            self.add(shape, weight)

    def keep(self, ratio: float) -> None:
        """Weigh everything counted so far by ``ratio``; what then weighs next to nothing is forgotten."""
        for found in self._cells.values():
            found.weight *= ratio
        self._cells = {cell: one for cell, one in self._cells.items() if one.weight >= _LEAST_WEIGHT}

    def items(self) -> Iterator[tuple[RequestShape, float]]:
        """Yield a shape of each cell, and its weight."""
        for (sampling, _, _), one in self._cells.items():
            yield RequestShape(one.input_tokens, one.output_tokens, sampling), one.weight

    def _drop_one(self) -> None:
        longest = max(self._cells, key=lambda cell: (cell[1], cell[2], cell[0]))
        others = (cell for cell in self._cells if cell != longest)
        del self._cells[min(others, key=lambda cell: (self._cells[cell].weight, cell))]


def probed_shapes(shapes: Iterable[tuple[RequestShape, float]]) -> tuple[RequestShape, ...]:
    """Return at most ``MOST_PROBES`` shapes, without any: none.

    The longest one, then the most frequent one of each kind of sampling, then the most frequent ones.
    """
    weights: Mapping[RequestShape, float] = dict(shapes)
    if not weights:
        return ()
    frequent = sorted(weights, key=lambda shape: (-weights[shape], shape.input_tokens, shape.sampling))
    longest = max(weights, key=lambda shape: (shape.input_tokens + shape.output_tokens, shape.sampling))
    of_kinds = {shape.sampling: shape for shape in reversed(frequent)}  # the first of each kind stays
    ordered = dict.fromkeys(
        [longest, *(shape for shape in frequent if shape in of_kinds.values()), *frequent]
    )
    return tuple(ordered)[:MOST_PROBES]
