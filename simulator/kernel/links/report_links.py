"""A worker's link to the leading scheduler, over the simulated network."""

from __future__ import annotations

from services.adapters.links.reporter import ReportLink
from services.core.fleet import ReportSnapshot
from services.ports.report_stream import ReportAnswer
from simulator.kernel.links.leader_links import SimLink, SimLinks
from simulator.kernel.links.messages import NumberedReport, ReportHello


class SimReportLinks(SimLinks):
    """Implements ``adapters.reporter.ReportLinks``."""

    async def open(self) -> ReportLink:
        connection, first = await self._connect(ReportHello())
        return _SimReportLink(connection, first.epoch, self._silence_s)


class _SimReportLink(SimLink[ReportAnswer]):
    async def send(self, number: int, report: ReportSnapshot) -> None:
        await self._send(NumberedReport(number, report))
