"""A gateway's process: the production service over the simulated network."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypedDict

from fairway.v1 import inference_pb2
from services.adapters.links.leader_streams import StreamPlacementLinks
from services.adapters.links.muxed_placement import MuxedPlacement
from services.adapters.links.muxed_workers import MuxedWorkers
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.adapters.quarantine import StoreQuarantine
from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.controlplane.objectives.store import SliStore
from services.core.arms import SliReceipt, SliReport
from services.core.errors import FairwayError, NoLeader, Unavailable
from services.core.fixed_cost.rows import RawTensor, RowsRequest
from services.core.generation import Constraint, Principal
from services.core.manifest import Manifest
from services.core.records import (
    DEPLOYMENTS,
    KEYS,
    QUARANTINE,
    SCALED,
    TENANTS,
    WORKERS,
    ApiKey,
    Deployment,
    KeyRole,
    Record,
    Tenant,
    Worker,
    load,
)
from services.core.rollouts.routes import ROUTES, ModelRoute
from services.core.scaling import Scaled
from services.gateway.events import Handle, Received, RequestSink
from services.gateway.fallback import FallbackSettings, GatewayFallback
from services.gateway.idempotency.service import IdempotentService
from services.gateway.idempotency.telemetry import KeyedTelemetry
from services.gateway.idempotency.types import KeyedLimits, KeyedPorts
from services.gateway.poison import PoisonGate
from services.gateway.requests.validate import Validator
from services.gateway.rows.leases import GatewayLeases
from services.gateway.rows.runner import LeasedRows
from services.gateway.service import GatewayService, drain
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.slis import SliRecorder, SliReporter
from services.gateway.splits import Splits
from services.gateway.telemetry import GatewayTelemetry
from services.gateway.text.encoder import TextEncoder
from services.gateway.text.row_encoder import RowEncoder, load_version, rows_of
from services.gateway.text.text_model import (
    Conversation,
    EncodedRows,
    EncodedText,
    OpenFolder,
    PictureFile,
    Pixels,
    RowTexts,
    TextModel,
    TokenRun,
)
from services.gateway.text.tokenise import PrefixNames
from services.ports.clock import Clock
from services.ports.placement import FallbackPlacer
from services.ports.poison.quarantine import Quarantine, Quarantined
from services.ports.store import Entry, Store
from services.ports.worker import WorkerClient
from services.rpc.convert.slis import report_from_proto, report_to_proto
from services.rpc.status import by_reason
from services.runtime.fleet_state.informer import Informer, Versioned
from services.runtime.identity import KeyDirectory
from services.runtime.secrets import issue_ticket
from services.runtime.telemetry.metrics import Metrics
from simulator.fleet.clients.row_client import RowsEnded, SimRows
from simulator.fleet.nodes.shared_stores import RedisLink, RemoteLimiter, RemoteRecords
from simulator.fleet.rollout_watch import WatchedCatalog
from simulator.fleet.spec import ROWS_DIGEST, ROWS_MODEL, FleetSpec
from simulator.kernel.links.store_link import SimStore
from simulator.kernel.links.streams import SimStreams
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process


class LocalTexts:
    """Implements ``Texts`` in the executor's threads, without bounds."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor = executor
        self._clock = clock
        self._encoders: dict[str, TextEncoder | RowEncoder] = {}

    async def load(self, version_digest: str, folder: OpenFolder) -> TextModel:
        loop = asyncio.get_running_loop()
        async with folder() as path:
            encoder = await loop.run_in_executor(
                self._executor, load_version, path, version_digest, self._clock
            )
        self._encoders[version_digest] = encoder
        return encoder.model

    def unload(self, version_digest: str) -> None:
        self._encoders.pop(version_digest, None)

    async def read(
        self, model: TextModel, tenant_id: str, text: str | Conversation, *, size_bytes: int
    ) -> EncodedText:
        encoder = self._encoder(model)
        assert isinstance(encoder, TextEncoder), "a prompt of a fixed-cost model"
        loop = asyncio.get_running_loop()
        if isinstance(text, str):
            ids = await loop.run_in_executor(self._executor, encoder.encode_prompt, text)
        else:
            ids = await loop.run_in_executor(
                self._executor, encoder.encode_chat, text.messages, text.variables, text.tools
            )
        return EncodedText(len(ids), ids if len(ids) <= model.max_context_tokens else ())

    async def decode(self, model: TextModel, tenant_id: str, run: TokenRun) -> str:
        decode = self._encoder(model).decode
        return await asyncio.get_running_loop().run_in_executor(self._executor, decode, run.ids)

    async def read_rows(
        self, model: TextModel, tenant_id: str, rows: RowTexts, *, size_bytes: int
    ) -> EncodedRows:
        encoder = self._encoder(model)
        encode = rows_of(encoder).encode_rows
        return await asyncio.get_running_loop().run_in_executor(self._executor, encode, rows)

    async def read_picture(self, model: TextModel, tenant_id: str, picture: PictureFile) -> Pixels:
        decode = rows_of(self._encoder(model)).decode_picture
        return await asyncio.get_running_loop().run_in_executor(self._executor, decode, picture)

    async def check(self, model: TextModel, tenant_id: str, constraint: Constraint) -> Constraint:
        encoder = self._encoder(model)
        assert isinstance(encoder, TextEncoder), "a constraint of a fixed-cost model"
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, encoder.open_grammars)
        return await loop.run_in_executor(self._executor, encoder.check, constraint)

    def _encoder(self, model: TextModel) -> TextEncoder | RowEncoder:
        encoder = self._encoders.get(model.version_digest)
        if encoder is None:
            raise Unavailable("the version was given up", retry_after_s=0.0)
        return encoder


