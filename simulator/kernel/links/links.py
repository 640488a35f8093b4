"""The production ports over the simulated network."""

from __future__ import annotations

from simulator.kernel.links.placement_links import SimPlacementLinks
from simulator.kernel.links.report_links import SimReportLinks
from simulator.kernel.links.scheduler_server import serve_scheduler
from simulator.kernel.links.store_link import SimStore, StoreServer
from simulator.kernel.links.worker_client import SimWorkers
from simulator.kernel.links.worker_server import serve_worker

__all__ = [
    "SimPlacementLinks", "SimReportLinks", "SimStore", "SimWorkers", "StoreServer", "serve_scheduler",
    "serve_worker",
]  # fmt: skip
