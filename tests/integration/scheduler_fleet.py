"""A scheduler behind a real gRPC server, and workers that report to it: parts of the scheduler's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from fairway.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.leader_streams import StreamPlacementLinks, StreamReportLinks
from services.adapters.links.muxed_placement import MuxedPlacement, PlacementSettings
from services.adapters.links.reporter import Reporter, ReportLinks
from services.adapters.links.scheduler_directory import LeaderAddress, LeaderDirectory
from services.core.fleet import PoolSnapshot, ReportedSequence, ReportSnapshot, TenantTokens
from services.core.generation import Grant, PlaceSpec
from services.core.records import Priority
from services.ports.clock import Clock
from services.ports.placement import FallbackPlacer, PlacementClient
from services.rpc.server import RpcServer, RpcService
from services.runtime.clock import SystemClock
from services.runtime.secrets import Ticket, issue_ticket
from services.runtime.supervisor import Supervisor
from services.scheduler.service import SchedulerService
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.term import TermSettings
from tests.support.election import StaticElection

TICKET_KEY = b"k" * 32
TOKEN = "t" * 40
DIGEST = "sha256:" + "a" * 64


def place_spec(
    request_id: str = "req_1",
    *,
    prompt_tokens: int = 32,
    max_output_tokens: int = 32,
    queue_ttl_s: float = 5.0,
    digest: str = DIGEST,
    priority: Priority = Priority.STANDARD,
    arrival_unix_us: int | None = None,
    excluded_workers: tuple[str, ...] = (),
    key: bytes = TICKET_KEY,
    tenant: str = "acme",
) -> PlaceSpec:
    clock = SystemClock()
    ticket = Ticket(tenant, request_id, int(clock.unix_s()) + 600, 10**6, 16)
    return PlaceSpec(
        request_id=request_id,
        choice=0,
        tenant_id=tenant,
        priority=priority,
        model="tiny",
        version_digest=digest,
        route_revision=7,
        prompt_tokens=prompt_tokens,
        max_output_tokens=max_output_tokens,
        arrival_unix_us=round(clock.unix_s() * 1e6) if arrival_unix_us is None else arrival_unix_us,
        queue_ttl_s=queue_ttl_s,
        ticket=issue_ticket(key, ticket),
        excluded_workers=excluded_workers,
    )


async def granted(placement: PlacementClient, spec: PlaceSpec) -> Grant:
    """Return what a leader grants; a client without a fallback places in no other way."""
    grant = await placement.place(spec)
    assert isinstance(grant, Grant)
    return grant


class StaticDirectory:
    """Implements ``LeaderDirectory`` with what a test says."""

    def __init__(self) -> None:
        self.leader: LeaderAddress | None = None
        self._turned = asyncio.Event()

    def turn(self, leader: LeaderAddress | None) -> None:
        self.leader = leader
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    async def wait_changed(self, seen: LeaderAddress | None, timeout_s: float) -> LeaderAddress | None:
        try:
            async with asyncio.timeout(timeout_s):
                while self.leader == seen:
                    await self._turned.wait()
        except TimeoutError:
            pass
        return self.leader


def placement_over_grpc(
    directory: LeaderDirectory,
    gateway_id: str,
    clock: Clock,
    supervisor: Supervisor,
    rng: Random,
    settings: PlacementSettings | None = None,
    *,
    fallback: FallbackPlacer | None = None,
) -> MuxedPlacement:
    """Return a gateway's client of the scheduler that the directory names."""
    links = StreamPlacementLinks(GrpcStreams(TOKEN), directory, gateway_id)
    return MuxedPlacement(links, clock, supervisor, rng, settings, fallback=fallback)


