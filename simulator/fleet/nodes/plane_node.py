"""The processes that act while they lead: a control plane's, and a scheduler's."""

from __future__ import annotations

from typing import Final

from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import FleetRecord
from services.controlplane.fleet import decode as decode_fleet
from services.controlplane.objectives.store import SliStore
from services.controlplane.reconciler import Reconciler
from services.controlplane.rollouts.controller import RolloutController
from services.controlplane.scaling.controller import ScalingController
from services.controlplane.scaling.nodes import NodeController
from services.controlplane.telemetry import NodeTelemetry, ScalingTelemetry
from services.core.errors import NoLeader
from services.core.estimates.pool_load import PoolLoad
from services.core.records import OBJECTIVES, ROOT, Leader, Objective, dump, leader_key, load
from services.ports.store import Entry, Store
from services.runtime.fleet_state.indexes import ObjectiveIndex
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from services.scheduler.service import SchedulerService
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term import Term
from simulator.fleet.grant_watch import GrantWatch
from simulator.fleet.nodes.gateway_node import TICKET_KEY
from simulator.fleet.nodes.node_provider import RemoteNodes
from simulator.fleet.nodes.shared_stores import RemoteLedger
from simulator.fleet.rollout_watch import LEADER_KEY, RolloutListener, SignedStore
from simulator.fleet.spec import FleetSpec, ScalingSpec
from simulator.kernel.links.scheduler import serve_scheduler
from simulator.kernel.links.store_link import SimStore
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process


class PlaneNode:
    """One life of a control plane. Built inside its process."""

    def __init__(self, spec: FleetSpec, process: Process, network: Network, watch: RolloutListener) -> None:
        self.process = process
        self.name = process.name
        clock, rng = process.clock, process.rng
        self.store = self.make_store(network, watch)
        leader = Leader(leader_id=f"{process.name}/{process.life}", address=process.name)
        self.election = self.make_election(dump(leader), spec.leader_ttl_s)
        self.informer: Informer[FleetRecord | None] = Informer(self.store, ROOT, decode_fleet, clock, rng=rng)
        self._objectives = Informer(self.store, OBJECTIVES, _objective, clock, rng=rng)
        index = ObjectiveIndex(self._objectives)
        ledger = RemoteLedger(process, network)
        self.slis = SliStore(ledger, clock, self.election, lambda: index.by_class)
        self.reconciler = Reconciler(
            self.store,
            self.informer,
            self.election,
            clock,
            events=EventRecorder(self.store, clock),
            probes=self.slis.probes,
        )
        self.controller = self.make_controller()
        self._schedulers = SchedulerDirectory(self.store, clock, rng=rng)
        self._loads = RemoteLoads(process, network, self._schedulers)
        self._scaled = spec.scaling is not None
        if spec.scaling is not None:
            self.scaling = self.make_scaling(spec.scaling)
            self.nodes = self.make_nodes(spec.scaling, RemoteNodes(process, network))
        network.listen(process, process.name, lambda connection: None, answers=self.slis)

    # What a test overrides with something broken.

    def make_store(self, network: Network, watch: RolloutListener) -> Store:
        return SignedStore(self.process, network, watch)

    def make_election(self, record: bytes, ttl_s: int) -> Election:
        process = self.process
        return Election(self.store, LEADER_KEY, record, ttl_s, process.clock, rng=process.rng)

    def make_controller(self) -> RolloutController:
        return RolloutController(self.store, self.informer, self.election, self.process.clock, slis=self.slis)

    def make_scaling(self, spec: ScalingSpec) -> ScalingController:
        return ScalingController(
            self.store,
            self.informer,
            self.election,
            self.process.clock,
            loads=self._loads,
            burn_of=lambda _: 0.0,
            batches=tuple,
            tuning=spec.tuning,
            telemetry=ScalingTelemetry(),
        )

    def make_nodes(self, spec: ScalingSpec, provider: RemoteNodes) -> NodeController:
        return NodeController(
            self.store,
            self.informer,
            self.election,
            self.process.clock,
            provider=provider,
            limits=spec.nodes,
            new_id=self.process.ids.request_id,
            telemetry=NodeTelemetry(),
            growth_variance=lambda: 0.0,
        )

    def start(self) -> None:
        """Begin the tasks of the process."""
        spawn = self.process.supervisor.spawn
        if self._scaled:
            spawn("scheduler directory", self._schedulers.run())
            spawn("scaling", self.scaling.run())
            spawn("nodes", self.nodes.run())
        spawn("fleet informer", self.informer.run())
        spawn("objectives", self._objectives.run())
        spawn("election", self.election.run())
        spawn("reconciler", self.reconciler.run())
        spawn("rollouts", self.controller.run())
        spawn("service level indicators", self.slis.run())

    @property
    def leads(self) -> bool:
        """It certainly leads and runs."""
        return self.process.running and self.election.epoch is not None


_LOADS_S: Final = 3.0  # the timeout of adapters.grpc.leader_calls
_LOADS_PAGE: Final = 1000


class RemoteLoads:
    """Implements the scaling controller's ``Loads`` over the network."""

    def __init__(self, process: Process, network: Network, directory: SchedulerDirectory) -> None:
        self._process = process
        self._network = network
        self._directory = directory

    async def __call__(self) -> dict[str, PoolLoad]:
        leader = self._directory.leader
        if leader is None:
            raise NoLeader("no scheduler leads", retry_after_s=1.0)

        async def read(service: SchedulerService) -> dict[str, PoolLoad]:
            _, pools, _ = service.loads(size=_LOADS_PAGE, token="")
            return {pool.version_digest: pool.load for pool in pools if pool.load is not None}

        try:
            return await self._network.ask(self._process, leader.address, read, within_s=_LOADS_S)
        except Unreachable as error:
            raise NoLeader("the scheduler does not answer", retry_after_s=1.0) from error


def _objective(entry: Entry) -> Objective:
    return load(entry.value, Objective)


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
