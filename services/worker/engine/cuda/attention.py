"""Attention on CUDA: Triton kernels over the block table, for decodes and prefills of any mix.

A step's integers travel to the device in one copy. Steps in which every row attends by itself are padded
to the next of ``batch_sizes``, so that a captured graph fits them (``cuda/graphs``): rows of padding have no
keys; their own key and value go to a slot outside of every block table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from services.worker.engine.cuda import elementwise as elementwise
from services.worker.engine.cuda import kernels as kernels
from services.worker.engine.cuda import varlen_prefill
from services.worker.engine.cuda.plan import (
    Cutting,
    Integers,
    Padding,
    Pieces,
    StepShape,
    columns_of,
    cut,
    padded,
    padded_columns_of,
    plan_step,
)
from services.worker.engine.cuda.varlen_prefill import Segments, segments_of
from services.worker.engine.execute.kv_cache import KvCache
from services.worker.engine.execute.step_rows import Span, Spans

JOINED: Final = 16  # pieces that the second kernel reads at once
ALIGNED: Final = 4  # integers of 16 bytes
LEAST_DOT: Final = 16  # no side of a product may be smaller
WARPS_OF_WIDE_TILES: Final = 8
MAX_FIXED_PIECES: Final = 1 << 14  # most pieces of a padded step, where cuts are at fixed positions


@dataclass(frozen=True, slots=True)
class _Tables:
    """A step's integers on the device, each [entries] int32; see ``cuda/plan`` for their meaning."""

    slots: torch.Tensor
    query_row: torch.Tensor
    first_block: torch.Tensor
    length: torch.Tensor
    pieces: dict[int | None, tuple[torch.Tensor, ...]]
    tiles: tuple[torch.Tensor, ...]
    blocks: torch.Tensor


