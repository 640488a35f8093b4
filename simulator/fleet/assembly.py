"""The processes of a simulated fleet, by name: their start, end and restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final

from services.adapters.memory.store import MemoryStore
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    KEYS,
    SCALED,
    TENANTS,
    ApiKey,
    AssignedVersion,
    Assignment,
    Degrade,
    Deployment,
    KeyRole,
    Meta,
    Tenant,
    VersionRecord,
    dump,
    version_key,
)
from services.core.scaling import Scaled
from services.ports.store import Put
from services.scheduler.term import Term
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.clients.row_client import RowClients, SimRows
from simulator.fleet.clients.session import Clients
from simulator.fleet.grant_watch import EventTrace, GrantWatch
from simulator.fleet.nodes.gateway_node import GatewayNode, key_name
from simulator.fleet.nodes.node_provider import PROVIDER, SimNodes, serve_nodes
from simulator.fleet.nodes.plane_node import PlaneNode, SchedulerNode
from simulator.fleet.nodes.shared_stores import LEDGER, REDIS, LedgerObjects, Redis, serve_ledger, serve_redis
from simulator.fleet.nodes.worker_node import WorkerNode
from simulator.fleet.rollout_watch import RolloutWatch
from simulator.fleet.spec import MODEL, VERSION_DIGEST, FleetSpec, ScalingSpec
from simulator.fleet.violations import Violations
from simulator.kernel.links.store_link import StoreServer
from simulator.kernel.loop import VirtualTimeLoop
from simulator.kernel.network import Latency, Network
from simulator.kernel.process import Process, Skew
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter

STORE: Final = "store"
_LOOK_S: Final = 0.05
_START_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the fleet is made of. Tests of the invariants substitute a broken variant."""

    gateway: type[GatewayNode] = GatewayNode
    scheduler: type[SchedulerNode] = SchedulerNode
    worker: type[WorkerNode] = WorkerNode
    plane: type[PlaneNode] = PlaneNode


