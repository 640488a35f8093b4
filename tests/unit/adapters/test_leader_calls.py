"""How long a call waits for a leader, and what a change of the leader does to others."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import scheduler_pb2
from services.adapters.grpc.leader_calls import DIAGNOSES_S, LEADERLESS_S, LIMITS_S, GrpcPlane, GrpcQueues
from services.adapters.links.scheduler_directory import LeaderAddress
from services.core.errors import NoLeader
from tests.support.clocks import HandClock

CLOCK_S = 1_800_000_000.0


class Candidates:
    """A ``LeaderDirectory`` of leaders that refuse every connection: each follows the last after a while."""

    def __init__(self, clock: HandClock, *addresses: str, after_s: float) -> None:
        self._clock, self._after_s = clock, after_s
        self._addresses = list(addresses)
        self.leader: LeaderAddress | None = None

    async def wait_changed(self, seen: LeaderAddress | None, timeout_s: float) -> LeaderAddress | None:
        if self._addresses and self._after_s < timeout_s:
            self._clock.now_s += self._after_s
            self.leader = LeaderAddress("p", self._addresses.pop(0), 1)
        else:
            self._clock.now_s += timeout_s
        return self.leader


async def test_a_diagnosis_without_a_leader_is_refused_long_before_its_time_is_over() -> None:
    clock = HandClock(CLOCK_S)
    calls = GrpcPlane(Candidates(clock, after_s=0.0), "token", clock)
    with pytest.raises(NoLeader, match="no leader exists; start a control plane"):
        await calls.ask(lambda plane: plane.DiagnoseLatency, cp.DiagnoseLatencyRequest())
    assert clock.now_s - CLOCK_S == LEADERLESS_S < DIAGNOSES_S


@pytest.mark.parametrize("kind", LIMITS_S)
async def test_a_query_without_a_leader_is_refused_within_its_limits(kind: type[Any]) -> None:
    clock = HandClock(CLOCK_S)
    calls = GrpcPlane(Candidates(clock, after_s=0.0), "token", clock)
    with pytest.raises(NoLeader, match="no leader exists; start a control plane"):
        await calls.ask(lambda plane: pytest.fail("no leader exists"), kind())
    assert clock.now_s - CLOCK_S == min(LIMITS_S[kind])


async def test_each_new_leader_is_asked() -> None:
    clock = HandClock(CLOCK_S)
    candidates = Candidates(clock, "127.0.0.1:1", "127.0.0.1:2", after_s=4.0)
    calls = GrpcPlane(candidates, "token", clock)
    with pytest.raises(NoLeader, match="UNAVAILABLE"):
        await calls.ask(lambda plane: plane.DiagnoseLatency, cp.DiagnoseLatencyRequest())
    assert clock.now_s - CLOCK_S == 2 * 4.0 + LEADERLESS_S
    await calls.close()


class HeldScheduler:
    """A scheduler that answers once it is released."""

    def __init__(self, name: str) -> None:
        self.asked, self.released = asyncio.Event(), asyncio.Event()
        self._name = name
        handler = grpc.unary_unary_rpc_method_handler(
            self._list_pools,
            scheduler_pb2.ListPoolsRequest.FromString,
            scheduler_pb2.ListPoolsResponse.SerializeToString,
        )
        self.server = grpc.aio.server()
        self.server.add_registered_method_handlers("fairway.v1.SchedulerService", {"ListPools": handler})
        self.leader = LeaderAddress(name, f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}", 1)

    async def _list_pools(self, request: Any, context: Any) -> scheduler_pb2.ListPoolsResponse:
        self.asked.set()
        await self.released.wait()
        return scheduler_pb2.ListPoolsResponse(next_page_token=self._name)


async def test_a_call_to_the_next_leader_leaves_those_at_the_last() -> None:
    first, second, clock = HeldScheduler("first"), HeldScheduler("second"), HandClock(CLOCK_S)
    directory = Candidates(clock, after_s=0.0)
    calls = GrpcQueues(directory, "token", clock, timeout_s=30.0)
    asked = list[asyncio.Task[scheduler_pb2.ListPoolsResponse]]()
    for scheduler in (first, second):
        await scheduler.server.start()
        directory.leader = scheduler.leader
        asked.append(asyncio.create_task(calls.page(size=1, token="", tenant="")))
        await scheduler.asked.wait()
    for scheduler, answer in zip((second, first), reversed(asked), strict=True):
        scheduler.released.set()
        assert (await answer).next_page_token == scheduler.leader.leader_id
    await calls.close()
    for scheduler in (first, second):
        await scheduler.server.stop(None)
