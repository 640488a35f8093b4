"""Scheduler and both of its clients over real gRPC streams; the leader is found through a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import grpc
import pytest

from fairway.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.adapters.etcd.store import EtcdStore
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.leader_streams import StreamPlacementLinks
from services.adapters.links.muxed_placement import MuxedPlacement
from services.adapters.links.scheduler_directory import LeaderAddress, SchedulerDirectory
from services.core.errors import FairwayError, InvalidInput, NoLeader, Overloaded
from services.core.generation import Grant, PlaceSpec
from services.core.records import Leader, dump, leader_key
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.convert.scheduler import connect_request, place_to_proto
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.leadership import Election
from services.runtime.supervisor import Supervisor
from services.scheduler.queue.index import QueueLimits
from services.scheduler.term import TermSettings
from tests.integration.scheduler_fleet import (
    DIGEST,
    TOKEN,
    FakeWorker,
    SchedulerNode,
    StaticDirectory,
    granted,
    place_spec,
    placement_over_grpc,
)
from tests.support.waiting import until

SETTINGS = TermSettings(queue=QueueLimits(predicted_output_tokens=32))


@asynccontextmanager
async def etcd(endpoint: str) -> AsyncIterator[EtcdStore]:
    store = EtcdStore((endpoint,), SystemClock(), progress_s=0.5)
    yield store
    await store.close()


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    found = Supervisor(SystemClock())
    yield found
    assert found.failures == ()
    await found.close()


@pytest.fixture
async def node(supervisor: Supervisor) -> AsyncIterator[SchedulerNode]:
    found = SchedulerNode(supervisor, SETTINGS)
    await found.start()
    found.election.turn(1)
    await until(lambda: found.service.term is not None)
    yield found
    await found.stop()


def directory_of(node: SchedulerNode) -> StaticDirectory:
    directory = StaticDirectory()
    directory.turn(LeaderAddress("s1", node.address, 1))
    return directory


async def test_a_restarted_scheduler_is_found_and_grants_what_was_waiting(supervisor: Supervisor) -> None:
    """Killed with placements queued and one running: the next one knows the room and serves all, once."""
    clock = SystemClock()
    first, second = SchedulerNode(supervisor, SETTINGS), SchedulerNode(supervisor, SETTINGS)
    await first.start()
    await second.start()
    first.election.turn(11)
    directory = StaticDirectory()
    directory.turn(LeaderAddress("s1", first.address, 11))
    worker = FakeWorker("w1", kv_blocks=16)
    reporter = worker.reporter(directory, supervisor)
    placement = placement_over_grpc(directory, "g1", clock, supervisor, Random(1))
    blocking = await granted(placement, place_spec("req_0", prompt_tokens=200))
    assert worker.start(blocking)
    waiting = [
        asyncio.ensure_future(granted(placement, place_spec(f"req_{n}", prompt_tokens=30, queue_ttl_s=20)))
        for n in range(1, 9)
    ]
    term = first.service.term
    assert term is not None
    await until(lambda: len(term.queue) == 8)

    await first.stop()
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting), "a lost leader fails nobody"
    second.election.turn(12)
    directory.turn(LeaderAddress("s2", second.address, 12))
    await until(lambda: worker.epoch == 12)
    assert reporter.last_epoch == 12
    after = second.service.term
    assert after is not None
    await until(lambda: len(after.queue) == 8 and "w1" in after.fleet.candidates(DIGEST))
    assert after.fleet.candidates(DIGEST)["w1"].kv_tokens_room == (16 - blocking.kv_blocks) * 16

    worker.finish(blocking)
    grants = []
    for next_done in asyncio.as_completed(waiting):
        grant = await next_done
        grants.append(grant)
        assert worker.start(grant), "it is admitted"
        assert worker.reserved <= worker.kv_blocks
        worker.finish(grant)
    assert {grant.epoch for grant in grants} == {12}
    assert sorted(grant.sequence for grant in grants) == list(range(1, 9))
    assert worker.refused == []
    after.check_integrity()
    await placement.close()
    await reporter.close()
    await second.stop()


async def test_the_leader_is_found_through_etcd_and_a_standby_takes_over(
    etcd_endpoint: str, supervisor: Supervisor
) -> None:
    clock = SystemClock()
    async with etcd(etcd_endpoint) as store:
        nodes = [SchedulerNode(supervisor, SETTINGS) for _ in range(2)]
        elections = []
        for index, node in enumerate(nodes):
            await node.server.start()
            record = dump(Leader(f"s{index}", node.address))
            election = Election(store, leader_key("scheduler", "test"), record, 30, clock, rng=Random(index))
            elections.append(supervisor.spawn(f"election{index}", election.run()))
            node._task = supervisor.spawn(f"scheduler{index}", node.service.run(election))
            if not index:
                await until(lambda: nodes[0].service.term is not None)
        directory = SchedulerDirectory(store, clock, shard="test")
        following = supervisor.spawn("directory", directory.run())
        worker = FakeWorker("w1")
        reporter = worker.reporter(directory, supervisor)
        placement = placement_over_grpc(directory, "g1", clock, supervisor, Random(1))
        before = await granted(placement, place_spec("req_1"))
        assert directory.leader is not None
        assert directory.leader.epoch == before.epoch

        elections[0].cancel()
        await until(lambda: nodes[1].service.term is not None)
        after = await granted(placement, place_spec("req_2"))
        assert after.epoch > before.epoch
        assert worker.start(after)
        assert not worker.start(before), "the worker refuses the leader before"

        await placement.close()
        await reporter.close()
        for task in (*elections, following):
            task.cancel()
        await asyncio.wait((*elections, following))
        for node in nodes:
            await node.stop()


async def test_many_gateways_and_workers_never_over_commit_and_lose_nothing(
    supervisor: Supervisor, node: SchedulerNode
) -> None:
    clock, rng = SystemClock(), Random(5)
    directory = directory_of(node)
    workers = {f"w{n}": FakeWorker(f"w{n}", kv_blocks=24) for n in range(3)}
    reporters = [worker.reporter(directory, supervisor) for worker in workers.values()]
    gateways = [placement_over_grpc(directory, f"g{n}", clock, supervisor, Random(n)) for n in range(3)]
    ended: list[str] = []
    refused: list[str] = []

    async def patiently(gateway: MuxedPlacement, spec: PlaceSpec) -> Grant:
        while True:
            try:
                return await granted(gateway, spec)
            except Overloaded:  # the machine is busy
                refused.append(spec.request_id)
                assert len(refused) <= 600
                await asyncio.sleep(0.1)

    async def one(number: int) -> None:
        gateway = gateways[number % 3]
        spec = place_spec(f"req_{number}", prompt_tokens=rng.randint(1, 200), queue_ttl_s=20.0)
        task = asyncio.ensure_future(patiently(gateway, spec))
        if number % 5 == 0:
            await asyncio.sleep(rng.uniform(0, 0.05))
            task.cancel()
        with suppress(asyncio.CancelledError):
            grant = await task
            if number % 7 == 0:
                gateway.give_back(grant)
            else:
                worker = workers[grant.worker_id]
                assert worker.start(grant), "the scheduler knew the room"
                assert worker.reserved <= worker.kv_blocks
                await asyncio.sleep(rng.uniform(0, 0.02))
                worker.finish(grant)
            ended.append("granted")
            return
        ended.append("cancelled")

    async with asyncio.TaskGroup() as group:
        for number in range(300):
            group.create_task(one(number))
    assert len(ended) == 300
    assert ended.count("granted") >= 240
    term = node.service.term
    assert term is not None
    await until(lambda: all(c.kv_tokens_room == 24 * 16 for c in term.fleet.candidates(DIGEST).values()))
    term.check_integrity()
    assert term.fleet.outstanding == 0
    for gateway in gateways:
        await gateway.close()
    for reporter in reporters:
        await reporter.close()


async def test_a_gateway_that_goes_away_withdraws_what_it_queued(
    supervisor: Supervisor, node: SchedulerNode
) -> None:
    directory = directory_of(node)
    placement = placement_over_grpc(directory, "g1", SystemClock(), supervisor, Random(1))
    waiting = [
        asyncio.ensure_future(granted(placement, place_spec(f"req_{n}", queue_ttl_s=60))) for n in range(4)
    ]
    term = node.service.term
    assert term is not None
    await until(lambda: len(term.queue) == 4)
    await placement.close()
    await until(lambda: len(term.queue) == 0)
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, NoLeader)


async def test_a_worker_whose_stream_is_cut_is_placed_on_again_after_it_reports(
    supervisor: Supervisor, node: SchedulerNode
) -> None:
    directory = directory_of(node)
    worker = FakeWorker("w1")
    reporter = worker.reporter(directory, supervisor)
    placement = placement_over_grpc(directory, "g1", SystemClock(), supervisor, Random(1))
    grant = await granted(placement, place_spec("req_1"))
    await reporter.close()
    assert worker.start(grant)  # nobody is told of it
    term = node.service.term
    assert term is not None
    # The wait ends long before the worker counts as silent.
    await until(lambda: not term.fleet.candidates(DIGEST)["w1"].reporting, 1.5)
    waiting = asyncio.ensure_future(granted(placement, place_spec("req_2")))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    reporter = worker.reporter(directory, supervisor)
    second = await waiting
    assert (
        term.fleet.candidates(DIGEST)["w1"].kv_tokens_room == (64 - grant.kv_blocks - second.kv_blocks) * 16
    )
    await placement.close()
    await reporter.close()


async def test_the_reporter_tells_when_it_heard_the_leader(
    supervisor: Supervisor, node: SchedulerNode
) -> None:
    clock = SystemClock()
    directory = directory_of(node)
    worker = FakeWorker("w1")
    reporter = worker.reporter(directory, supervisor)
    assert (reporter.last_epoch, reporter.leader_seen_s) == (0, float("-inf"))
    await until(lambda: reporter.last_epoch == 1)
    heard_s = reporter.leader_seen_s
    assert 0 <= clock.monotonic_s() - heard_s < 5
    await until(lambda: reporter.leader_seen_s > heard_s)
    await node.server.stop(0.0)
    await asyncio.sleep(0.2)
    last_s = reporter.leader_seen_s
    await asyncio.sleep(0.5)
    assert reporter.leader_seen_s == last_s, "a dead leader is not heard"
    await reporter.close()


async def test_a_leader_that_falls_silent_is_left_and_nothing_waits_for_ever(node: SchedulerNode) -> None:
    links = StreamPlacementLinks(
        GrpcStreams(TOKEN),
        directory_of(node),
        "g1",
        silence_s=0.1,  # it beats every 0.3 s
    )
    link = await links.open()
    with pytest.raises(NoLeader, match="silent"):
        async with asyncio.timeout(30):
            await link.receive()
    await link.close()
    with pytest.raises(FairwayError):
        await link.send([(1, place_spec(), 1.0)], [])


async def test_reading_a_link_that_is_closed_here_fails_without_cancelling_the_reader(
    node: SchedulerNode,
) -> None:
    links = StreamPlacementLinks(GrpcStreams(TOKEN), directory_of(node), "g1")
    link = await links.open()
    reading = asyncio.ensure_future(link.receive())
    await asyncio.sleep(0.05)
    await link.close()
    with pytest.raises(NoLeader):
        await reading


@pytest.mark.parametrize("wrong", ["no_hello", "hello_twice", "hello_with_places"])
async def test_a_gateway_out_of_protocol_is_refused(node: SchedulerNode, wrong: str) -> None:
    hello = scheduler_pb2.ConnectRequest(hello=scheduler_pb2.GatewayHello(gateway_id="g1"))
    place = connect_request([(1, place_spec(), 1.0)], [])
    mixed = scheduler_pb2.ConnectRequest(hello=hello.hello, places=[place_to_proto(1, place_spec(), 1.0)])
    messages = {
        "no_hello": [place],
        "hello_twice": [hello, hello],
        "hello_with_places": [mixed],
    }[wrong]
    error = await failure_of(node, messages)
    assert isinstance(error, InvalidInput)


async def test_a_refusal_is_heard_whatever_is_being_written(node: SchedulerNode) -> None:
    """The second hello may be read while the headers, the leadership or nothing is on its way."""
    hello = scheduler_pb2.ConnectRequest(hello=scheduler_pb2.GatewayHello(gateway_id="g1"))
    for _ in range(100):  # of a hundred, one or two met the headers
        assert isinstance(await failure_of(node, [hello, hello]), InvalidInput)


async def test_a_placement_out_of_bounds_is_refused_alone(node: SchedulerNode) -> None:
    hello = scheduler_pb2.ConnectRequest(hello=scheduler_pb2.GatewayHello(gateway_id="g1"))
    both = connect_request([(1, place_spec(queue_ttl_s=1e6), 1e6), (2, place_spec(queue_ttl_s=0.1), 0.1)], [])
    refused: dict[int, str] = {}
    async with open_channel(node.address) as channel, asyncio.timeout(30):
        call: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel).Connect(metadata=auth_metadata(TOKEN))
        await call.write(hello)
        await call.write(both)
        while len(refused) < 2:
            refused |= {refusal.placement_id: refusal.reason for refusal in (await call.read()).refusals}
    assert refused[1] == "INVALID_INPUT"
    assert refused[2] in ("NO_WORKER_AVAILABLE", "QUEUE_TIMEOUT")


async def test_while_not_leading_streams_fail_so_that_clients_look_on(node: SchedulerNode) -> None:
    hello = scheduler_pb2.ConnectRequest(hello=scheduler_pb2.GatewayHello(gateway_id="g1"))
    node.election.turn(None)
    await until(lambda: node.service.term is None)
    assert isinstance(await failure_of(node, [hello]), NoLeader)


async def failure_of(node: SchedulerNode, messages: list[scheduler_pb2.ConnectRequest]) -> FairwayError:
    """Return how a Connect stream with these messages ends."""
    async with open_channel(node.address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Connect(metadata=auth_metadata(TOKEN))
        try:
            async with asyncio.timeout(30):
                for message in messages:
                    await call.write(message)
                while await call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
    raise AssertionError("the stream ended well")
