"""Whether a dependency that failed is to be asked again. Pure: the caller brings the time."""

from __future__ import annotations


class CircuitBreaker:
    """Closed until ``failures`` in a row; then open, with one attempt let through every ``pause_s``."""

    def __init__(self, *, failures: int = 3, pause_s: float = 1.0) -> None:
        self._limit = failures
        self._pause_s = pause_s
        self._failures = 0
        self._next_attempt_s = 0.0

    @property
    def open(self) -> bool:
        return self._failures >= self._limit

    def allow(self, now_s: float) -> bool:
        """Whether to ask now. When open, a True takes the turn of this ``pause_s``."""
        if not self.open:
            return True
        if now_s < self._next_attempt_s:
            return False
        self._next_attempt_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self.open:
            self._next_attempt_s = now_s + self._pause_s

    def retry_after_s(self, now_s: float) -> float:
        """Return for how long it stays closed to the next caller."""
        return max(0.0, self._next_attempt_s - now_s) if self.open else 0.0
