"""Tensors in address space that takes memory only where it was written, and gives it back.

A pool that may grow has the addresses of its largest size from the start: growing is free, nothing is copied,
and who keeps a pointer keeps it. Where the system cannot take pages back, what was written stays. Pages are
small also where the system would make them huge: the first token of each layer would take one.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Final

import torch

MAP_NORESERVE: Final = 0x4000  # linux/mman.h; Python names it from 3.13 on


class ReservedTensors:
    """``tensor`` [parts, rows, *row] is zero until it is written. Each part begins with a page."""

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
