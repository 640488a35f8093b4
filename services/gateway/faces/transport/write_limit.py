"""The time limit of a write, which runs only while the client accepts next to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final

# Within a limit: a client that accepts less holds an answer in memory for too long.
LEAST_BYTES: Final = 16 * 1024


def takes_answer(before: int | None, accepted: int) -> bool:
    """Whether a client that had accepted ``before`` at the start of a limit, None: at none yet, goes on."""
    return before is None or accepted - before >= LEAST_BYTES


class WriteLimit:
    """The block raises TimeoutError once the client accepts less than ``LEAST_BYTES`` within ``limit_s``.

    It does so up to twice ``limit_s`` after its last progress.

    A large answer takes long on a slow line, which is no reason to end it. ``accepted`` returns how many
    bytes the client has accepted. Its first call is after ``limit_s``, since most writes do not wait.
    """

    def __init__(self, limit_s: float, accepted: Callable[[], int]) -> None:
        self._limit_s = limit_s
        self._accepted = accepted
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._wait(None)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def _wait(self, accepted: int | None) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check, accepted)

    def _check(self, before: int | None) -> None:
        accepted = self._accepted()
        if takes_answer(before, accepted):
            self._wait(accepted)
        else:
            self._limit.reschedule(asyncio.get_running_loop().time())
