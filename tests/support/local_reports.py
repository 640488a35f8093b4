"""Report links to a scheduler in this process, over the streams that its servicer uses, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from services.adapters.links.reporter import ReportLink
from services.core.errors import NoLeader
from services.core.fleet import ReportSnapshot
from services.ports.clock import Clock
from services.ports.streams import ReportAnswer, ReportStream


class ReportStreams(Protocol):
    def open_report(self, wake: Callable[[], None]) -> ReportStream:
        """Return a new stream. ``wake`` is called, in the event loop, when ``take`` has something.

        Raises NoLeader while this scheduler does not lead, OverQuota when there are too many streams.
        """


class LocalReportLinks:
    """Implements ``ReportLinks``."""

    def __init__(self, scheduler: ReportStreams, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock

    async def open(self) -> ReportLink:
        woken = asyncio.Event()
        return _LocalReportLink(self._scheduler.open_report(woken.set), woken)

    async def wait_leader_change(self, timeout_s: float) -> None:
        await self._clock.sleep(min(timeout_s, 0.2))

    async def close(self) -> None:
        pass


class _LocalReportLink:
    """Implements ``ReportLink``."""

    def __init__(self, stream: ReportStream, woken: asyncio.Event) -> None:
        self._stream = stream
        self._woken = woken
        self._closed = False

    @property
    def epoch(self) -> int:
        return self._stream.epoch

    async def send(self, number: int, report: ReportSnapshot) -> None:
        self._stream.report(number, report)

    async def receive(self) -> ReportAnswer:
        """Return the next answer. The end of an in-process stream wakes its reader."""
        while not self._closed:
            answer = self._stream.take()
            if answer is not None:
                return answer
            await self._woken.wait()
            self._woken.clear()
        raise NoLeader("the stream was closed on this side")

    async def close(self) -> None:
        self._closed = True
        self._stream.close()
        self._woken.set()
