"""Links to a scheduler in this process, over the streams that its servicer uses, without a network."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Generic, Protocol, TypeVar

from services.core.errors import NoLeader
from services.ports.clock import Clock

_LOOK_S: Final = 0.2  # period of checks whether a scheduler leads now


class LocalStream(Protocol):
    """The common part of ``PlacementStream`` and ``ReportStream``."""

    @property
    def epoch(self) -> int: ...

    def take(self) -> Any: ...

    def close(self) -> None: ...


Stream = TypeVar("Stream", bound=LocalStream)
Heard = TypeVar("Heard")


class LocalLinks:
    """The common part of all ``LeaderLinks`` to a scheduler in this process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def wait_leader_change(self, timeout_s: float) -> None:
        await self._clock.sleep(min(timeout_s, _LOOK_S))

    async def close(self) -> None:
        pass


class LocalLink(Generic[Stream, Heard]):
    """Implements ``LeaderLink``. ``Heard`` is the type that the stream's ``take`` returns."""

    def __init__(self, stream: Stream, woken: asyncio.Event) -> None:
        self._stream = stream
        self._woken = woken
        self._closed = False

    @property
    def epoch(self) -> int:
        return self._stream.epoch

    async def receive(self) -> Heard:
        """Return the next message. No heartbeats: the end of an in-process stream wakes its reader."""
        while not self._closed:
            heard: Heard | None = self._stream.take()
            if heard is not None:
                return heard
            await self._woken.wait()
            self._woken.clear()
        raise NoLeader("the stream was closed on this side")

    async def close(self) -> None:
        self._closed = True
        self._stream.close()
        self._woken.set()
