"""Clock port: time is injected, so that a test or the simulator can control it."""

from typing import Protocol


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""

    def unix_s(self) -> float:
        """Return wall-clock seconds since 1970; may jump."""

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``. 0 yields once."""
