"""What reports and placements may say to a scheduler: out of bounds they end alone, extremes harm nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from typing import Any

import grpc
import pytest

from fairway.v1 import scheduler_pb2 as pb
from fairway.v1 import scheduler_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.leader_streams import StreamPlacementLinks
from services.adapters.links.scheduler_directory import LeaderAddress
from services.core.decisions import FleetWorker, WorkerPool
from services.core.errors import InvalidInput
from services.core.fleet import Granted, PlacementRefused
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.convert.scheduler import worker_to_proto
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.integration.scheduler_fleet import (
    DIGEST,
    TOKEN,
    SchedulerNode,
    StaticDirectory,
    place_spec,
)
from tests.support.waiting import until

INFINITE, NAN = float("inf"), float("nan")
MAX_32, MAX_64 = 2**32 - 1, 2**64 - 1


@pytest.fixture
async def node() -> AsyncIterator[SchedulerNode]:
    supervisor = Supervisor(SystemClock())
    found = SchedulerNode(supervisor)
    await found.start()
    found.election.turn(1)
    await until(lambda: found.service.term is not None)
    yield found
    assert found.service.term is not None, "the term outlived it"
    found.service.term.check_integrity()
    assert supervisor.failures == ()
    await found.stop()
    await supervisor.close()


def report(number: int = 1, worker_id: str = "w1", **fields: Any) -> pb.ReportRequest:
    return pb.ReportRequest(
        worker_id=worker_id, incarnation=1, report=number, address="127.0.0.1:1", epoch=1, **fields
    )


def pool(**fields: Any) -> pb.PoolReport:
    values: dict[str, Any] = {
        "version_digest": DIGEST,
        "kv_blocks_total": 64,
        "block_size": 16,
        "max_sequences": 8,
        "max_model_len": 1024,
        "ready": True,
    }
    return pb.PoolReport(**{**values, **fields})


def counter(virtual_tokens: float, floor_tokens: float = 0.0) -> pb.TenantCounter:
    return pb.TenantCounter(
        tenant_id="acme", version_digest=DIGEST, virtual_tokens=virtual_tokens, floor_tokens=floor_tokens
    )


async def taken(channel: grpc.aio.Channel, *messages: pb.ReportRequest) -> int:
    """Return the number of the last report that the leader took over."""
    call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Report(metadata=auth_metadata(TOKEN))
    try:
        for message in messages:
            await call.write(message)
        async with asyncio.timeout(20):
            while True:
                answer: Any = await call.read()
                assert answer is not grpc.aio.EOF
                if answer.report >= len(messages):
                    return int(answer.report)
    finally:
        call.cancel()


BAD_REPORTS = {
    "not a number": report(counters=[counter(NAN)]),
    "infinite": report(counters=[counter(INFINITE)]),
    "negative": report(counters=[counter(-1.0)]),
    "beyond what is counted": report(counters=[counter(1e19)]),
    "an infinite floor": report(counters=[counter(1.0, INFINITE)]),
    "too many counters": report(counters=[counter(1.0)] * 4097),
    "too many names that came": report(pools=[pool(prefix_added=[1] * 65537)]),
    "too many names that left": report(pools=[pool(prefix_removed=[1] * 65537)]),
    "too many pools": report(pools=[pool(version_digest=f"sha256:{n}") for n in range(65)]),
    "a version twice": report(pools=[pool(), pool()]),
    "a long name": report(live=[pb.LiveSequence(request_id="r" * 65, tenant_id="t", version_digest=DIGEST)]),
    "steps of no time": report(pools=[pool(step_seconds=NAN)]),
    "steps of all time": report(pools=[pool(step_seconds=1e10)]),
    "more tokens than there are": report(
        tenants=[pb.TenantTokens(tenant_id="t", version_digest=DIGEST, output_tokens=10**12 + 1)]
    ),
    "another's turn": report(2),
}


@pytest.mark.parametrize("what", BAD_REPORTS)
async def test_a_report_out_of_bounds_ends_its_stream_and_changes_nothing(
    node: SchedulerNode, what: str
) -> None:
    async with open_channel(node.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await taken(channel, BAD_REPORTS[what])
        assert isinstance(from_rpc_error(caught.value), InvalidInput)
        assert node.service.term is not None
        assert node.service.term.fleet.workers == 0
        assert list(node.service.term.queue.ledger.pools()) == []
        assert await taken(channel, report(pools=[pool()])) == 1, "another stream goes on"


def largest_pool() -> pb.PoolReport:
    return pool(
        kv_blocks_total=16777216,
        block_size=4096,
        running=1048576,
        waiting=1048576,
        max_sequences=1048576,
        max_model_len=16777216,
        queued_prefill_tokens=MAX_32,
        steps=MAX_64,
        step_seconds=1e9,
        prefill_tokens=MAX_64,
        decode_tokens=MAX_64,
        attended_tokens=MAX_64,
        long_prefills=1048576,
        prefix_added=[0, 1, MAX_64],
        prefix_removed=[0, 7, MAX_64],
    )


def largest_deltas() -> dict[str, Any]:
    tokens = pb.TenantTokens(
        tenant_id="acme",
        version_digest=DIGEST,
        prefill_tokens=10**12,
        output_tokens=10**12,
        cached_tokens=10**12,
    )
    last = pb.SequenceUsage(
        request_id="r1",
        tenant_id="acme",
        version_digest=DIGEST,
        prompt_tokens=MAX_32,
        output_tokens=MAX_32,
        cached_tokens=MAX_32,
        ended=True,
    )
    return {
        "tenants": [tokens],
        "usage": [last],
        "grants_seen": [0, MAX_64],
        "cost_per_hour": 1e6,
    }


async def test_the_largest_numbers_of_a_report_are_told_to_operators_and_harm_no_placement(
    node: SchedulerNode,
) -> None:
    """Twice, so that differences between two reports are as large as they can be."""
    calm, wild, extremes = pool(), largest_pool(), largest_deltas()
    async with open_channel(node.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        first = report(pools=[calm], counters=[counter(1e18, 1e18)], **extremes)
        again = [report(number, pools=[wild], **extremes) for number in (2, 3)]
        assert await taken(channel, first, *again) == 3
        said: dict[str, Any] = {"metadata": auth_metadata(TOKEN), "timeout": 20}
        workers = await stub.ListReporters(pb.ListReportersRequest(page_size=10), **said)
        assert [found.worker_id for found in workers.reporters] == ["w1"]
        pools = await stub.ListPools(pb.ListPoolsRequest(page_size=10), **said)
        assert [found.version_digest for found in pools.pools] == [DIGEST]
        assert not (await stub.Explain(pb.ExplainRequest(request_id="r1"), **said)).decisions
        keep = asyncio.ensure_future(_keep_reporting(stub, report(worker_id="w2", pools=[calm])))
        try:
            outcome = await _place(node)
        finally:
            keep.cancel()
        assert isinstance(outcome, Granted)
        assert outcome.grant.worker_id == "w2"


async def _keep_reporting(stub: Any, message: pb.ReportRequest) -> None:
    call = stub.Report(metadata=auth_metadata(TOKEN))
    await call.write(message)
    while await call.read() is not grpc.aio.EOF:
        pass


async def _place(node: SchedulerNode, **fields: Any) -> Granted | PlacementRefused:
    """Return what becomes of one placement."""
    directory = StaticDirectory()
    directory.turn(LeaderAddress("s1", node.address, 1))
    links = StreamPlacementLinks(GrpcStreams(TOKEN), directory, f"g{Random().random()}")
    link = await links.open()
    try:
        await link.send([(7, replace(place_spec(), **fields), 10.0)], [])
        async with asyncio.timeout(20):
            while True:
                for outcome in (await link.receive()).outcomes:
                    return outcome
    finally:
        await link.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"prefix_hashes": (1,) * 4097},
        {"tenant_weight": NAN},
        {"tenant_weight": -1.0},
        {"tenant_weight": 1e7},
        {"excluded_workers": ("w",) * 17},
        {"attempt": 1001},
    ],
    ids=str,
)
async def test_a_placement_out_of_bounds_is_refused_alone(
    node: SchedulerNode, fields: dict[str, Any]
) -> None:
    outcome = await _place(node, **fields)
    assert isinstance(outcome, PlacementRefused)
    assert isinstance(outcome.error, InvalidInput)


@pytest.mark.parametrize("request_id", ["", "r" * 65])
async def test_an_explanation_is_asked_for_by_a_name_of_bounded_length(
    node: SchedulerNode, request_id: str
) -> None:
    async with open_channel(node.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Explain(
                pb.ExplainRequest(request_id=request_id), metadata=auth_metadata(TOKEN), timeout=20
            )
    assert isinstance(from_rpc_error(caught.value), InvalidInput)


def test_no_number_of_one_worker_spoils_the_list_of_all() -> None:
    health = WorkerPool(
        "d", 1, 1, 1, 1, 1, 1, 1, True, measured_step_s=NAN, predicted_step_s=1e300, slowness_ratio=1
    )
    worker = FleetWorker("w1", "h:1", 1, "", "", 0.0, "placed_on", -1.0, 0, (health,))
    told = worker_to_proto(worker)
    assert told.pools[0].predicted_step.ToMicroseconds() == 1e15
    assert told.pools[0].HasField("measured_step")
    assert told.pools[0].measured_step.ToMicroseconds() == told.last_report.ToMicroseconds() == 0
