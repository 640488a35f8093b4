"""Unary calls to a role's leader. A leader that cannot be reached, or leads no more, is replaced by its
successor within the call's time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import (
    controlplane_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    slis_pb2,
    slis_pb2_grpc,
    usage_pb2,
    usage_pb2_grpc,
)
from services.adapters.links.scheduler_directory import LeaderAddress, LeaderDirectory
from services.core.arms import SliReceipt, SliReport
from services.core.errors import FairwayError, NoLeader, Unavailable
from services.core.estimates.pool_load import PoolLoad
from services.ports.clock import Clock
from services.rpc.channel import RoleChannel, auth_metadata
from services.rpc.convert.scheduler import LOAD
from services.rpc.convert.slis import report_to_proto
from services.rpc.status import from_rpc_error
from services.runtime.certificates import Certificates

Request = TypeVar("Request", bound=Message)
Answer = TypeVar("Answer", bound=Message)
Method = Callable[[grpc.aio.Channel], Any]  # returns the stub's method
Rpc = Callable[
    ["controlplane_pb2_grpc.ControlPlaneServiceAsyncStub"], grpc.aio.UnaryUnaryMultiCallable[Request, Answer]
]
QUEUES_S: Final = 3.0
_LOADS_PAGE: Final = 1000
_Stub = scheduler_pb2_grpc.SchedulerServiceStub
_Plane = controlplane_pb2_grpc.ControlPlaneServiceStub
REPORT_SLIS_S: Final = 10.0
SLIS_S: Final = 4.0  # a leader is replaced within 3 s, and a client tries another server after 5 s
TIMELINE_S: Final = 10.0  # time limit above the 8 s in which the leader reads the scheduler and the workers
DIAGNOSES_S: Final = 30.0
LEADERLESS_S: Final = 5.0  # a leader is replaced within 3 s
REPORT_USAGE_S: Final = 15.0
USAGE_S: Final = 15.0  # a client's attempt lasts as long, so that a change of the leader may pass
# The time limits of a call and of its wait for another leader, by its request, which no two RPCs share.
LIMITS_S: Final[Mapping[type[Message], tuple[float, float]]] = {
    cp.ListSlisRequest: (SLIS_S, math.inf),
    cp.ListFinishedRequestsRequest: (SLIS_S, math.inf),
    cp.GetTimelineRequest: (TIMELINE_S, math.inf),
    cp.DiagnoseLatencyRequest: (DIAGNOSES_S, LEADERLESS_S),
    cp.SaveLatencyBaselineRequest: (DIAGNOSES_S, LEADERLESS_S),
    cp.ListScalingRequest: (QUEUES_S, math.inf),
    cp.ListUsageRequest: (USAGE_S, math.inf),
}


class LeaderCalls:
    """Keeps a channel to the last leader; the owner closes it. ``ROLE`` names the leader in errors.

    A channel to an earlier leader is left, not closed: that would cancel the calls of others on it.
    """

    ROLE: ClassVar[str]

    def __init__(
        self,
        directory: LeaderDirectory,
        internal_token: str,
        clock: Clock,
        certificates: Certificates | None = None,
    ) -> None:
        self._directory = directory
        self._metadata = auth_metadata(internal_token)
        self._clock = clock
        self._certificates = certificates
        self._channel: RoleChannel | None = None

    async def call(
        self, method: Method, request: Message, timeout_s: float, *, leaderless_s: float = math.inf
    ) -> Any:
        """Return the leader's response.

        Raises NoLeader after the timeout, or once no other leader came for ``leaderless_s``; or the leader's
        error.
        """
        deadline_s = self._clock.monotonic_s() + timeout_s
        leader, error = self._directory.leader, None
        while (left_s := deadline_s - self._clock.monotonic_s()) > 0:
            if leader is not None:
                try:
                    return await self._call(leader, method, request, left_s)
                except Unavailable as failure:
                    error = failure
            seen, leader = leader, await self._directory.wait_changed(leader, min(left_s, leaderless_s))
            if leader == seen and left_s > leaderless_s:
                break
        raise NoLeader(f"no {self.ROLE} leads that can be reached: {self._why(error)}", retry_after_s=1.0)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _call(self, leader: LeaderAddress, method: Method, request: Message, timeout_s: float) -> Any:
        if self._channel is None or self._channel.address != leader.address:
            role = self.ROLE.replace(" ", "")
            self._channel = RoleChannel(leader.address, role, self._certificates)
        try:
            return await method(self._channel())(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            raise self._error_of(failure, leader) from failure

    def _error_of(self, failure: grpc.aio.AioRpcError, leader: LeaderAddress) -> FairwayError:
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return NoLeader(f"the {self.ROLE} at {leader.address} does not answer")
        return from_rpc_error(failure)

    def _why(self, error: FairwayError | None) -> str:
        return f"no leader exists; start a {self.ROLE}" if error is None else error.message


class GrpcQueues(LeaderCalls):
    """Queries of the leading scheduler, whose messages are forwarded to operators as they are.

    Each call raises NoLeader within a bounded time when no scheduler leads.
    """

    ROLE = "scheduler"

    def __init__(
        self,
        directory: LeaderDirectory,
        internal_token: str,
        clock: Clock,
        certificates: Certificates | None = None,
        *,
        timeout_s: float = QUEUES_S,
    ) -> None:
        super().__init__(directory, internal_token, clock, certificates)
        self._timeout_s = timeout_s

    async def page(self, *, size: int, token: str, tenant: str) -> scheduler_pb2.ListPoolsResponse:
        """Return a page of pools with the shares of one tenant, or of all when ``tenant`` is empty."""
        request = scheduler_pb2.ListPoolsRequest(page_size=size, page_token=token, tenant=tenant)
        found: scheduler_pb2.ListPoolsResponse
        found = await self.call(lambda channel: _Stub(channel).ListPools, request, self._timeout_s)
        return found

    async def loads(self) -> dict[str, PoolLoad]:
        """Return the load of every pool, by version digest."""
        found: dict[str, PoolLoad] = {}
        request = scheduler_pb2.ListPoolsRequest(page_size=_LOADS_PAGE, only_load=True)
        while True:
            page = await self.call(lambda channel: _Stub(channel).ListPools, request, self._timeout_s)
            found |= {pool.version_digest: LOAD.from_proto(pool.load) for pool in page.pools}
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

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


class LeadingPlane(Protocol):
    """Operators' queries of the leading control plane, which a standby forwards."""

    async def ask(self, rpc: Rpc[Request, Answer], request: Request) -> Answer:
        """Return the leader's answer. Raises NoLeader within a bounded time when none leads."""


