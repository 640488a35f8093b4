"""Limit on repetition in a version: the same stored chunk at many places.

Valid versions have some repetition: one file under several names, padding, zeros. But a worker fetches and
stores every repetition, and the registry reads it, so a few stored bytes must not expand to many.
"""

from __future__ import annotations

from typing import Final

MAX_RATIO: Final = 4
FREE_BYTES: Final = 64 * 1024 * 1024


def repetition_problem(size_bytes: int, distinct_bytes: int) -> str:
    """Return why a version of this size and these distinct bytes is rejected, or an empty text."""
    if size_bytes <= MAX_RATIO * distinct_bytes + FREE_BYTES:
        return ""
    return (
        f"the version has {size_bytes} bytes, of which {distinct_bytes} differ: it may have at most "
        f"{MAX_RATIO} times those and {FREE_BYTES} more"
    )
