"""A scheduler's process: a candidate for the leadership, and the production service while it leads."""

from __future__ import annotations

from services.core.records import Leader, dump, leader_key
from services.runtime.fleet_state.leadership import Election
from services.scheduler.service import SchedulerService
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import Term
from simulator.fleet.grant_watch import GrantWatch
from simulator.fleet.nodes.gateway_node import TICKET_KEY
from simulator.fleet.spec import FleetSpec
from simulator.kernel.links.scheduler import serve_scheduler
from simulator.kernel.links.store_link import SimStore
from simulator.kernel.network import Network
from simulator.kernel.process import Process


class SchedulerNode:
    """One life of a scheduler. Built inside its process."""

    def __init__(
        self,
        spec: FleetSpec,
        process: Process,
        network: Network,
        watch: GrantWatch,
    ) -> None:
        self.process = process
        self.name = process.name
        clock, rng = process.clock, process.rng
        self.service = self.make_service(spec, watch.telemetry(clock))
        leader = Leader(leader_id=process.ids.request_id(), address=process.name)
        self.election = Election(
            SimStore(process, network),
            leader_key("scheduler"),
            dump(leader),
            spec.leader_ttl_s,
            clock,
            rng=rng,
        )
        serve_scheduler(process, network, process.name, self.service)

    def make_service(self, spec: FleetSpec, telemetry: SchedulerTelemetry) -> SchedulerService:
        """Return the service of this life; a test overrides it with one that is broken."""
        process = self.process
        return SchedulerService(TICKET_KEY, spec.term, process.clock, process.rng, telemetry=telemetry)

    def start(self) -> None:
        """Begin the tasks of the process."""
        self.process.supervisor.spawn("election", self.election.run())
        self.process.supervisor.spawn("scheduler", self.service.run(self.election))

    @property
    def term(self) -> Term | None:
        """The term that it leads, None while it does not."""
        return self.service.term if self.process.alive else None
