"""Blocking file work in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Return the result of the call. A cancelled caller still waits until the thread has finished."""
    future = asyncio.get_running_loop().run_in_executor(None, partial(work, *arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        if not future.cancelled():
            future.exception()  # marks the error as retrieved: the cancellation takes precedence
        raise
