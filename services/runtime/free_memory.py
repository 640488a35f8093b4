"""Memory that a burst has freed is returned to the system.

glibc keeps most of what is freed for the next allocation. After a burst of connections or large messages a
process would stay as large as it was then, for as long as it runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path
from typing import Final

from services.ports.clock import Clock

SLACK_BYTES: Final = 16 * 1024**2  # growth that is not worth a look
_FIRST_PAUSE_S: Final = 15.0
_LAST_PAUSE_S: Final = 60.0
_M_MMAP_THRESHOLD: Final = -3  # of glibc's malloc.h
_MAPPED_BYTES: Final = 64 * 1024
_STATM: Final = Path("/proc/self/statm")


def map_large_blocks() -> None:
    """From now on blocks of 64 KiB or more are mapped each by itself, and go back when they are freed.

    Else glibc begins at 128 KiB and raises that with each such block that is freed, up to 32 MiB: the buffers of large heads and
    messages then lie on heaps between small blocks that stay, and keep the heaps from shrinking.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc has it; others do without
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


async def return_free_memory(clock: Clock) -> None:
    """Return what is free to the system while the process is larger than it began. Runs until cancelled.

    Ends at once where the C library or the system has no way to do that.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or not _STATM.exists():
        return
    base_bytes, pause_s = resident_bytes(), _FIRST_PAUSE_S
    while True:
        await clock.sleep(pause_s)
        before_bytes = resident_bytes()
        base_bytes = min(base_bytes, before_bytes)
        if before_bytes - base_bytes < SLACK_BYTES:
            continue
        # It takes some milliseconds, in which other threads run.
        await asyncio.to_thread(library.malloc_trim, 0)
        returned = before_bytes - resident_bytes() > SLACK_BYTES // 4
        pause_s = _FIRST_PAUSE_S if returned else min(2 * pause_s, _LAST_PAUSE_S)


def resident_bytes() -> int:
    """Return how much memory of this process is resident."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
