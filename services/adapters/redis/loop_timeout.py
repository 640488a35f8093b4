"""A timeout that counts only time in which the event loop ran, so that a stalled loop does not cause it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

_PARTS: Final = 5
_MAX_LATE: Final = 20


class LoopTimeout:
    """``asyncio.timeout`` of ``seconds``, in five parts. A part that ended late, because the loop stalled, is
    repeated.

    So a response that arrived while the loop stalled is read before the timeout. At most 20 parts are
    repeated, so that the wait also ends on a loop that is always late.
    """

    def __init__(self, seconds: float) -> None:
        self._part_s = seconds / _PARTS
        self._left = _PARTS
        self._late = _MAX_LATE
        self._timeout = asyncio.timeout(None)
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(self._part_s, self._part_over, loop.time() + self._part_s)

    def _part_over(self, due_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - due_s > self._part_s and self._late:
            self._late -= 1
        else:
            self._left -= 1
        if self._left:
            self._wait()
        else:
            self._timeout.reschedule(now_s)
