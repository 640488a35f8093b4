"""Queries of the leading scheduler for operators. Implements ``controlplane.servicer.LeadingScheduler``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from fairway.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.adapters.links.scheduler_directory import LeaderAddress, LeaderDirectory
from services.core.errors import FairwayError, NoLeader, Unavailable
from services.ports.clock import Clock
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.status import from_rpc_error

Method = Callable[[Any], Any]  # of the scheduler's stub

TIMEOUT_S: Final = 3.0


class GrpcQueues:
    """Queries the current leader. Opens a channel per call, because operators call rarely."""

    def __init__(
        self, directory: LeaderDirectory, internal_token: str, clock: Clock, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._directory = directory
        self._metadata = auth_metadata(internal_token)
        self._clock = clock
        self._timeout_s = timeout_s

    async def page(self, *, size: int, token: str, tenant: str) -> scheduler_pb2.ListPoolsResponse:
        """Return a page of pools with the shares of one tenant, or of all when ``tenant`` is empty."""
        request = scheduler_pb2.ListPoolsRequest(page_size=size, page_token=token, tenant=tenant)
        found: scheduler_pb2.ListPoolsResponse = await self._call_leader(lambda stub: stub.ListPools, request)
        return found

    async def explain(self, request_id: str) -> scheduler_pb2.ExplainResponse:
        """Return how the placements of a request were decided, as far as the leader retains them."""
        request = scheduler_pb2.ExplainRequest(request_id=request_id)
        found: scheduler_pb2.ExplainResponse = await self._call_leader(lambda stub: stub.Explain, request)
        return found

    async def workers(self, *, size: int, token: str) -> scheduler_pb2.ListReportersResponse:
        """Return a page of the workers that reported to the leader."""
        request = scheduler_pb2.ListReportersRequest(page_size=size, page_token=token)
        found: scheduler_pb2.ListReportersResponse
        found = await self._call_leader(lambda stub: stub.ListReporters, request)
        return found

    async def _call_leader(self, method: Method, request: Message) -> Any:
        """Return the response. If the leader is unreachable or no longer leads, queries its successor."""
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        leader, error = self._directory.leader, None
        while (left_s := deadline_s - self._clock.monotonic_s()) > 0:
            if leader is not None:
                try:
                    return await self._call(leader, method, request, left_s)
                except Unavailable as failure:
                    error = failure
            leader = await self._directory.wait_changed(leader, left_s)
        raise NoLeader(f"no scheduler leads that can be reached: {_why(error)}", retry_after_s=1.0)

    async def _call(self, leader: LeaderAddress, method: Method, request: Message, timeout_s: float) -> Any:
        async with open_channel(leader.address) as channel:
            call = method(scheduler_pb2_grpc.SchedulerServiceStub(channel))
            try:
                return await call(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as failure:
                raise _unreachable(failure, leader) from failure


def _unreachable(failure: grpc.aio.AioRpcError, leader: LeaderAddress) -> FairwayError:
    if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return NoLeader(f"the scheduler at {leader.address} does not answer")
    return from_rpc_error(failure)


def _why(error: FairwayError | None) -> str:
    return "no leader exists; start a scheduler" if error is None else error.message
