"""Whose rows are where in a step, as arrays: what attention backends read.

A ``Span`` is one sequence's rows. ``Spans`` holds those of a step by columns, for backends that work on all
sequences at once, and makes a ``Span`` only for backends that go sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from services.worker.engine.sequence import SequenceState

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Span:
    """``rows`` rows of a step from ``first_row`` on are one sequence's tokens, the last at ``length`` - 1.

    ``blocks`` is its block table; ``contiguous``: the blocks are consecutive.
    """

    first_row: int
    rows: int
    length: int
    blocks: list[int]
    contiguous: bool


class Spans(Sequence[Span]):
    """The spans of a step, in row order; decodes first.

    ``first_rows``, ``rows`` and ``lengths`` [spans] are int64. ``tables`` [spans, blocks] int32 are the block
    tables, wide enough for every ``lengths``; entries beyond a span's own blocks are any block. All of it is
    to be read in the step that it was made for: the arrays are used again by the next.
    """

    def __init__(
        self, sequences: list[SequenceState], *, first_rows: Ints, rows: Ints, lengths: Ints, tables: Table
    ) -> None:
        self.first_rows = first_rows
        self.rows = rows
        self.lengths = lengths
        self.tables = tables
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        sequence = self._sequences[index]
        return Span(
            int(self.first_rows[index]),
            int(self.rows[index]),
            int(self.lengths[index]),
            sequence.blocks,
            sequence.contiguous,
        )