_REPORT_S: Final = 10.0  # the interval of adapters.grpc.slis


class RemoteSlis:
    """Implements the gateway's ``SliReports``. Reports are encoded, so that no sums are shared."""

    def __init__(self, process: Process, network: Network, directory: SchedulerDirectory) -> None:
        self._process = process
        self._network = network
        self._directory = directory

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        leader = self._directory.leader
        if leader is None:
            raise NoLeader("no control plane leads", retry_after_s=1.0)
        messages = [report_to_proto(one) for one in reports]
        sent_unix_s = self._process.clock.unix_s()

        async def count(slis: SliStore) -> SliReceipt:
            received = tuple(map(report_from_proto, messages))
            return slis.report(source, first, oldest, received, sent_unix_s=sent_unix_s)

        try:
            return await self._network.ask(self._process, leader.address, count, within_s=_REPORT_S)
        except Unreachable as error:
            raise NoLeader("the control plane does not answer", retry_after_s=1.0) from error


TICKET_KEY: Final = b"the simulation's ticket key"
_PREFIX_SECRET: Final = b"the simulation's prefix secret"
_QUARANTINE_SECRET: Final = b"the simulation's quarantine"
_NAMES_SECRET: Final = b"the simulation's record names"
_MODEL_FILES: Final = Path(__file__).parent / "model"


def key_name(tenant: str) -> str:
    """Return the name of the tenant's one API key."""
    return f"key-{tenant}"


class _Parts(TypedDict):
    """The arguments of both kinds of service."""

    validator: Validator
    identity: KeyDirectory
    catalog: WatchedCatalog
    ports: Ports
    limits: GatewayLimits


