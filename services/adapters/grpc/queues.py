"""Queries of the leading scheduler, whose messages are forwarded to operators as they are."""

from __future__ import annotations

from typing import Final

from fairway.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.adapters.grpc.leader_calls import LeaderCalls
from services.adapters.links.scheduler_directory import LeaderDirectory
from services.ports.clock import Clock

TIMEOUT_S: Final = 3.0
_Stub = scheduler_pb2_grpc.SchedulerServiceStub


class GrpcQueues(LeaderCalls):
    """Each call raises NoLeader within a bounded time when no scheduler leads."""

    def __init__(
        self, directory: LeaderDirectory, internal_token: str, clock: Clock, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        super().__init__(directory, internal_token, clock, role="scheduler")
        self._timeout_s = timeout_s

    async def page(self, *, size: int, token: str, tenant: str) -> scheduler_pb2.ListPoolsResponse:
        """Return a page of pools with the shares of one tenant, or of all when ``tenant`` is empty."""
        request = scheduler_pb2.ListPoolsRequest(page_size=size, page_token=token, tenant=tenant)
        found: scheduler_pb2.ListPoolsResponse
        found = await self.call(lambda channel: _Stub(channel).ListPools, request, self._timeout_s)
        return found

    async def explain(self, request_id: str) -> scheduler_pb2.ExplainResponse:
        """Return how the placements of a request were decided, as far as the leader retains them."""
        request = scheduler_pb2.ExplainRequest(request_id=request_id)
        found: scheduler_pb2.ExplainResponse
        found = await self.call(lambda channel: _Stub(channel).Explain, request, self._timeout_s)
        return found

    async def workers(self, *, size: int, token: str) -> scheduler_pb2.ListReportersResponse:
        """Return a page of the workers that reported to the leader."""
        request = scheduler_pb2.ListReportersRequest(page_size=size, page_token=token)
        found: scheduler_pb2.ListReportersResponse
        found = await self.call(lambda channel: _Stub(channel).ListReporters, request, self._timeout_s)
        return found