class SimFleet:
    """All components of one run. Constructed, started, loaded and settled inside the simulation's loop."""

    def __init__(
        self,
        spec: FleetSpec,
        loop: VirtualTimeLoop,
        *,
        on_record: Callable[[RequestRecord], None],
        trace: EventTrace,
        parts: Parts | None = None,
    ) -> None:
        self.spec = spec
        self.loop = loop
        self.trace = trace
        self.violations = Violations(lambda: loop.now_s)
        self.load_began_s = 0.0
        self.released: dict[str, int] = {}  # sequences that ran on workers as their nodes went, by worker
        self.reported_crashes: dict[tuple[str, int], None] = {}
        self.gateways: dict[str, GatewayNode] = {}
        self.schedulers: dict[str, SchedulerNode] = {}
        self.workers: dict[str, WorkerNode] = {}
        self.planes: dict[str, PlaneNode] = {}
        self.processes: dict[str, Process] = {}
        self._parts = parts if parts is not None else Parts()
        self._rng = Random(f"fleet {spec.seed}")
        self._on_record = on_record
        link = spec.link
        self.network = Network(
            loop, Random(f"network {spec.seed}"), Latency(base_s=link.base_s, jitter_s=link.jitter_s)
        )
        self.grants = GrantWatch()
        self.routes = RolloutWatch()
        self._serve_store()
        self._serve_redis()
        if spec.planes:
            self._serve_ledger()
        if spec.scaling is not None:
            self._serve_nodes(spec.scaling)
        self.clients = Clients(
            loop,
            lambda: self.gateways.values(),
            Random(f"clients {spec.seed}"),
            self.violations,
            self._ended,
        )
        self.rows = RowClients(self.clients, self._rows_door, self.violations)
        self._names = (
            *(f"scheduler-{number}" for number in range(spec.schedulers)),
            *(f"worker-{number}" for number in range(spec.workers)),
            *(f"gateway-{number}" for number in range(spec.gateways)),
            *(f"plane-{number}" for number in range(spec.planes)),
        )

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return once a scheduler leads, every worker has reported to it and every gateway uses it."""
        await self._write_records()
        for name in self._names:
            self.processes[name] = self._process(name)
            self._boot(name)
        deadline_s = self.loop.now_s + _START_S
        while not self.ready:
            assert self.loop.now_s < deadline_s, f"the fleet did not start: {self._standing()}"
            await self.wait(_LOOK_S)
        self.load_began_s = self.loop.now_s

    async def send(self, load: Iterable[SimRequest | SimRows]) -> None:
        """Send each request at its arrival, in order of arrival, and return after the last."""
        for request in load:
            ahead_s = self.load_began_s + request.arrival_s - self.loop.now_s
            if ahead_s > 0:
                await self.wait(ahead_s)
            if isinstance(request, SimRows):
                self.rows.send(request)
            else:
                self.clients.send(request)

    async def wait(self, seconds: float) -> None:
        """Return after so many seconds of the simulation."""
        await asyncio.sleep(seconds)

    @property
    def ready(self) -> bool:
        """Every process runs and has discovered the others."""
        term = self.term
        if term is None or term.fleet.workers_by_state["placed_on"] < len(self.workers):
            return False
        if self.planes and (self.plane is None or self._serving(term) < self.spec.least_replicas):
            return False
        return all(node.process.running and node.ready for node in self.gateways.values())

    @property
    def term(self) -> Term | None:
        """The term of the scheduler that leads, None while none does."""
        leader = self.leader
        return None if leader is None else leader.term

    @property
    def leader(self) -> SchedulerNode | None:
        """The scheduler with the newest term; one that is paused may still think that it leads."""
        leading = [node for node in self.schedulers.values() if node.term is not None]
        return max(leading, key=_epoch, default=None)

    @property
    def plane(self) -> PlaneNode | None:
        """The control plane that leads, None while none certainly does."""
        return next((node for node in self.planes.values() if node.leads), None)

    @property
    def scaled(self) -> Scaled:
        """The decision that the leading control plane observes; that of the spec while there is none."""
        held = None if self.plane is None else self.plane.informer.view.get(SCALED + MODEL)
        if held is None or not isinstance(held.record, Scaled):
            return Scaled(MODEL, self.spec.replicas or self.spec.workers)
        return held.record

    def _rows_door(self) -> GatewayNode | None:
        door = self.clients.door()
        return None if door is None else self.gateways[door.name]

    def _serving(self, term: Term) -> int:
        """Return how many replicas are READY for requests, of the version that has the most."""
        found = (term.fleet.candidates(version.digest) for version in self.spec.versions)
        return max(sum(one.ready for one in workers.values()) for workers in found)

    # --- nodes -------------------------------------------------------------------------------------

    def add_worker(self, name: str) -> None:
        """Start the worker of a node that was ordered."""
        self.trace.note(name, "ordered")
        self.processes[name] = self._process(name)
        self._boot(name)

    def remove_worker(self, name: str) -> None:
        """End a worker with its node; it never starts again."""
        self.released[name] = self.workers[name].host.running if self.processes[name].alive else 0
        self.crash(name)
        del self.workers[name]

    # --- processes --------------------------------------------------------------------------------

    def crash(self, name: str, *, silent: bool = False) -> None:
        """Kill a process. Its peers observe the broken connections, unless its machine is lost too."""
        self.trace.note(name, "crashed")
        self.processes[name].crash(silent=silent)
        if name in self.gateways:
            self.clients.gateway_lost(name)
            self.rows.gateway_lost(name)

    def restart(self, name: str) -> None:
        """Start the next life of a process that crashed, unless its node is gone."""
        if name in self.released:
            return
        self.trace.note(name, "restarted")
        self.processes[name] = self.processes[name].restart()
        self._boot(name)

    def _boot(self, name: str) -> None:
        process = self.processes[name]
        process.run(self._build, name, process)

    def _build(self, name: str, process: Process) -> None:
        if name == STORE:
            StoreServer(process, self.network, self.store)
        elif name == REDIS:
            serve_redis(process, self.network, self.redis)
        elif name == LEDGER:
            serve_ledger(process, self.network, self.ledger)
        elif name == PROVIDER:
            serve_nodes(process, self.network, self.provider)
        elif name.startswith("plane"):
            plane = self._parts.plane(self.spec, process, self.network, self.routes)
            self.planes[name] = plane
            plane.start()
        elif name.startswith("scheduler"):
            scheduler = self._parts.scheduler(self.spec, process, self.network, self.grants)
            self.schedulers[name] = scheduler
            scheduler.start()
        elif name.startswith("gateway"):
            gateway = self._parts.gateway(self.spec, process, self.network)
            gateway.catalog.watch = self.routes
            self.gateways[name] = gateway
            gateway.start()
        else:
            worker = self._parts.worker(self.spec, process, self.network, self.grants)
            self.workers[name] = worker
            worker.start()

    def _process(self, name: str) -> Process:
        return Process(name, self.loop, self._rng, skew=self._skew())

    def _skew(self) -> Skew:
        rng, skewed = self._rng, self.spec.skewed
        drawn = Skew(
            rate=1.0 + rng.uniform(-1e-4, 1e-4),
            offset_s=rng.uniform(0.0, 1e5),
            unix_offset_s=rng.uniform(-0.5, 0.5),
        )
        return drawn if skewed else Skew()

    # --- stores -----------------------------------------------------------------------------------

    def _serve_store(self) -> None:
        process = self.processes[STORE] = self._process(STORE)
        self.store = process.run(MemoryStore, process.clock)
        self._boot(STORE)

    def _serve_redis(self) -> None:
        process = self.processes[REDIS] = self._process(REDIS)
        limiter = MemoryLimiter(process.clock, settled_keep_s=self.spec.settled_keep_s)
        self.redis = Redis(limiter, MemoryIdempotency(process.clock, limiter))
        self._boot(REDIS)

    def _serve_ledger(self) -> None:
        self.processes[LEDGER] = self._process(LEDGER)
        self.ledger = LedgerObjects()
        self._boot(LEDGER)

    def _serve_nodes(self, scaling: ScalingSpec) -> None:
        self.processes[PROVIDER] = self._process(PROVIDER)
        self.provider = SimNodes(
            scaling,
            self.loop,
            Random(f"nodes {self.spec.seed}"),
            launch=self.add_worker,
            stop=self.remove_worker,
        )
        self._boot(PROVIDER)

    async def _write_records(self) -> None:
        for spec in self.spec.tenants:
            tenant = Tenant(
                Meta(spec.name),
                requests_per_minute=spec.requests_per_minute,
                max_concurrency=spec.max_concurrency,
                weight=spec.weight,
                max_priority=spec.max_priority,
                committed_tokens_per_minute=spec.committed_tokens_per_minute,
                degrade=Degrade(max_output_tokens=spec.degraded_tokens),
                isolation=spec.isolation,
                isolation_waits=spec.isolation_waits,
                kv_share=spec.kv_share,
            )
            key = ApiKey(Meta(key_name(spec.name)), KeyRole.TENANT, "", spec.name)
            await self.store.commit(
                [Put(TENANTS + spec.name, dump(tenant)), Put(KEYS + key.meta.name, dump(key))]
            )
        replicas = self.spec.replicas or self.spec.workers
        scaling = None if self.spec.scaling is None else self.spec.scaling.bounds
        deployment = Deployment(
            Meta(MODEL), MODEL, "1", VERSION_DIGEST, replicas, executor="null", scaling=scaling
        )
        await self.store.commit([Put(DEPLOYMENTS + MODEL, dump(deployment))])
        if self.spec.planes:
            for version in self.spec.versions:
                record = VersionRecord(MODEL, version.digest, 0, 0.0)
                await self.store.commit([Put(version_key(MODEL, version.digest), dump(record))])
            return
        sequences = (AssignedVersion(MODEL, MODEL, VERSION_DIGEST, executor="null"),)
        for number in range(self.spec.workers):
            name = f"worker-{number}"
            rows = tuple(
                AssignedVersion(version.deployment, version.model, version.version_digest)
                for version in self.spec.row_versions(number)
            )
            assigned = Assignment(name, sequences + rows, node_group=self.spec.group_of(number))
            await self.store.commit([Put(ASSIGNMENTS + name, dump(assigned))])

    def slots_held(self, tenant: str) -> int:
        """Return how many requests of a tenant hold a slot in Redis now, or once it runs again."""
        return self.redis.limiter.held(tenant)

    # --- ends -------------------------------------------------------------------------------------

    def _ended(self, record: RequestRecord) -> None:
        self.trace.note(
            f"request-{record.number}",
            "ended",
            f"{record.outcome} tokens={record.output_tokens} resumes={record.resumes} via={record.gateway}",
        )
        self._on_record(record)

    def _standing(self) -> str:
        term = self.term
        workers = "no leader" if term is None else str(term.fleet.workers_by_state)
        gateways = {name: node.ready for name, node in self.gateways.items()}
        return f"{workers}; gateways {gateways}"


def _epoch(node: SchedulerNode) -> int:
    term = node.term
    return 0 if term is None else term.epoch
