"""Memory for packed weights, in huge pages where the system has them.

Each step reads all weights once: in small pages these are more addresses than a processor remembers, and it
looks up every one again. A system without huge pages gives small ones.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import torch

HUGE_PAGE: Final = 2 * 1024 * 1024  # bytes, on x86-64, and on ARM with pages of 4 KiB


def huge_tensor(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [elements] of zeros. What does not fill a huge page has small ones: none is wasted."""
    size = elements * dtype.itemsize
    whole = size // HUGE_PAGE * HUGE_PAGE
    if not whole:
        return torch.zeros(elements, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = torch.frombuffer(memory, dtype=dtype)
    begin = -everything.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return everything[begin // dtype.itemsize :][:elements]