class GatewayNode:
    """One life of a gateway. Implements ``session.Door``; built inside its process."""

    catalog_type: ClassVar[type[WatchedCatalog]] = WatchedCatalog

    def __init__(self, spec: FleetSpec, process: Process, network: Network) -> None:
        self.process = process
        self.name = process.name
        self.draining = False
        clock = process.clock
        store = SimStore(process, network)
        redis = RedisLink(process, network)
        self.limiter = GatewayLimiter(RemoteLimiter(redis), clock)
        directory = SchedulerDirectory(store, clock, rng=process.rng)
        gateway_id = f"{process.name}/{process.ids.request_id()}"
        streams = SimStreams(process, network)
        self._open_links(spec, streams, StreamPlacementLinks(streams, directory, gateway_id), gateway_id)
        self._informers = _Informers(store, process)
        self.splits = self.make_splits()
        self.catalog = catalog = self.catalog_type(
            self._informers.deployments,
            self._informers.workers,
            _BundledFiles(),
            clock,
            texts=LocalTexts(Executor(), clock),
            splits=self.splits,
            scaled=_NoRecords() if spec.scaling is None else self._informers.scaled,
            sized=_NoRecords(),
        )
        catalog.gateway = self.name
        if spec.scaling is not None:
            self._informers.followed.append(self._informers.scaled)
        identity = KeyDirectory(self._informers.keys, self._informers.tenants, clock)
        self._directory = directory
        slis = SliRecorder()
        self._planes = SchedulerDirectory(store, clock, role="controlplane", rng=process.rng)
        remote = RemoteSlis(process, network, self._planes)
        self._reporter = SliReporter(slis, remote, clock, gateway_id) if spec.planes else None
        limits, telemetry = self.make_limits(spec), GatewayTelemetry(clock=clock, slis=slis)
        parts = _Parts(
            validator=Validator(
                catalog,
                identity,
                process.rng,
                prefixes=PrefixNames(_PREFIX_SECRET, Executor()),
            ),
            identity=identity,
            catalog=catalog,
            ports=self.make_judged(
                replace(
                    self._ports(telemetry, self.make_quarantine(store)),
                    serves=catalog.serves,
                    waking=catalog.waking,
                )
            ),
            limits=limits,
        )
        self._keyed: IdempotentService | None = None
        self.service: GatewayService
        if spec.idempotency:
            keyed = self._keyed_ports(RemoteRecords(redis), gateway_id, telemetry.metrics, limits)
            self.service = self._keyed = IdempotentService(keyed, **parts)
        else:
            self.service = GatewayService(**parts)

    def _open_links(
        self, spec: FleetSpec, streams: SimStreams, links: StreamPlacementLinks, gateway_id: str
    ) -> None:
        """Make the links to the leader and the workers, and what runs rows over them."""
        process, clock, supervisor = self.process, self.process.clock, self.process.supervisor
        fallback, self.leases = self.make_fallback(spec), self.make_leases()
        self.placement = MuxedPlacement(
            links, clock, supervisor, process.rng, fallback=fallback, on_frame=self.leases.on_frame
        )
        workers = MuxedWorkers(
            streams,
            gateway_id,
            clock,
            supervisor,
            unsent=self.placement.give_back,
            withdrawn=lambda withdrawal: self.splits.withdraw(withdrawal),
        )
        self.workers = self.make_workers(workers)
        self.rows = LeasedRows(workers, self.placement, self.leases, clock, supervisor)
        self._tenants = {tenant.name: tenant for tenant in spec.tenants}

    def _ports(self, telemetry: GatewayTelemetry, quarantine: Quarantine) -> Ports:
        process = self.process
        return Ports(
            limiter=self.limiter,
            placement=self.placement,
            workers=self.workers,
            clock=process.clock,
            supervisor=process.supervisor,
            rng=process.rng,
            sign_ticket=partial(issue_ticket, TICKET_KEY),
            new_incident=process.ids.incident_id,
            error_of=by_reason,
            telemetry=telemetry,
            pressure=self.placement.pressure,
            poisons=PoisonGate(
                quarantine,
                secret=_QUARANTINE_SECRET,
                clock=process.clock,
                supervisor=process.supervisor,
                telemetry=telemetry,
            ),
        )

    def _keyed_ports(
        self, records: RemoteRecords, gateway_id: str, metrics: Metrics, limits: GatewayLimits
    ) -> KeyedPorts:
        return KeyedPorts(
            store=records,
            limiter=self.limiter,
            clock=self.process.clock,
            telemetry=KeyedTelemetry(metrics),
            new_incident=self.process.ids.incident_id,
            names_secret=_NAMES_SECRET,
            owner=gateway_id,
            window_tokens=limits.window_tokens,
            limits=KeyedLimits(),
        )

    # What a test overrides with something broken.

    def make_workers(self, workers: WorkerClient) -> WorkerClient:
        """Return how this gateway runs sequences on workers."""
        return workers

    def make_leases(self) -> GatewayLeases:
        """Return what this gateway keeps of its slots."""
        return GatewayLeases(self.process.clock)

    def make_fallback(self, spec: FleetSpec) -> FallbackPlacer:
        """Return how this gateway places while no leader answers."""
        predicted = spec.term.queue.predicted_output_tokens
        return GatewayFallback(self.process.rng, FallbackSettings(predicted_output_tokens=predicted))

    def make_quarantine(self, store: Store) -> Quarantine:
        """Return the fleet's quarantine."""
        return StoreQuarantine(store, self._informers.quarantine, self.process.clock)

    def make_judged(self, ports: Ports) -> Ports:
        """Return the ports with what judges texts; by default nothing does."""
        return ports

    def make_splits(self) -> Splits:
        """Return how this gateway reads the routes."""
        return Splits(self.routes)

    def make_limits(self, spec: FleetSpec) -> GatewayLimits:
        return spec.gateway

    def start(self) -> None:
        """Begin the tasks of the process."""
        self._informers.start()
        spawn = self.process.supervisor.spawn
        spawn("scheduler directory", self._directory.run())
        spawn("warm text models", self.catalog.warm_forever())
        spawn("renew", self.service.renew_forever())
        if self._keyed is not None:
            spawn("flush records", self._keyed.flush_forever())
        if self._reporter is not None:
            spawn("control plane directory", self._planes.run())
            spawn("service level indicators", self._reporter.run())
        self.placement.start()

    @property
    def routes(self) -> Informer[ModelRoute]:
        """Its view of the routes."""
        return self._informers.routes

    @property
    def versions(self) -> Informer[Worker]:
        """Its view of the workers."""
        return self._informers.workers

    @property
    def ready(self) -> bool:
        """It has the fleet and the address for placement requests."""
        return self._informers.synced and self.placement.connected

    async def drain(self, timeout_s: float) -> None:
        """Stop as on SIGTERM: nothing new, what runs until the time is over."""
        self.draining = True
        await drain(self.service, self.process.clock, timeout_s)

    # --- for its clients ---------------------------------------------------------------------------

    @property
    def reachable(self) -> bool:
        return self.process.alive and not self.draining and self._informers.synced

    def enter(self, call: Callable[[], None]) -> None:
        self.process.call_soon(call)

    def run_rows(
        self, sim_rows: SimRows, rows: tuple[tuple[RawTensor, ...], ...], ended: RowsEnded
    ) -> asyncio.Task[None]:
        """Run rows as an admitted sim_rows; cancelling the task withdraws them."""
        tenant = self._tenants[sim_rows.tenant]
        within_s = math.inf if sim_rows.deadline_s is None else sim_rows.deadline_s
        request = RowsRequest(
            self.process.ids.request_id(),
            sim_rows.tenant,
            ROWS_MODEL,
            ROWS_DIGEST,
            rows,
            sim_rows.priority,
            tenant_weight=tenant.weight,
            node_group=tenant.node_group,
            isolation_waits=tenant.isolation_waits,
            deadline_s=self.process.clock.monotonic_s() + within_s,
        )
        return self.process.spawn("rows", self._run_rows(request, ended))

    async def _run_rows(self, request: RowsRequest, ended: RowsEnded) -> None:
        try:
            found = await self.rows.run(request)
        except FairwayError as error:
            ended(error)
        else:
            ended(found)

    def submit(
        self, tenant: str, generation: inference_pb2.Generation, sink: RequestSink, *, attempt: int = 0
    ) -> Handle:
        clock, request_id = self.process.clock, self.process.ids.request_id()
        received = Received(clock.monotonic_s(), int(clock.unix_s() * 1e6), request_id, attempt=attempt)
        principal = Principal(key_name(tenant), KeyRole.TENANT, tenant)
        return self.service.submit(principal, generation, sink, received=received)


