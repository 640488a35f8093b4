"""How a step's attention is cut into programs: pieces of decode rows, tiles of prefills. Pure integers.

A decode row is cut along its keys, so that one long sequence keeps a whole device busy (Flash-Decoding).
Where results must not depend on the batch the cuts are at fixed positions (``Cutting.exact``); else the
pieces are as long as needed for about ``Cutting.pieces`` of them, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.worker.engine.execute.step_rows import Spans

EXACT_TOKENS: Final = 512  # length of a piece where cuts are at fixed positions
PIECES_PER_PROCESSOR: Final = 2  # programs that hide each other's waits
ALONE_ROWS: Final = 8  # a span of up to so many rows fills no tile: each of its rows attends by itself

Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Cutting:
    """``tile``: keys that a program reads at once, ``rows``: query rows of a prefill's tile.

    ``pieces`` is how many pieces of one KV head fill the device.
    """

    tile: int
    rows: int
    pieces: int
    exact: bool = False
    exact_tokens: int = EXACT_TOKENS

    def __post_init__(self) -> None:
        if self.exact_tokens % self.tile:
            raise ValueError(f"pieces of {self.exact_tokens} tokens are not made of tiles of {self.tile}")

    def capacity(self, rows: int) -> int:
        """Return how many pieces ``cut`` makes of that many rows at most, where cuts are not fixed."""
        return rows + max(rows, self.pieces)


def cutting_for(number_bytes: int, head_dim: int, *, kv_heads: int, processors: int, exact: bool) -> Cutting:
    """Return tiles that a Hopper's registers hold; float32 is multiplied without tensor cores.

    ``processors`` are the device's multiprocessors: decodes are cut until each has some pieces.
    """
    tile, rows = (64, 128 if head_dim <= 128 else 64) if number_bytes == 2 else (16, 16)
    return Cutting(tile, rows, -(-processors * PIECES_PER_PROCESSOR // kv_heads), exact)


@dataclass(frozen=True, slots=True)
class Pieces:
    """By piece: keys ``start`` to ``end`` of decode row ``row``. Row r has those from ``first[r]`` on."""

    row: Integers
    start: Integers
    end: Integers
    first: Integers


@dataclass(frozen=True, slots=True)
class Decodes:
    """Query rows that attend by themselves: the row of q, where its block table begins, and its keys."""

    query_row: Integers
    first_block: Integers
    length: Integers


@dataclass(frozen=True, slots=True)
class Tiles:
    """Up to ``Cutting.rows`` consecutive query rows each; ``position`` is that of the first."""

    row: Integers
    rows: Integers
    position: Integers
    first_block: Integers


@dataclass(frozen=True, slots=True)
class StepPlan:
    """``blocks`` are the block tables of all spans, one after the other."""

    decodes: Decodes
    tiles: Tiles
    blocks: Integers


@dataclass(frozen=True, slots=True)
class StepShape:
    """Rows of a padded step, and its pieces by window. Steps of one shape run the same programs."""

    rows: int
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """``batch_sizes`` ascend; ``scratch_slot`` is one of a block that no sequence is given."""

    batch_sizes: tuple[int, ...]
    scratch_slot: int
    table_entries: int  # most block-table entries of a padded step

    def rows(self, rows: int) -> int | None:
        """Return the size that so many rows are padded to, or None if they are too many."""
        return next((size for size in self.batch_sizes if size >= rows), None)


def plan_step(spans: Spans, cutting: Cutting, *, block_size: int) -> StepPlan:
    """Return the arguments of a step's kernels.

    Where cutting is exact every row is a decode: the same kernel then computes a position, whether it is
    prefilled or decoded.
    """
    first_row, rows, length = (
        column.astype(np.int32) for column in (spans.first_rows, spans.rows, spans.lengths)
    )
    held = -(-length // block_size)
    table = spans.tables[:, : int(held.max(initial=0))]
    blocks = table[np.arange(table.shape[1]) < held[:, None]]
    first_block = np.cumsum(held, dtype=np.int32) - held
    position = length - rows  # the first row's position
    alone = np.full(len(rows), True) if cutting.exact else rows <= ALONE_ROWS
    span, offset = _spread(np.where(alone, rows, 0))
    decodes = Decodes(first_row[span] + offset, first_block[span], position[span] + offset + np.int32(1))
    span, number = _spread(np.where(alone, 0, -(-rows // cutting.rows)))
    offset = number * np.int32(cutting.rows)
    height = np.minimum(rows[span] - offset, np.int32(cutting.rows))
    tiles = Tiles(first_row[span] + offset, height, position[span] + offset, first_block[span])
    return StepPlan(decodes, tiles, blocks)


def cut(length: Integers, cutting: Cutting, *, window: int | None, capacity: int) -> Pieces:
    """Return the pieces of decode rows with ``length`` keys each; a window sees the last of these.

    A row without keys gets none. There are at most ``capacity`` pieces where cuts are not fixed.
    """
    tile = cutting.tile
    lowest = np.zeros_like(length) if window is None else np.maximum(length - np.int32(window), 0)
    lowest = lowest // tile * tile
    if cutting.exact:
        size = cutting.exact_tokens
        origin = lowest // size * size
    else:
        # Each row wastes less than a piece: total / size + rows <= capacity.
        spare = max(1, capacity - len(length))
        size = max(1, -(-int((length - lowest).sum()) // (spare * tile))) * tile
        origin = lowest
    counts = -(-(length - origin) // size)
    row, number = _spread(counts)
    start = origin[row] + number * np.int32(size)
    end = np.minimum(start + np.int32(size), length[row])
    first = np.concatenate((np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)))
    return Pieces(row, np.maximum(start, lowest[row]), end, first)


def columns_of(plan: StepPlan, slots: Integers, pieces: Sequence[Pieces]) -> list[Integers]:
    """Return the columns that the device is given, one after the other."""
    decodes, tiles = plan.decodes, plan.tiles
    return [
        slots,
        decodes.query_row,
        decodes.first_block,
        decodes.length,
        *(column for each in pieces for column in (each.row, each.start, each.end, each.first)),
        tiles.row,
        tiles.rows,
        tiles.position,
        tiles.first_block,
        plan.blocks,
    ]


def padded_columns_of(
    plan: StepPlan, slots: Integers, pieces: Sequence[Pieces], shape: StepShape, scratch_slot: int
) -> list[Integers]:
    """Return the columns of a padded step. Whatever has no fixed size stands last."""
    decodes, rows = plan.decodes, shape.rows
    # A padded query row is its own: its output is never read.
    query_row = np.concatenate((decodes.query_row, np.arange(len(slots), rows, dtype=np.int32)))
    sized = [
        Pieces(padded(each.row, size), padded(each.start, size), padded(each.end, size), each.first)
        for each, size in zip(pieces, shape.pieces, strict=True)
    ]
    own = StepPlan(
        Decodes(query_row, padded(decodes.first_block, rows), padded(decodes.length, rows)),
        plan.tiles,
        plan.blocks,
    )
    return columns_of(own, padded(slots, rows, scratch_slot), sized)


def padded(values: Integers, size: int, value: int = 0) -> Integers:
    """Return the values, followed by as many of ``value`` as make ``size`` of them."""
    return np.concatenate((values, np.full(size - len(values), value, dtype=np.int32)))


def _spread(counts: Integers) -> tuple[Integers, Integers]:
    """Return for each of sum(counts) entries whose it is, and its number among those."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = np.cumsum(counts, dtype=np.int32) - counts
    return owner, np.arange(len(owner), dtype=np.int32) - first[owner]
