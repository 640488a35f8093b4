"""Retry backoff: the wait before an operation that failed is tried again."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

_MOST_DOUBLINGS: Final = 16  # more failures in a row do not increase the wait


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double with each failure in a row, up to ``max_s``. Each wait is shortened at random by up
    to half, so that clients that failed together do not retry together."""

    first_s: float
    max_s: float

    def longest_s(self, failures: int) -> float:
        """Return the wait in seconds after that many failures in a row, not shortened."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures, _MOST_DOUBLINGS))

    def wait_s(self, failures: int, rng: Random) -> float:
        """Return the wait in seconds after that many failures in a row."""
        longest_s = self.longest_s(failures)
        return rng.uniform(longest_s / 2, longest_s)
