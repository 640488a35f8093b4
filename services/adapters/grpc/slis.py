"""Calls to the leading control plane's store of service level indicators. Implements the gateway's port and
``controlplane.objectives.listing.LeadingSlis``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, slis_pb2, slis_pb2_grpc
from services.adapters.grpc.leader_calls import LeaderCalls
from services.adapters.links.scheduler_directory import LeaderDirectory
from services.core.arms import SliReceipt, SliReport
from services.ports.clock import Clock
from services.rpc.convert.slis import report_to_proto

REPORT_S: Final = 10.0
LIST_S: Final = 4.0  # a leader is replaced within 3 s, and a client tries another server after 5 s


class GrpcSlis(LeaderCalls):
    """Reports to and queries the current leader."""

    def __init__(self, directory: LeaderDirectory, internal_token: str, clock: Clock) -> None:
        super().__init__(directory, internal_token, clock, role="control plane")

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        request = slis_pb2.ReportSlisRequest(
            source=source, first=first, oldest=oldest, reports=map(report_to_proto, reports)
        )
        answer: slis_pb2.ReportSlisResponse = await self.call(
            lambda channel: slis_pb2_grpc.SliServiceStub(channel).ReportSlis, request, REPORT_S
        )
        return SliReceipt(answer.last, answer.durable)

    async def page(self, request: cp.ListSlisRequest) -> cp.ListSlisResponse:
        answer: cp.ListSlisResponse = await self.call(
            lambda channel: controlplane_pb2_grpc.ControlPlaneServiceStub(channel).ListSlis, request, LIST_S
        )
        return answer

    async def finished(self, request: cp.ListFinishedRequestsRequest) -> cp.ListFinishedRequestsResponse:
        answer: cp.ListFinishedRequestsResponse = await self.call(
            lambda channel: controlplane_pb2_grpc.ControlPlaneServiceStub(channel).ListFinishedRequests,
            request,
            LIST_S,
        )
        return answer
