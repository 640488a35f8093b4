"""Gateways, a scheduler and workers with rows, over gRPC. All but what computes a row is production code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import grpc
from msgspec.structs import replace

from fairway.v1 import worker_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.leader_streams import StreamPlacementLinks, StreamReportLinks
from services.adapters.links.muxed_placement import MuxedPlacement
from services.adapters.links.muxed_workers import MuxedWorkers
from services.adapters.links.reporter import Reporter
from services.adapters.links.scheduler_directory import LeaderAddress
from services.core.fixed_cost.rows import BatchWindow, RawTensor, RowEnd, RowSpec, RowsRequest
from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.core.records import Priority
from services.gateway.catalog import Waking
from services.gateway.rows.leases import AloneSettings, GatewayLeases
from services.gateway.rows.runner import LeasedRows, RowExplanations, RowLimits
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker.servicer import WorkerServicer
from services.worker.streams.admission import FallbackAdmission
from services.worker.streams.host import SequenceHost
from services.worker.streams.live_row import LiveRow
from services.worker.streams.outbox import Outbox
from tests.integration.scheduler_fleet import DIGEST, TOKEN, SchedulerNode, StaticDirectory


def rows_request(
    count: int = 1,
    tenant: str = "acme",
    *,
    digest: str = DIGEST,
    deadline_s: float = float("inf"),
    node_group: str = "",
    waits: bool = False,
) -> RowsRequest:
    """Return a request whose rows contain their numbers."""
    rows = tuple((RawTensor("x", "UINT8", (1,), bytes([row % 256])),) for row in range(count))
    return RowsRequest(
        f"req_{tenant}",
        tenant,
        "echo",
        digest,
        rows,
        Priority.STANDARD,
        deadline_s=deadline_s,
        node_group=node_group,
        isolation_waits=waits,
    )


WINDOW = BatchWindow(8, 0.03, 0.05, 0.02, 0.0, 4, 100.0, 2.0)  # of every batch


class EchoRows:
    """Implements ``RowTable``: every ``batch_s`` all its rows end with their inputs, unless it is paused."""

    def __init__(self, host: SequenceHost, row_slots: int, batch_s: float) -> None:
        self.version_digest = DIGEST
        self.ready = True
        self.paused = False
        self.row_slots = row_slots
        self.batch_s = batch_s
        self.live: dict[int, LiveRow] = {}
        self.most = 0
        self.started = 0
        self._host = host

    @property
    def has_room(self) -> bool:
        return len(self.live) < self.row_slots

    @property
    def alone(self) -> int:
        return sum(not row.spec.epoch for row in self.live.values())

    def __len__(self) -> int:
        return len(self.live)

    def start(self, outbox: Outbox, handle: int, spec: RowSpec) -> None:
        self.started += 1
        row = LiveRow(spec, outbox, handle, self.started, 0.0, float("inf"))
        outbox.rows[handle] = row
        self.live[row.number] = row
        self.most = max(self.most, len(self.live))

    def cancel(self, rows: Sequence[LiveRow]) -> None:
        for row in rows:
            self.live.pop(row.number, None)
        self._host.changed()

    def sweep(self, now_s: float) -> None:
        return

    def reset_silence(self) -> None:
        return

    def lose(self) -> None:
        """End the rows as the loss of the device process does."""
        rows, self.live = list(self.live.values()), {}
        for row in rows:
            row.end(RowEnd(lost=True))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.batch_s)
            if self.paused:
                continue
            rows, self.live = list(self.live.values()), {}
            for row in rows:
                device_s = self.batch_s / len(rows)
                key = row.spec.tenant_id, DIGEST, row.spec.priority
                self._host.tally.add_rows(key, 1, device_s)
                end = RowEnd(outputs=row.spec.inputs, device_s=device_s, batch_rows=len(rows))
                row.end(replace(end, batch_cause="idle", window=WINDOW))
            if rows:
                self._host.changed()

    def report(self, *, ready: bool) -> PoolSnapshot:
        return PoolSnapshot(
            DIGEST, 0, 0, 1, 0, len(self.live), 0, 0, ready=ready, row_slots=self.row_slots, row_us=500
        )

    def check_integrity(self) -> None:
        return


class RowNode:
    """A worker behind a gRPC server, that reports to the scheduler."""

    def __init__(
        self,
        worker_id: str,
        supervisor: Supervisor,
        *,
        row_slots: int = 16,
        batch_s: float = 0.005,
        node_group: str = "",
    ) -> None:
        self.worker_id = worker_id
        self.clock = SystemClock()
        self._supervisor = supervisor
        self.host = SequenceHost(changed=lambda: None, fallback=FallbackAdmission(self.clock))
        self.host.grants.incarnation = 100
        self.host.assign_group(node_group)
        self.rows = EchoRows(self.host, row_slots, batch_s)
        self.host.add_rows(self.rows)
        self._server = grpc.aio.server()
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.reporter: Reporter | None = None

    async def start(self, directory: StaticDirectory) -> None:
        agent = cast(Any, SimpleNamespace())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(
            WorkerServicer(self.host, agent, self.clock), self._server
        )
        await self._server.start()
        self._supervisor.spawn(f"{self.worker_id}.rows", self.rows.run())
        links = StreamReportLinks(GrpcStreams(TOKEN), directory)
        self.reporter = Reporter(
            links,
            self.clock,
            self._supervisor,
            self._snapshot,
            on_leader=self.host.on_leader,
            rng=Random(2),
        )
        self.host.changed = self.reporter.changed
        self.reporter.start()

    def _snapshot(self, _whole: bool) -> ReportSnapshot:
        return ReportSnapshot(
            self.worker_id,
            100,
            self.address,
            pools=(self.rows.report(ready=True),),
            epoch=self.host.grants.epoch,
            tenants=self.host.tally.take(100),
            node_group=self.host.node_group,
        )

    async def stop(self) -> None:
        """As abrupt as a killed process is for its peers."""
        await self._server.stop(0.0)
        if self.reporter is not None:
            await self.reporter.close()


class RowGateway:
    """A gateway's clients of the scheduler and the workers, and the runner on them."""

    def __init__(
        self,
        gateway_id: str,
        directory: StaticDirectory,
        supervisor: Supervisor,
        limits: RowLimits,
        waking: Callable[[str], Waking | None],
    ) -> None:
        clock, streams = SystemClock(), GrpcStreams(TOKEN)
        self.leases = GatewayLeases(clock, AloneSettings(after_s=1.0))
        self.explanations = RowExplanations()
        self.placement = MuxedPlacement(
            StreamPlacementLinks(streams, directory, gateway_id),
            clock,
            supervisor,
            Random(3),
            on_frame=self.leases.on_frame,
            explain=self.explanations.find,
        )
        self.workers = MuxedWorkers(streams, gateway_id, clock, supervisor)
        self.runner = LeasedRows(
            self.workers,
            self.placement,
            self.leases,
            clock,
            supervisor,
            limits,
            waking=waking,
            explanations=self.explanations,
        )
        self.placement.start()

    async def close(self) -> None:
        assert not self.runner.rows, "rows leaked"
        assert not any(slots.in_flight for slots in self.leases.slots())
        await self.runner.close()
        await self.workers.close()
        await self.placement.close()


