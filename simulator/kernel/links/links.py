"""The production ports over the simulated network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.adapters.links.leader_links import SILENCE_S
from services.adapters.links.muxed_placement import PlacementLink
from services.adapters.links.reporter import ReportLink
from services.adapters.links.scheduler_directory import LeaderDirectory
from services.core.errors import NoLeader
from services.core.fleet import PlacementFrame, ReportSnapshot
from services.core.generation import PlaceSpec
from services.ports.report_stream import ReportAnswer
from simulator.kernel.links.leader_links import SimLink, SimLinks
from simulator.kernel.links.messages import ConnectHello, Leads, NumberedReport, Places, ReportHello
from simulator.kernel.links.scheduler_server import serve_scheduler
from simulator.kernel.links.store_link import SimStore, StoreServer
from simulator.kernel.links.worker_client import SimWorkers
from simulator.kernel.links.worker_server import serve_worker
from simulator.kernel.network import Network
from simulator.kernel.process import Process

__all__ = [
    "SimPlacementLinks", "SimReportLinks", "SimStore", "SimWorkers", "StoreServer", "serve_scheduler",
    "serve_worker",
]  # fmt: skip


class SimReportLinks(SimLinks):
    """Implements ``adapters.reporter.ReportLinks``."""

    async def open(self) -> ReportLink:
        connection, first = await self._connect(ReportHello())
        return _SimReportLink(connection, first.epoch, self._silence_s)


class _SimReportLink(SimLink[ReportAnswer]):
    async def send(self, number: int, report: ReportSnapshot) -> None:
        await self._send(NumberedReport(number, report))


class SimPlacementLinks(SimLinks):
    """Implements ``adapters.muxed_placement.PlacementLinks``."""

    def __init__(
        self,
        process: Process,
        network: Network,
        directory: LeaderDirectory,
        gateway_id: str,
        *,
        zone: str = "",
        silence_s: float = SILENCE_S,
    ) -> None:
        super().__init__(process, network, directory, silence_s=silence_s)
        self._hello = ConnectHello(gateway_id, zone)

    async def open(self) -> PlacementLink:
        connection, first = await self._connect(self._hello)
        if not isinstance(first, Leads):
            connection.close()
            raise NoLeader("the scheduler did not confirm that it leads")
        return _SimPlacementLink(connection, first.epoch, self._silence_s)


class _SimPlacementLink(SimLink[PlacementFrame]):
    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        left = tuple((number, replace(spec, queue_ttl_s=ttl_s)) for number, spec, ttl_s in places)
        await self._send(Places(left, tuple(cancelled)))
