"""Circuit breaker for a failed dependency. Pure: the caller passes the time."""

from __future__ import annotations


class CircuitBreaker:
    """Open from ``failed`` until ``succeeded``; while open it allows one attempt every ``pause_s``."""

    def __init__(self, *, pause_s: float = 1.0) -> None:
        self._pause_s = pause_s
        self._open = False
        self._next_attempt_s = 0.0

    @property
    def open(self) -> bool:
        return self._open

    def allow(self, now_s: float) -> bool:
        """Return whether to try now. While open, True uses up the attempt of this ``pause_s``."""
        if not self._open:
            return True
        if now_s < self._next_attempt_s:
            return False
        self._next_attempt_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        self._open = False

    def failed(self, now_s: float) -> None:
        self._open = True
        self._next_attempt_s = now_s + self._pause_s

    def retry_after_s(self, now_s: float) -> float:
        """Return the time until the next attempt is allowed."""
        return max(0.0, self._next_attempt_s - now_s) if self._open else 0.0