@dataclass
class RowRig:
    supervisor: Supervisor
    scheduler: SchedulerNode
    directory: StaticDirectory
    workers: list[RowNode] = field(default_factory=list)
    gateways: list[RowGateway] = field(default_factory=list)

    def lead(self, epoch: int | None) -> None:
        self.scheduler.election.turn(epoch)
        leader = None if epoch is None else LeaderAddress("s1", self.scheduler.address, epoch)
        self.directory.turn(leader)

    async def add_worker(self, **options: Any) -> RowNode:
        node = RowNode(f"w{len(self.workers)}", self.supervisor, **options)
        self.workers.append(node)
        await node.start(self.directory)
        return node

    def add_gateway(
        self,
        limits: RowLimits | None = None,
        waking: Callable[[str], Waking | None] = lambda _: None,
    ) -> RowGateway:
        limits = limits if limits is not None else RowLimits()
        name = f"g{len(self.gateways)}"
        self.gateways.append(RowGateway(name, self.directory, self.supervisor, limits, waking))
        return self.gateways[-1]


@asynccontextmanager
async def row_rig() -> AsyncIterator[RowRig]:
    """Yield a scheduler that leads, without workers and gateways. At the end nothing is in flight."""
    supervisor = Supervisor(SystemClock())
    scheduler = SchedulerNode(supervisor)
    await scheduler.start()
    rig = RowRig(supervisor, scheduler, StaticDirectory())
    rig.lead(1)
    yield rig
    for gateway in rig.gateways:
        await gateway.close()
    for worker in rig.workers:
        await worker.stop()
    if scheduler.service.term is not None:
        scheduler.service.term.check_integrity()
    await scheduler.stop()
    assert supervisor.failures == ()
    await supervisor.close()
