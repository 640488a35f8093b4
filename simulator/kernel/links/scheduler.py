"""The scheduler's streams on the simulated network."""

from __future__ import annotations

from services.rpc.methods import CONNECT, REPORT
from services.scheduler.service import SchedulerService
from services.scheduler.servicer import SchedulerServicer
from simulator.kernel.links.streams import serve_stream
from simulator.kernel.network import Network
from simulator.kernel.process import Process


def serve_scheduler(process: Process, network: Network, address: str, service: SchedulerService) -> None:
    """Serve gateways and workers at the address with the production servicer, until the process crashes.

    Questions to the address are put to ``service``.
    """
    servicer = SchedulerServicer(service, process.clock, leader_id=process.name)
    serve_stream(process, network, address, CONNECT, servicer.serve_gateway)
    serve_stream(process, network, address, REPORT, servicer.serve_worker)
    network.listen(process, address, lambda connection: None, answers=service)
