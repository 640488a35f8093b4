"""Waiting by polling, for conditions without a signal, and checks of times on a machine that may stall."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import pytest

_TRIES: Final = 5


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Return once the condition holds; the test fails with TimeoutError after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def sure_within(limit_s: float) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., Any]]:
    """Repeat a test of what passes with time, for another tenant, where it fails after ``limit_s`` or more.

    Then the machine may have stood still for so long that a bucket drained or a lease ended meanwhile.
    """

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., Coroutine[Any, Any, None]]:
        @functools.wraps(test)
        async def run(*, tenant: str, **fixtures: Any) -> None:
            for number in range(_TRIES):
                began_s = time.monotonic()
                try:
                    await test(tenant=f"{tenant}-{number}", **fixtures)
                    return
                except (AssertionError, pytest.fail.Exception):
                    if number == _TRIES - 1 or time.monotonic() - began_s < limit_s:
                        raise

        return run

    return decorate
