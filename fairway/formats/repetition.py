"""How much of a version may be repetition: the same stored chunk under many places.

Repetition is in true versions, too: one file under several names, padding, zeros. But a worker fetches and
keeps every repetition, and the registry reads it, so a few stored bytes must not claim many.
"""

from __future__ import annotations

from typing import Final

MAX_RATIO: Final = 4
FREE_BYTES: Final = 64 * 1024 * 1024


def repetition_problem_of(size_bytes: int, distinct_bytes: int) -> str:
    """Return why a version of this size and these distinct bytes is refused, or an empty text."""
    if size_bytes <= MAX_RATIO * distinct_bytes + FREE_BYTES:
        return ""
    return (
        f"the version has {size_bytes} bytes, of which {distinct_bytes} differ: it may have at most "
        f"{MAX_RATIO} times those and {FREE_BYTES} more"
    )