class _Informers:
    """What a gateway follows in the store."""

    def __init__(self, store: SimStore, process: Process) -> None:
        self._process = process

        def informer(prefix: str, kind: type[Record]) -> Informer[Record]:
            def decode(entry: Entry) -> Record:
                return load(entry.value, kind)

            return Informer(store, prefix, decode, process.clock, rng=process.rng)

        self.deployments = informer(DEPLOYMENTS, Deployment)
        self.workers = informer(WORKERS, Worker)
        self.tenants = informer(TENANTS, Tenant)
        self.keys = informer(KEYS, ApiKey)
        self.routes = informer(ROUTES, ModelRoute)
        self.quarantine = informer(QUARANTINE, Quarantined)
        self.scaled = informer(SCALED, Scaled)
        self.followed: list[Informer[Any]] = [
            self.deployments,
            self.workers,
            self.tenants,
            self.keys,
            self.routes,
            self.quarantine,
        ]

    def start(self) -> None:
        for informer in self.followed:
            self._process.supervisor.spawn(f"informer {informer.prefix}", informer.run())

    @property
    def synced(self) -> bool:
        return all(informer.synced for informer in self.followed if informer is not self.quarantine)


class _NoRecords:
    """Implements ``RecordView`` for fleets whose deployment has no scaling bounds, or no alias."""

    view: Mapping[str, Versioned[Any]] = MappingProxyType({})


class _BundledFiles:
    """Implements ``catalog.ModelFilesPort``: the one simulated version lies next to this module."""

    async def fetch(self, model: str, digest: str, *, only: Callable[[str], bool] | None = None) -> Path:
        return _MODEL_FILES

    async def readable(self, model: str, digest: str) -> Manifest:
        return Manifest(())

    def pin(self, folder: Path) -> None: ...

    def unpin(self, folder: Path) -> None: ...
