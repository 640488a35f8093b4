"""Writes of a stream with a time limit for its reader."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import grpc
import structlog

from services.core.errors import SlowReader

log = structlog.get_logger()


async def send_headers(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Return once the headers are sent. Called before a write can be cancelled.

    If a cancelled write was still sending the headers, no status can be sent. The client gets no error before
    its deadline.
    """
    await context.send_initial_metadata(())


class BoundedWrites:
    """Writes for the task that entered it. A write that lasts longer than ``timeout_s`` raises SlowReader.

    A reader that stops reading blocks a write as long as its connection lives, and with it the handler's
    resources. One timer runs every ``timeout_s``, so a write ends after one to two of these times. A timer
    per write would cost as much as the write.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._opened = False
        self._begun = 0
        self._writing = False
        self._cut = False
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> BoundedWrites:
        self._task = asyncio.current_task()
        self._check(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Unless other code cancelled the task as well.
        if (
            self._cut
            and isinstance(error, asyncio.CancelledError)
            and self._task
            and not self._task.uncancel()
        ):
            raise SlowReader(f"the stream was not read for {self._timeout_s:g} s") from None

    async def open(self) -> None:
        """Send the headers once, without a message, so that this waits for no reader."""
        if not self._opened:
            self._opened = True
            await send_headers(self._context)

    async def write(self, message: Any) -> None:
        """Return once the transport accepted the message."""
        self._begun += 1
        self._writing = True
        if not self._opened:
            await self.open()
        await self._context.write(message)
        self._writing = False

    def _check(self, seen: int) -> None:
        if seen and self._writing and self._begun == seen and self._task is not None:
            log.info("stream.reader_lost", timeout_s=self._timeout_s)
            self._cut = True
            self._task.cancel()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._check, self._begun)