class TritonAttention:
    """Implements ``Attention``. ``windows[layer]`` limits how far the layer looks back, itself included."""

    def __init__(
        self,
        cache: KvCache,
        *,
        windows: Sequence[int | None],
        device: torch.device,
        cutting: Cutting,
        padding: Padding | None = None,
        torch_prefills: bool = False,
    ) -> None:
        """``torch_prefills`` hands prefills to torch's own attention, which has to take block tables."""
        self.cache = cache
        self._windows = tuple(windows)
        self._kinds = tuple(dict.fromkeys(windows))
        self._device = device
        self._cutting = cutting
        self._padding = padding
        self._torch_prefills = torch_prefills and not cutting.exact
        self._segments: Segments | None = None
        # Exact cuts are at fixed positions: the longer the contexts, the more partial results.
        self.contexts_at_once = sys.maxsize if cutting.exact else 0
        self._widen = device.type != "cuda"  # only the interpreter runs elsewhere
        self._static = self._static_buffer()
        self._tables: _Tables | None = None
        self.shape: StepShape | None = None

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        """The step's integers are on the device. ``shape`` is that of a padded step, else None."""
        assert isinstance(spans, Spans), "the executor gives them in columns"
        plan = plan_step(spans, self._cutting, block_size=self.cache.block_size)
        own_slots = slots.numpy().astype(np.int32)
        self._segments = segments_of(spans, self._device) if self._torch_prefills else None
        rows = len(plan.decodes.length)
        size = self._padding.rows(rows) if self._padding is not None and not len(plan.tiles.row) else None
        length = plan.decodes.length if size is None else padded(plan.decodes.length, size)
        capacity = self._cutting.capacity(len(length))
        pieces = [cut(length, self._cutting, window=kind, capacity=capacity) for kind in self._kinds]
        self.shape = None if size is None else self._shape(size, pieces, len(plan.blocks))
        if self.shape is None:
            columns = columns_of(plan, own_slots, pieces)
        else:
            assert self._padding is not None
            columns = padded_columns_of(plan, own_slots, pieces, self.shape, self._padding.scratch_slot)
        self._tables = self._upload(columns)

    def begin_padding(self, rows: int) -> None:
        """Begin a step of ``rows`` rows of padding: each is one token in the scratch block."""
        assert self._padding is not None
        slot, one = self._padding.scratch_slot, np.ones(rows, np.int64)
        tables = np.full((rows, 1), slot // self.cache.block_size, np.int32)
        spans = Spans([], first_rows=np.arange(rows), rows=one, lengths=one, tables=tables)
        self.begin(spans, torch.full((rows,), slot))

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """Return the integers of the present step, as the kernels are given them."""
        tables = self._tables
        assert tables is not None, "begin comes first"
        pieces = (column for columns in tables.pieces.values() for column in columns)
        own = (tables.slots, tables.query_row, tables.first_block, tables.length)
        return (*own, *pieces, *tables.tiles, tables.blocks)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Attention``."""
        tables = self._tables
        assert tables is not None, "begin comes first"
        rows, heads, dim = q.shape
        keys, values = self.cache.pool(layer)
        self._store(tables, keys, values, k, v)
        out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
        window = self._windows[layer]
        if len(tables.query_row):
            self._decode(tables, window, (q, keys, values), out)
        if len(tables.tiles[0]):
            self._prefill(tables, window, (q, keys, values), out)
        return out.view(rows, heads * dim)

    # --- a step's integers ---------------------------------------------------------------------------

    def _static_buffer(self) -> torch.Tensor:
        if self._padding is None or not self._padding.batch_sizes:
            return torch.empty(0, dtype=torch.int32, device=self._device)
        rows = self._padding.batch_sizes[-1]
        pieces = MAX_FIXED_PIECES if self._cutting.exact else self._cutting.capacity(rows)
        columns = 9 + 4 * len(self._kinds)
        entries = 4 * rows + len(self._kinds) * (3 * pieces + rows + 1) + self._padding.table_entries
        return torch.zeros(entries + columns * ALIGNED, dtype=torch.int32, device=self._device)

    def _shape(self, rows: int, pieces: Sequence[Pieces], blocks: int) -> StepShape | None:
        """Return the shape of a step that is padded to ``rows``, or None if it is too large for that."""
        sizes = (self._cutting.capacity(rows),) * len(pieces)
        if self._cutting.exact:
            sizes = tuple(_power_of_two(len(each.row), rows) for each in pieces)
        assert self._padding is not None
        too_large = blocks > self._padding.table_entries or (
            self._cutting.exact and max(sizes) > MAX_FIXED_PIECES
        )
        return None if too_large else StepShape(rows, sizes)

    def _upload(self, columns: list[Integers]) -> _Tables:
        """Return the columns as views of one tensor. Triton compiles a kernel again for other alignments."""
        sizes = [-(-len(column) // ALIGNED) * ALIGNED for column in columns]
        packed = torch.from_numpy(
            np.concatenate([padded(*each) for each in zip(columns, sizes, strict=True)])
        )
        if self.shape is None:
            on_device = packed.to(self._device, non_blocking=True)
        else:  # the graphs read these buffers
            on_device = self._static[: len(packed)].copy_(packed, non_blocking=True)
        places = zip(torch.split(on_device, sizes), columns, strict=True)
        split = [place[: len(column)] for place, column in places]
        count = len(self._kinds)
        pieces = {kind: tuple(split[4 + 4 * n : 8 + 4 * n]) for n, kind in enumerate(self._kinds)}
        tiles = tuple(split[4 + 4 * count : 8 + 4 * count])
        return _Tables(split[0], split[1], split[2], split[3], pieces, tiles, split[-1])

    # --- kernels -------------------------------------------------------------------------------------

    def _store(
        self, tables: _Tables, keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        width = k.shape[1] * k.shape[2]
        elementwise.store_kv[(len(k),)](
            k, v, tables.slots, keys, values,
            k.stride(0), v.stride(0), keys.stride(0),
            WIDTH=width, WIDTH_PAD=_power_of_two(width),
        )  # fmt: skip

    def _decode(
        self,
        tables: _Tables,
        window: int | None,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        q, keys, values = inputs
        _, heads, dim = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        row, start, end, first = tables.pieces[window]
        partial = torch.empty(len(row), heads, dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(len(row), heads, dtype=torch.float32, device=q.device)
        kernels.decode_pieces[(len(row) * kv_heads,)](
            q, keys, values, tables.blocks, tables.query_row, tables.first_block, tables.length,
            row, start, end, partial, partial_lse,
            _scale(dim), q.stride(0), keys.stride(0),
            WINDOW=window or 0, BLOCK_SIZE=self.cache.block_size,
            KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=_power_of_two(group, LEAST_DOT),
            DIM=dim, DIM_PAD=_power_of_two(dim, LEAST_DOT), TILE=self._cutting.tile, WIDEN=self._widen,
        )  # fmt: skip
        rows = min(len(q), len(tables.query_row))  # a padded step may be run without its padding
        kernels.join_pieces[(rows * heads,)](
            partial, partial_lse, tables.query_row, first, out,
            HEADS=heads, DIM=dim, DIM_PAD=_power_of_two(dim, LEAST_DOT), PIECES=JOINED,
        )  # fmt: skip

    def _prefill(
        self,
        tables: _Tables,
        window: int | None,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        q, keys, values = inputs
        _, heads, dim = q.shape
        if (segments := self._segments) is not None:
            size = self.cache.block_size
            keys, values = (pool.view(-1, size, *pool.shape[1:]) for pool in (keys, values))
            out[segments.rows] = varlen_prefill.attend(q[segments.rows], keys, values, segments, window)
            return
        row, rows, position, first_block = tables.tiles
        kernels.prefill[(len(row) * heads,)](
            q, keys, values, tables.blocks, row, rows, position, first_block, out,
            _scale(dim), q.stride(0), keys.stride(0),
            WINDOW=window or 0, BLOCK_SIZE=self.cache.block_size,
            HEADS=heads, GROUP=heads // keys.shape[1],
            DIM=dim, DIM_PAD=_power_of_two(dim, LEAST_DOT), ROWS=self._cutting.rows, TILE=self._cutting.tile,
            WIDEN=self._widen,
            num_warps=WARPS_OF_WIDE_TILES if self._cutting.rows >= 128 else 4, num_stages=2,
        )  # fmt: skip


def _scale(dim: int) -> float:
    """Return 1 / sqrt(dim), for exponentials to the base 2."""
    return math.log2(math.e) / math.sqrt(dim)


def _power_of_two(number: int, least: int = 1) -> int:
    return max(least, 1 << (number - 1).bit_length())
