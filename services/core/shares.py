"""Share of a bounded resource that one caller may use, so that others can use the rest. Pure."""

from __future__ import annotations


def share_of(bound: int) -> int:
    """Return half of the bound, at least 1: the maximum for one tenant or one source."""
    return max(1, bound // 2)
