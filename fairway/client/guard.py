"""Waiting calls of a client, which closing it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fairway.client.errors import Closed

T = TypeVar("T")


class Guard:
    """Runs awaitables until ``close``; then waiting and later ones raise Closed."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Task[object], None] = {}
        self._interrupted: set[asyncio.Task[object]] = set()
        self._why = ""
        self._left = asyncio.Event()

    @property
    def closed(self) -> bool:
        return bool(self._why)

    @property
    def busy(self) -> bool:
        """Whether a task waits in it."""
        return bool(self._waiting)

    async def run(self, awaitable: Awaitable[T]) -> T:
        """Return the awaitable's result. Raises Closed; a cancellation by the caller stays a cancellation."""
        task = asyncio.current_task()
        assert task is not None
        assert task not in self._waiting
        self._waiting[task] = None
        try:
            return await awaitable
        except asyncio.CancelledError:
            if task in self._interrupted and not task.uncancel():
                raise self.error() from None
            raise
        finally:
            del self._waiting[task]
            self._left.set()
            self._interrupted.discard(task)

    async def idle(self) -> None:
        """Return once no task waits in it."""
        while self._waiting:
            self._left.clear()
            await self._left.wait()

    def check(self) -> None:
        """Raise Closed after ``close``."""
        if self._why:
            raise self.error()

    def error(self) -> Closed:
        return Closed(self._why, reason="CLOSED")

    def close(self, why: str) -> None:
        """End all waiting calls. Idempotent; the first reason stays."""
        self._why = self._why or why
        for task in self._waiting:
            if task not in self._interrupted:
                self._interrupted.add(task)
                task.cancel()
