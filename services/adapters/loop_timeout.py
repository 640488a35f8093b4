"""A timeout in time during which the event loop ran: what the loop itself held up is nobody else's slowness."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

_PARTS: Final = 5


class LoopTimeout:
    """``asyncio.timeout`` of ``seconds`` in fifths: a loop that stands still for any time uses up one of them.

    An answer that came during the stall is therefore read before the time is over.
    """

    def __init__(self, seconds: float) -> None:
        self._part_s = seconds / _PARTS
        self._left = _PARTS
        self._timeout = asyncio.timeout(None)
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._handle is not None:
            self._handle.cancel()
        return await self._timeout.__aexit__(kind, error, trace)

    def _wait(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._part_s, self._part_over)

    def _part_over(self) -> None:
        self._left -= 1
        if self._left:
            self._wait()
        else:
            self._timeout.reschedule(asyncio.get_running_loop().time())
