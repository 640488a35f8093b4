"""A stream's writes, none of which waits for its reader for ever."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import grpc
import structlog

log = structlog.get_logger()


class BoundedWrites:
    """Writes for the task that entered it; a write that lasts longer than ``timeout_s`` cancels that task.

    A reader that stays away holds a write for as long as its connection lives, and a status would wait
    behind it: the handler ends cancelled, which resets the stream. One timer looks once per ``timeout_s``,
    so a write is cut after one to two of them; a timer per write would cost as much as the write.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._begun = 0
        self._writing = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> BoundedWrites:
        task = asyncio.current_task()
        assert task is not None, "a stream is written by a task"
        self._look(task, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, message: Any) -> None:
        """Return once the transport took the message."""
        self._begun += 1
        self._writing = True
        await self._context.write(message)
        self._writing = False

    def _look(self, task: asyncio.Task[Any], seen: int) -> None:
        if seen and self._writing and self._begun == seen:
            log.info("stream.reader_lost", timeout_s=self._timeout_s)
            task.cancel()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._look, task, self._begun)
