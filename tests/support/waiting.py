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

    Then the machine may have stood still for so long that a bucket drained or a lease ended meanwhile. What
    sleeps for ``limit_s`` itself would always be repeated. Awaiting the test returns the last tenant.
    """

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., Coroutine[Any, Any, str]]:
        @functools.wraps(test)
        async def run(*, tenant: str, **fixtures: Any) -> str:
            number = 0
            while True:
                began_s, mine = time.monotonic(), f"{tenant}-{number}"
                try:
                    await test(tenant=mine, **fixtures)
                    return mine
                except (AssertionError, pytest.fail.Exception) as error:
                    number += 1
                    if number == _TRIES or time.monotonic() - began_s < limit_s:
                        raise
                    print(f"tried again after {time.monotonic() - began_s:.1f} s: {error}")

        return run

    return decorate
