"""Memory that a burst has freed is returned to the system.

glibc keeps most of what is freed for the next allocation. After a burst of connections or large messages a
process would stay as large as it was then, for as long as it runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from pathlib import Path
from typing import Final

from services.ports.clock import Clock

SLACK_BYTES: Final = 16 * 1024**2  # growth that is not worth a look
_PAUSE_S: Final = 15.0
_MOST_LOOKS: Final = 64
_M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h, like the next
_M_ARENA_MAX: Final = -8
_MAPPED_BYTES: Final = 64 * 1024
_ARENAS: Final = 2
_STATM: Final = Path("/proc/self/statm")


def limit_fragmentation() -> None:
    """Two heaps serve all threads, and each block of 64 KiB or more has its own mapping.

    Call it before any thread starts.

    By default glibc makes up to eight heaps for each processor, each with holes of its own.
    It maps blocks of 128 KiB at first and raises that with each such block that is freed, up to 32 MiB: the
    buffers of large heads and messages then lie between small blocks, and return to the system with these.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc has it; others do without
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.mallopt(_M_ARENA_MAX, _ARENAS)


async def return_free_memory(clock: Clock) -> None:
    """Return what is free to the system while the process is larger than it began. Runs until cancelled.

    Garbage in cycles is freed before: calls that grpc has ended keep their connections' buffers so, and by
    itself the collector runs too rarely to find them. It holds up the loop for a tenth of a second where much
    is in use, so that a process that stays large does this ever more rarely.
    Ends at once where the C library or the system has no way to do that.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or not _STATM.exists():
        return
    base_bytes = left_bytes = resident_bytes()
    looks, due_after = 0, 1
    while True:
        await clock.sleep(_PAUSE_S)
        before_bytes = resident_bytes()
        base_bytes = min(base_bytes, before_bytes)
        if before_bytes - base_bytes < SLACK_BYTES:
            continue
        looks += 1
        if looks < due_after and before_bytes - left_bytes < SLACK_BYTES // 4:
            continue
        gc.collect()
        # It takes some milliseconds, in which other threads run.
        await asyncio.to_thread(library.malloc_trim, 0)
        left_bytes = resident_bytes()
        is_worth_it = before_bytes - left_bytes > SLACK_BYTES // 4
        looks, due_after = 0, 1 if is_worth_it else min(2 * due_after, _MOST_LOOKS)


def resident_bytes() -> int:
    """Return how much memory of this process is resident."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
