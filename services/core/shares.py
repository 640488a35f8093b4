"""How much of something bounded one caller may hold, so that others find room. Pure."""

from __future__ import annotations


def share_of(bound: int) -> int:
    """Return half of the bound, at least 1: what one tenant, or one source, holds at most."""
    return max(1, bound // 2)
