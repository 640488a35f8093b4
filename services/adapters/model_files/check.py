"""Checks a folder of model files against its manifest, chunk by chunk.

The bytes pass through the page cache, so an engine that maps the files next reads the same bytes. The
exception: the pages are evicted, and the disk returns other bytes. A later write to a file is not detected.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.adapters.model_files.folders import chunk_is_good
from services.adapters.threads import in_thread
from services.core.manifest import ManifestFile

MAX_THREADS: Final = 4

_Chunk = tuple[Path, ManifestFile, int]


async def chunks_are_good(root: Path, files: Sequence[ManifestFile]) -> bool:
    """Return whether every chunk below ``root`` has its digest. Raises OSError for an unreadable file.

    Hashing releases the interpreter lock, so threads share the work. A cancelled caller waits for one chunk.
    """
    chunks = [(root / file.path, file, index) for file in files for index in range(len(file.chunks))]
    count = max(1, min(MAX_THREADS, os.cpu_count() or 1, len(chunks)))
    stop = threading.Event()
    parts = (in_thread(_all_good, chunks[part::count], stop) for part in range(count))
    checks = asyncio.gather(*parts, return_exceptions=True)
    try:
        found = await asyncio.shield(checks)
    finally:
        stop.set()
        await asyncio.wait({checks})
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return all(found)


def _all_good(chunks: Sequence[_Chunk], stop: threading.Event) -> bool:
    """Return whether all are good; False early if another thread found a bad one, or on cancellation."""
    is_good = False
    try:
        is_good = not any(stop.is_set() or not chunk_is_good(*chunk) for chunk in chunks)
    finally:
        if not is_good:
            stop.set()
    return is_good
