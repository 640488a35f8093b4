"""The KV pool: keys and values of every layer, in blocks (PagedAttention, SOSP'23).

Layout per layer: [blocks * block_size, kv_heads, head_dim]. A slot is a row: block * block_size + offset.
A sequence whose blocks are consecutive is a slice of it; any other is gathered block by block.

A pool changes its size between steps. On the CPU it has the addresses of its largest size and gives back the
memory of blocks beyond its end; on a device its tensors are made anew, one after the other.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from fairway.formats.decoder_config import ModelConfig

MAP_NORESERVE: Final = 0x4000  # linux/mman.h; Python names it from 3.13 on


class ReservedTensors:
    """``tensor`` [parts, rows, *row] is zero until it is written. Each part begins with a page.

    Address space takes memory only where it was written, and gives it back. A pool that may grow has the
    addresses of its largest size from the start: growing is free, nothing is copied, and a kept pointer stays
    valid. Where the system cannot take pages back, what was written stays. Pages are small also where the
    system would make them huge: the first token of each layer would take one.
    """

    def __init__(self, parts: int, rows: int, row: Sequence[int], dtype: torch.dtype) -> None:
        self._row_bytes = math.prod(row) * dtype.itemsize
        part_bytes = _pages(rows * self._row_bytes) * mmap.PAGESIZE
        self._parts, self._part_bytes = parts, part_bytes
        self._map = _reserve(parts * part_bytes)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                self._map.madvise(mmap.MADV_NOHUGEPAGE)
        strides = [math.prod(row[place + 1 :]) for place in range(len(row))]
        self.tensor = torch.frombuffer(self._map, dtype=dtype).as_strided(
            (parts, rows, *row), (part_bytes // dtype.itemsize, math.prod(row), *strides)
        )

    def release_from(self, row: int) -> None:
        """Give the memory of all rows from ``row`` on back, in whole pages: they are zero, or as before."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = _pages(row * self._row_bytes) * mmap.PAGESIZE
        if first < self._part_bytes:
            for part in range(self._parts):
                begin = part * self._part_bytes + first
                self._map.madvise(mmap.MADV_DONTNEED, begin, self._part_bytes - first)


def _reserve(size: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(-1, size, flags=flags | MAP_NORESERVE if sys.platform == "linux" else flags)


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE)


@dataclass(frozen=True, slots=True)
class KvShape:
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize


def kv_shape(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> KvShape:
    """Return the shape of the model's KV."""
    return KvShape(config.layers, config.kv_heads, config.head_dim, block_size, dtype)


class KvPool(Protocol):
    """What an executor needs of a pool, however its backend lays it out."""

    block_size: int

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to), in all layers, one after the other."""

    def resize(self, blocks: int) -> None:
        """Have so many blocks; what the first ones hold is kept, memory of others is given back.

        Raises MemoryError where there is not so much memory: the pool is as it was.
        """

    def moving_bytes(self, blocks: int) -> int:
        """Return the bytes that a change to or from so many blocks takes while it runs, besides the larger
        pool."""


def copy_blocks(keys: torch.Tensor, values: torch.Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks, (from, to), one after the other, in pools [layers, blocks, ...]."""
    for source, target in copies:
        keys[:, target] = keys[:, source]
        values[:, target] = values[:, source]


class KvCache:
    """The tensors. The attention backend is the only one that reads and writes them."""

    def __init__(
        self,
        shape: KvShape,
        blocks: int,
        device: torch.device,
        *,
        most_blocks: int = 0,
        spare_blocks: int = 0,
    ) -> None:
        """Of ``blocks``, at most ``most_blocks`` at any time (0: what it begins with), and ``spare_blocks``
        after them that no planner gives away."""
        self.shape = shape
        self.block_size = shape.block_size
        self.blocks = blocks
        self._most = max(blocks, most_blocks)
        self._spare = spare_blocks
        self._device = device
        self._reserved: tuple[ReservedTensors, ...] = ()
        if device.type == "cpu":
            rows = (self._most + spare_blocks) * shape.block_size
            row = (shape.kv_heads, shape.head_dim)
            self._reserved = tuple(ReservedTensors(shape.layers, rows, row, shape.dtype) for _ in range(2))
            self._keys, self._values = (list(each.tensor.unbind()) for each in self._reserved)
        else:
            self._keys, self._values = ([self._layer(blocks) for _ in range(shape.layers)] for _ in range(2))

    def resize(self, blocks: int) -> None:
        """See ``KvPool``. On a device the peak is that of the larger size and one tensor of a layer more."""
        if blocks > self._most:
            raise MemoryError(f"{blocks} blocks of a pool of at most {self._most}")
        if self._reserved:
            for each in self._reserved:
                each.release_from((blocks + self._spare) * self.block_size)
        else:
            self._move(blocks)
        self.blocks = blocks

    def moving_bytes(self, blocks: int) -> int:
        """See ``KvPool``: one tensor of a layer, or nothing."""
        return 0 if self._reserved else blocks * self.shape.block_bytes // (2 * self.shape.layers)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [rows, kv_heads, head_dim] in the slots [rows]."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """See ``KvPool``."""
        for keys, values in zip(self._keys, self._values, strict=True) if copies else ():
            copy_blocks(self._paged(keys)[None], self._paged(values)[None], copies)

    def run(self, layer: int, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [length, kv_heads, head_dim] of consecutive slots, as views."""
        here = slice(start, start + length)
        return self._keys[layer][here], self._values[layer][here]

    def pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [slots, kv_heads, head_dim] of all blocks, as views."""
        return self._keys[layer], self._values[layer]

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [blocks * block_size, kv_heads, head_dim], copied from blocks anywhere."""
        return self._gather(self._keys[layer], blocks), self._gather(self._values[layer], blocks)

    def _gather(self, pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return self._paged(pool).index_select(0, blocks).flatten(0, 1)

    def _paged(self, pool: torch.Tensor) -> torch.Tensor:
        return pool.view(-1, self.block_size, *pool.shape[1:])

    # --- on a device ---------------------------------------------------------------------------------

    def _layer(self, blocks: int) -> torch.Tensor:
        size = ((blocks + self._spare) * self.block_size, self.shape.kv_heads, self.shape.head_dim)
        return torch.zeros(size, dtype=self.shape.dtype, device=self._device)

    def _move(self, blocks: int) -> None:
        """Have all tensors of the new size, or all of the old one."""
        before = self.blocks
        try:
            self._move_tensors(blocks)
        except torch.OutOfMemoryError as error:
            with suppress(torch.OutOfMemoryError):  # what cannot be moved back stays larger than it has to be
                self._move_tensors(before)
            raise MemoryError(f"{blocks} blocks: {error}") from error

    def _move_tensors(self, blocks: int) -> None:
        kept = min(self.blocks, blocks) * self.block_size
        for tensors in (self._keys, self._values):
            for index in range(len(tensors)):
                if len(tensors[index]) == (blocks + self._spare) * self.block_size:
                    continue
                moved = self._layer(blocks)
                moved[:kept] = tensors[index][:kept]
                tensors[index] = moved
                del moved
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # other engines of the device are to have what was freed
