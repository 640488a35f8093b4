"""The real clock. All other code takes a clock as an argument."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements ``ports.clock.Clock`` with the machine's clocks and the running event loop."""

    # The functions themselves: a request reads the clock some twenty times.
    monotonic_s = staticmethod(time.monotonic)
    unix_s = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