class SchedulerNode:
    """One scheduler: service and gRPC server. It leads when the test says so."""

    def __init__(self, supervisor: Supervisor, settings: TermSettings | None = None) -> None:
        self.clock = SystemClock()
        self.election = StaticElection()
        self.service = SchedulerService(
            TICKET_KEY, settings if settings is not None else TermSettings(), self.clock, Random(1)
        )
        servicer = SchedulerServicer(self.service, self.clock, leader_id="s1", heartbeat_s=0.3)
        self.server = RpcServer(
            [
                RpcService(
                    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
                    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
                    servicer,
                )
            ],
            listen="127.0.0.1:0",
            internal_token=TOKEN,
            new_incident=lambda: "inc_1",
        )
        self._supervisor = supervisor
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def start(self) -> None:
        await self.server.start()
        self._task = self._supervisor.spawn("scheduler", self.service.run(self.election))

    async def stop(self) -> None:
        """As abrupt as a killed process is for its clients: the streams are cut."""
        await self.server.stop(0.0)
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))


class FakeWorker:
    """Keeps the books of a worker: honours grants like the agent, holds their blocks until told to end."""

    def __init__(self, worker_id: str, *, kv_blocks: int = 64, max_sequences: int = 64) -> None:
        self.worker_id = worker_id
        self.incarnation = 100
        self.kv_blocks = kv_blocks
        self.max_sequences = max_sequences
        self.ready = True
        self.draining = False
        self.epoch = 0
        self.running: dict[tuple[int, int], Grant] = {}
        self.refused: list[Grant] = []
        self._seen: list[int] = []
        self._numbers: set[int] = set()
        self.changed: Callable[[], None] = lambda: None

    @property
    def reserved(self) -> int:
        return sum(grant.kv_blocks for grant in self.running.values())

    def on_leader(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch = epoch
            self._seen = []
            self._numbers = set()

    def start(self, grant: Grant) -> bool:
        """Admit the grant if it is genuine and fits, as the worker's authority."""
        stale = grant.incarnation != self.incarnation or grant.epoch < self.epoch
        if stale or grant.sequence in self._numbers:
            self.refused.append(grant)
            return False
        self.on_leader(grant.epoch)
        self._numbers.add(grant.sequence)
        self._seen.append(grant.sequence)
        fits = self.reserved + grant.kv_blocks <= self.kv_blocks and self.ready and not self.draining
        if fits:
            self.running[grant.epoch, grant.sequence] = grant
        else:
            self.refused.append(grant)
        self.changed()
        return fits

    def finish(self, grant: Grant) -> None:
        del self.running[grant.epoch, grant.sequence]
        self.changed()

    def snapshot(self, whole: bool = True) -> ReportSnapshot:
        seen, self._seen = tuple(self._seen), []
        pool = PoolSnapshot(
            digest=DIGEST,
            kv_blocks_total=self.kv_blocks,
            kv_blocks_reserved=self.reserved,
            block_size=16,
            running=len(self.running),
            waiting=0,
            max_sequences=self.max_sequences,
            max_model_len=self.kv_blocks * 16,
            ready=self.ready,
        )
        return ReportSnapshot(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            address="127.0.0.1:1",
            draining=self.draining,
            pools=(pool,),
            epoch=self.epoch,
            grants_seen=seen,
            tenants=(TenantTokens("acme", DIGEST, 1, 2),) if seen else (),
            live=tuple(
                ReportedSequence(f"req_{epoch}_{number}", 0, "acme", DIGEST, grant.kv_blocks)
                for (epoch, number), grant in self.running.items()
            ),
        )

    def restart(self) -> None:
        """Another life: everything that ran is gone."""
        self.incarnation += 1
        self.running.clear()
        self._seen = []

    def reporter(self, directory: LeaderDirectory, supervisor: Supervisor) -> Reporter:
        """Return a started reporter of this worker."""
        return self.reporting(StreamReportLinks(GrpcStreams(TOKEN), directory), SystemClock(), supervisor)

    def reporting(self, links: ReportLinks, clock: Clock, supervisor: Supervisor) -> Reporter:
        """Return a started reporter of this worker over these links."""
        found = Reporter(links, clock, supervisor, self.snapshot, on_leader=self.on_leader, rng=Random(2))
        self.changed = found.changed
        found.start()
        return found
