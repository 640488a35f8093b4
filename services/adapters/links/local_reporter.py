"""Report links to a scheduler in this process, over the streams that the servicer uses."""

from __future__ import annotations

import asyncio

from services.adapters.links.local_links import LocalLink, LocalLinks
from services.adapters.links.reporter import ReportLink
from services.core.fleet import ReportSnapshot
from services.ports.clock import Clock
from services.ports.report_stream import ReportAnswer, ReportStream, ReportStreams


class LocalReportLinks(LocalLinks):
    """Implements ``ReportLinks`` without a network."""

    def __init__(self, scheduler: ReportStreams, clock: Clock) -> None:
        super().__init__(clock)
        self._scheduler = scheduler

    async def open(self) -> ReportLink:
        woken = asyncio.Event()
        return _LocalReportLink(self._scheduler.open_report(woken.set), woken)


class _LocalReportLink(LocalLink[ReportStream, ReportAnswer]):
    async def send(self, number: int, report: ReportSnapshot) -> None:
        self._stream.report(number, report)
