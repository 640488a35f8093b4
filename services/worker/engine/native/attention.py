"""Causal attention over paged KV in C++, for any mix of decodes, proposals to verify and prefill chunks.

A row's result is the same to the last bit in whatever span, chunk and batch it is computed, wherever its
blocks lie and with any number of threads (see ``source/attention.h``). NaN in another sequence's KV, or
in what a block held before, does not reach it: keys beyond a row's own are neither summed nor weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.execute.kv_cache import KvShape, ReservedTensors, copy_blocks
from services.worker.engine.execute.step_rows import Ints, Span, Spans, Table
from services.worker.engine.native.library import AttentionCall, Library

PAIRS: Final = 32  # rows times the query heads of a KV head that a tile holds

Tiles = npt.NDArray[np.int32]


class NativeKvCache:
    """The KV pool as the operators read it. Each layer and block has keys [kv_heads, head_dim, block_size],
    so that neighbouring keys are neighbours in memory, and values [kv_heads, block_size, head_dim].
    """

    def __init__(self, shape: KvShape, blocks: int, *, most_blocks: int = 0) -> None:
        """Of ``blocks``, at most ``most_blocks`` at any time; 0: what it begins with."""
        self.shape = shape
        self.block_size = shape.block_size
        self._most = max(blocks, most_blocks)
        row = (shape.kv_heads, shape.head_dim * shape.block_size)
        self._reserved = tuple(
            ReservedTensors(shape.layers, self._most, row, shape.dtype) for _ in ("keys", "values")
        )
        self.keys, self.values = (each.tensor for each in self._reserved)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """See ``KvPool``."""
        copy_blocks(self.keys, self.values, copies)

    def resize(self, blocks: int) -> None:
        """See ``KvPool``. Nothing moves: the addresses are those of its largest size."""
        if blocks > self._most:
            raise MemoryError(f"{blocks} blocks of a pool of at most {self._most}")
        for each in self._reserved:
            each.release_from(blocks)

    def moving_bytes(self, blocks: int) -> int:
        """See ``KvPool``: nothing moves."""
        return 0


@dataclass(frozen=True, slots=True)
class _Step:
    """What of a step is the same for all layers. The arrays are alive as long as this is."""

    slots: torch.Tensor
    first_rows: Ints
    rows: Ints
    lengths: Ints
    tables: Table
    tiles: Tiles
    most_rows: int  # most rows of a tile


class NativeAttention:
    """Implements ``attention.Attention``. ``windows[layer]`` is as for ``TorchAttention``."""

    contexts_at_once = 0

    def __init__(
        self, library: Library, cache: NativeKvCache, *, windows: Sequence[int | None], threads: int
    ) -> None:
        self._library = library
        self._cache = cache
        self._windows = tuple(windows)
        self._threads = threads
        self._spans: Sequence[Span] = ()
        self._slots = torch.empty(0, dtype=torch.int64)
        self._step: _Step | None = None

    def begin(self, spans: Sequence[Span], slots: torch.Tensor) -> None:
        """See ``Attention``; ``Spans`` are read as they are, any other sequence is put into columns."""
        self._spans, self._slots, self._step = spans, slots.contiguous(), None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See ``Attention``; rows of q, k and v have one stride each, and their heads are contiguous."""
        rows, heads, dim = q.shape
        kv_heads = self._cache.shape.kv_heads
        q, k, v = _together(q, k, v)
        if self._step is None:
            self._step = _step_of(self._spans, self._slots, group=heads // kv_heads)
        step = self._step
        out = torch.empty((rows, heads * dim), dtype=q.dtype)
        call = AttentionCall(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            row_stride=q.stride(0),
            keys=self._cache.keys[layer].data_ptr(),
            values=self._cache.values[layer].data_ptr(),
            out=out.data_ptr(),
            slots=step.slots.data_ptr(),
            first_rows=step.first_rows.ctypes.data,
            span_rows=step.rows.ctypes.data,
            lengths=step.lengths.ctypes.data,
            tables=step.tables.ctypes.data,
            table_stride=step.tables.shape[1],
            tiles=step.tiles.ctypes.data,
            rows=rows,
            tile_count=len(step.tiles),
            most_pairs=step.most_rows * (heads // kv_heads),
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            block_size=self._cache.block_size,
            window=self._windows[layer] or 0,
            threads=self._threads,
            scale=dim**-0.5,
        )
        self._library.attend(byref(call))
        return out


def tiles_of(first_rows: Ints, rows: Ints, most_rows: int) -> Tiles:
    """Return (span, first row, rows) of tiles of at most ``most_rows`` rows, int32 [tiles, 3].

    Spans with most rows come first, and of one span its last rows: what takes longest is begun first.
    """
    if not len(rows) or int(rows.max()) == 1:
        return np.stack((np.arange(len(rows)), first_rows, rows), axis=1).astype(np.int32)
    tiles = [
        (span, int(first_rows[span]) + start, min(most_rows, int(rows[span]) - start))
        for span in np.argsort(-rows, kind="stable").tolist()
        for start in range((int(rows[span]) - 1) // most_rows * most_rows, -1, -most_rows)
    ]
    return np.array(tiles, np.int32)


def _step_of(spans: Sequence[Span], slots: torch.Tensor, *, group: int) -> _Step:
    if isinstance(spans, Spans):
        first_rows, rows, lengths, tables = spans.first_rows, spans.rows, spans.lengths, spans.tables
    else:
        first_rows = np.array([span.first_row for span in spans], np.int64)
        rows = np.array([span.rows for span in spans], np.int64)
        lengths = np.array([span.length for span in spans], np.int64)
        tables = np.zeros((len(spans), max(len(span.blocks) for span in spans)), np.int32)
        for table, span in zip(tables, spans, strict=True):
            table[: len(span.blocks)] = span.blocks
    most_rows = max(1, PAIRS // group)
    tiles = tiles_of(first_rows, rows, most_rows)
    return _Step(
        slots,
        np.ascontiguousarray(first_rows),  # the operators count in steps of whole arrays
        np.ascontiguousarray(rows),
        np.ascontiguousarray(lengths),
        np.ascontiguousarray(tables),
        tiles,
        most_rows,
    )


def _together(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the three with one stride and contiguous heads, unchanged where they have them already."""
    dim = q.shape[2]
    inner = all(each.stride(2) == 1 and each.stride(1) == dim for each in (q, k, v))
    if inner and q.stride(0) == k.stride(0) == v.stride(0):
        return q, k, v
    joined = torch.cat((q, k, v), dim=1)
    heads, kv_heads = q.shape[1], k.shape[1]
    return joined[:, :heads], joined[:, heads : heads + kv_heads], joined[:, heads + kv_heads :]