class GrpcPlane(LeaderCalls):
    """Implements ``LeadingPlane`` for the requests in ``LIMITS_S``."""

    ROLE = "control plane"

    async def ask(self, rpc: Rpc[Request, Answer], request: Request) -> Answer:
        timeout_s, leaderless_s = LIMITS_S[type(request)]
        answer: Answer = await self.call(
            lambda channel: rpc(_Plane(channel)), request, timeout_s, leaderless_s=leaderless_s
        )
        return answer


class GrpcSlis(LeaderCalls):
    """Reports to the leader's store of service level indicators. Implements the gateway's port."""

    ROLE = "control plane"

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        request = slis_pb2.ReportSlisRequest(
            source=source, first=first, oldest=oldest, reports=map(report_to_proto, reports)
        )

        def send(channel: grpc.aio.Channel) -> Any:
            # Each try states its own time, since it may have waited for a leader.
            request.sent_unix_ms = round(self._clock.unix_s() * 1000)
            return slis_pb2_grpc.SliServiceStub(channel).ReportSlis

        answer: slis_pb2.ReportSlisResponse = await self.call(send, request, REPORT_SLIS_S)
        return SliReceipt(answer.last, answer.durable)


class GrpcUsage(LeaderCalls):
    """Reports to the leader's usage ledger. Implements ``adapters.usage.outbox.UsageReports``."""

    ROLE = "control plane"

    async def report(
        self, source: str, first: int, events: Sequence[usage_pb2.UsageEvent], lost_until: int, apart: int
    ) -> int:
        request = usage_pb2.ReportUsageRequest(
            source=source, first=first, events=events, lost_until=lost_until, apart=apart
        )
        answer: usage_pb2.ReportUsageResponse = await self.call(
            lambda channel: usage_pb2_grpc.UsageServiceStub(channel).ReportUsage, request, REPORT_USAGE_S
        )
        return answer.last
