"""Calls to the leading control plane's usage ledger. Implements ``adapters.usage.outbox.UsageReports`` and
``controlplane.usage.listing.LeadingLedger``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, usage_pb2, usage_pb2_grpc
from services.adapters.grpc.leader_calls import LeaderCalls
from services.adapters.links.scheduler_directory import LeaderDirectory
from services.ports.clock import Clock

REPORT_S: Final = 15.0
LIST_S: Final = 15.0  # a client's attempt lasts as long, so that a change of the leader may pass


class GrpcUsage(LeaderCalls):
    """Reports to and queries the current leader."""

    def __init__(self, directory: LeaderDirectory, internal_token: str, clock: Clock) -> None:
        super().__init__(directory, internal_token, clock, role="control plane")

    async def report(
        self, source: str, first: int, events: Sequence[usage_pb2.UsageEvent], lost_until: int, apart: int
    ) -> int:
        request = usage_pb2.ReportUsageRequest(
            source=source, first=first, events=events, lost_until=lost_until, apart=apart
        )
        answer: usage_pb2.ReportUsageResponse = await self.call(
            lambda channel: usage_pb2_grpc.UsageServiceStub(channel).ReportUsage, request, REPORT_S
        )
        return answer.last

    async def page(self, request: cp.ListUsageRequest) -> cp.ListUsageResponse:
        answer: cp.ListUsageResponse = await self.call(
            lambda channel: controlplane_pb2_grpc.ControlPlaneServiceStub(channel).ListUsage, request, LIST_S
        )
        return answer
