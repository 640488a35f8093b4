"""Waiting by polling, for conditions without a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Return once the condition holds; the test fails with TimeoutError after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
