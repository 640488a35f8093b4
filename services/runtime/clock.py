"""The real clock. All other code takes a clock as an argument."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements ``ports.clock.Clock`` with the machine's clocks and the running event loop."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
