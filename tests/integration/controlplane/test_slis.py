"""Indicators over gRPC: any control plane answers from the sums of the one that leads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from fairway.v1 import common_pb2, controlplane_pb2_grpc, slis_pb2, slis_pb2_grpc
from fairway.v1 import controlplane_pb2 as pb
from services.adapters.grpc.leader_calls import GrpcPlane, GrpcQueues, GrpcSlis
from services.adapters.links.scheduler_directory import LeaderAddress
from services.adapters.memory.store import MemoryStore
from services.controlplane.audit_reads import AuditReader
from services.controlplane.diagnosis.listing import Diagnoses
from services.controlplane.diagnosis.store import SampleStore
from services.controlplane.objectives.servicer import SliListing, SliServicer
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.core.arms import SliReport
from services.core.errors import InvalidInput, NoLeader
from services.core.estimates.finished import FinishedRequest
from services.core.generation import StageClock, Usage
from services.core.records import Priority
from services.rpc.channel import open_channel
from services.rpc.convert.inference import timestamp
from services.rpc.convert.slis import report_from_proto, report_to_proto
from services.rpc.server import RpcServer, RpcService
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from simulator.stores.limiter import MemoryLimiter
from tests.integration.controlplane.plane import ADMIN, SEALER
from tests.integration.scheduler_fleet import StaticDirectory
from tests.support.clocks import HandClock
from tests.support.drawn_windows import World, drawn
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane
from tests.support.registry import TOKEN, authenticate
from tests.support.slis import DIGEST, Measurements, key_of, sums_of

CLOCK = SystemClock()


class OnePlane:
    """A control plane of two, with indicators of its own."""

    def __init__(self, directory: StaticDirectory, *, leads: bool) -> None:
        self.measured = Measurements(CLOCK, leads=leads)
        self.samples = SampleStore(MemoryLedger(), CLOCK)
        self.leader = GrpcPlane(directory, TOKEN, CLOCK)
        self.queues = GrpcQueues(directory, TOKEN, CLOCK)
        self.address = ""

    @asynccontextmanager
    async def served(self, supervisor: Supervisor) -> AsyncIterator[None]:
        store = MemoryStore(CLOCK)
        service = ControlPlaneService(store, CLOCK, SEALER, MemoryLimiter(CLOCK))
        listing = SliListing(self.measured.store, self.leader)
        servicer = ControlPlaneServicer(
            service,
            store,
            self.queues,
            NoPlane(),
            listing,
            NoPlane(),
            NoPlane(),
            Diagnoses(self.samples, self.leader, CLOCK, leads=lambda: self.measured.store.leads),
            audit=AuditReader(store, MemoryLedger()),
            require_current=lambda _: None,
        )
        server = RpcServer(
            [
                RpcService(
                    pb.DESCRIPTOR.services_by_name["ControlPlaneService"],
                    controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
                    servicer,
                ),
                RpcService(
                    slis_pb2.DESCRIPTOR.services_by_name["SliService"],
                    slis_pb2_grpc.add_SliServiceServicer_to_server,
                    SliServicer(self.measured.store),
                ),
            ],
            listen="127.0.0.1:0",
            internal_token=TOKEN,
            new_incident=lambda: "inc",
            authenticate=authenticate,
        )
        await server.start()
        await self.measured.start(supervisor)
        self.address = f"127.0.0.1:{server.port}"
        yield
        for calls in (self.leader, self.queues):
            await calls.close()
        await server.stop(0)

    async def _call(self, name: str, request: Message, timeout_s: float = 10.0) -> Any:
        async with open_channel(self.address) as channel:
            method = getattr(controlplane_pb2_grpc.ControlPlaneServiceStub(channel), name)
            try:
                return await method(request, metadata=ADMIN, timeout=timeout_s)
            except grpc.aio.AioRpcError as exc:
                raise from_rpc_error(exc) from exc

    async def list(self, **fields: Any) -> pb.ListSlisResponse:
        found: pb.ListSlisResponse = await self._call("ListSlis", pb.ListSlisRequest(**fields))
        return found

    async def diagnose(self, **fields: Any) -> pb.DiagnoseLatencyResponse:
        request = pb.DiagnoseLatencyRequest(**fields)
        found: pb.DiagnoseLatencyResponse = await self._call("DiagnoseLatency", request, 30.0)
        return found

    async def finished(self, **fields: Any) -> Sequence[slis_pb2.FinishedRequest]:
        found = await self._call("ListFinishedRequests", pb.ListFinishedRequestsRequest(**fields))
        return list(found.requests)


Planes = tuple[OnePlane, OnePlane, StaticDirectory]


@pytest_asyncio.fixture
async def planes() -> AsyncIterator[Planes]:
    """A leader and a standby, and where the standby looks for the leader."""
    directory, supervisor = StaticDirectory(), Supervisor(CLOCK)
    leader, standby = (OnePlane(directory, leads=leads) for leads in (True, False))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(supervisor.close)
        for plane in (leader, standby):
            await stack.enter_async_context(plane.served(supervisor))
        directory.turn(LeaderAddress("leader", leader.address, 1))
        yield leader, standby, directory


def finished(number: int, *, reason: str = "FINISHED", tenant: str = "acme") -> FinishedRequest:
    clock = StageClock(1_000_000 * number, queue_us=1000 * (number % 7))
    names = f"req_{number}", "openai", tenant, "chat", DIGEST
    return FinishedRequest(*names, Priority.BATCH, reason, clock, Usage(3, 4, 1))


async def test_past_requests_are_found_at_any_control_plane(planes: Planes) -> None:
    leader, standby, directory = planes
    sent = [
        finished(number, reason="FINISHED" if number % 3 else "QUEUE_FULL", tenant=f"t{number % 2}")
        for number in range(1, 20)
    ]
    for number in (1, 2):  # a report that comes again counts once
        report = report_from_proto(report_to_proto(SliReport(1.0, {}, {}, requests=sent)))
        assert report.requests == tuple(sent)
        leader.measured.store.report("gateway", number, 1, [report])
    for plane in (leader, standby):
        slow = await plane.finished(slow=True, limit=3)
        assert [one.request_id for one in slow] == ["req_6", "req_13", "req_5"]
        assert [one.request_id for one in await plane.finished(limit=2)] == ["req_19", "req_18"]
        failed = await plane.finished(failed=True, tenant="t1")
        assert [one.request_id for one in failed] == ["req_15", "req_9", "req_3"]
        assert {one.reason for one in failed} == {"QUEUE_FULL"}
        (one,) = await plane.finished(request_name="chatcmpl-req_6")
        assert (one.stages_us[2], one.prompt_tokens, one.priority) == (6000, 3, common_pb2.PRIORITY_BATCH)
        assert len(await plane.finished()) == len(sent)
    with pytest.raises(InvalidInput, match="limit"):
        await leader.finished(limit=1001)
    directory.turn(LeaderAddress("standby", standby.address, 2))
    with pytest.raises(NoLeader):
        await standby.finished()


async def test_a_standby_answers_what_the_leader_measured(planes: Planes) -> None:
    leader, standby, directory = planes
    for number in range(3):
        leader.measured.report(key_of(tenant=f"t{number}"), sums_of([0.5], requests=1, started=1))
    first = await standby.list(page_size=2)
    rest = await standby.list(page_size=2, page_token=first.next_page_token)
    assert [one.tenant for one in (*first.slis, *rest.slis)] == ["t0", "t1", "t2"]
    assert first.slis == (await leader.list(page_size=2)).slis
    assert rest.next_page_token == ""
    directory.turn(LeaderAddress("standby", standby.address, 2))  # it is said to lead, and does not
    leader.measured.election.turn(None)
    with pytest.raises(NoLeader):
        await standby.list()


async def test_a_standby_answers_with_the_leaders_diagnosis(planes: Planes) -> None:
    leader, standby, _ = planes
    now_s = CLOCK.unix_s()
    sampled = [
        *drawn(World(), now_s - 100, 60.0, 0),
        *drawn(World(admit_s=0.05), now_s - 40, 38.0, 1),
    ]
    leader.samples.add("one", [SliReport(now_s, {}, {}, sampled=sampled)], lost=0)
    for plane in (leader, standby):
        found = await plane.diagnose(start_time=timestamp(now_s - 40))
        assert [(one.kind, one.subject) for one in found.causes] == [("quota_store_slow", "redis")]
        with pytest.raises(InvalidInput, match="not before its end"):
            await plane.diagnose(start_time=timestamp(now_s), end_time=timestamp(now_s - 1))


@pytest.mark.parametrize("ahead_s", [0.0, 30.0])
async def test_the_time_of_a_report_call_shows_the_clock_of_its_gateway(
    planes: Planes, ahead_s: float
) -> None:
    """A report of an hour before does not."""
    leader, _, directory = planes
    now_s = CLOCK.unix_s()
    calls = GrpcSlis(directory, TOKEN, HandClock(now_s + ahead_s))
    sampled = drawn(World(), now_s - 1800 + ahead_s, 60.0, 0)
    await calls.report("one", 1, 1, [SliReport(now_s - 1700 + ahead_s, {}, {}, sampled=sampled[:60])])
    await calls.close()
    samples = leader.measured.store.samples
    assert len(samples.find(now_s - 1800, now_s - 1730).requests) == 60
    notes = samples.notes(now_s - 60, CLOCK.unix_s())
    assert ["s ahead; its times are corrected" in one for one in notes] == [True] * bool(ahead_s)


async def test_a_window_is_at_most_what_is_kept(planes: Planes) -> None:
    for seconds in (3601, -1):
        with pytest.raises(InvalidInput):
            await planes[0].list(window={"seconds": seconds})
    with pytest.raises(InvalidInput):
        await planes[0].list(page_size=251)
