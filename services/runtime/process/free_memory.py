"""Returns memory to the system that a burst has freed.

glibc keeps most freed memory for later allocations. Without this, a process would stay as large as it was in
a burst of connections or large messages.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from pathlib import Path
from typing import Final

from services.ports.clock import Clock

SLACK_BYTES: Final = 16 * 1024**2  # growth below this is ignored
_PAUSE_S: Final = 15.0
_MOST_CHECKS: Final = 64
BUSY_TASKS: Final = 1024  # task count at which a collection takes some 50 ms
_MOST_POSTPONED: Final = 20
_M_MMAP_THRESHOLD: Final = -3  # constants of glibc's malloc.h
_M_ARENA_MAX: Final = -8
_MAPPED_BYTES: Final = 64 * 1024
_ARENAS: Final = 2
_STATM: Final = Path("/proc/self/statm")


def limit_fragmentation() -> None:
    """Limit glibc to two heaps for all threads, and give each block of 64 KiB or more its own mapping.

    Call it before any thread starts.

    By default glibc makes up to eight heaps per processor, each with its own holes. It maps blocks of 128 KiB
    or more. Each mapped block that is freed raises that threshold, up to 32 MiB. Then the buffers of large
    headers and messages lie between small blocks, and are returned only together with these.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc has it; other libraries do not need it
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.mallopt(_M_ARENA_MAX, _ARENAS)


async def return_free_memory(clock: Clock) -> None:
    """Return free memory to the system while the process is larger than at its start. Runs until cancelled.

    It collects cycles first: calls that grpc has ended keep their connections' buffers in cycles, and the
    collector itself runs too rarely to find them. That blocks the loop for a tenth of a second in a large
    process, so a process that stays large does it at growing intervals. While thousands of requests run it
    takes longer and finds little, so that it waits for some minutes. Ends at once where the C library or the
    system does not support it.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or not _STATM.exists():
        return
    base_bytes = left_bytes = resident_bytes()
    checks, due_after, postponed = 0, 1, 0
    while True:
        await clock.sleep(_PAUSE_S)
        before_bytes = resident_bytes()
        base_bytes = min(base_bytes, before_bytes)
        if before_bytes - base_bytes < SLACK_BYTES:
            continue
        checks += 1
        if checks < due_after and before_bytes - left_bytes < SLACK_BYTES // 4:
            continue
        if len(asyncio.all_tasks()) > BUSY_TASKS and postponed < _MOST_POSTPONED:
            postponed += 1
            continue
        postponed = 0
        gc.collect()
        # It takes some milliseconds, in which other threads run.
        await asyncio.to_thread(library.malloc_trim, 0)
        left_bytes = resident_bytes()
        is_worth_it = before_bytes - left_bytes > SLACK_BYTES // 4
        checks, due_after = 0, 1 if is_worth_it else min(2 * due_after, _MOST_CHECKS)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(_STATM.read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
