"""Clocks that a test turns by hand."""

from __future__ import annotations

import asyncio


class HandClock:
    """Implements ``ports.clock.Clock``: stands still until it is moved, also by a sleeping task."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


class QuickClock(HandClock):
    """Stands still while a task sleeps: short sleeps are cut, and those of a minute or more do not end."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.0005 if seconds < 60 else 3600)
