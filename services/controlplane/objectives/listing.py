"""ListSlis: queries between the wire and the sums of the leader. A standby forwards them to it."""

from __future__ import annotations

from typing import Final, Protocol

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.objectives.policy.book import SERIES_S
from services.controlplane.objectives.store import SliStore
from services.core.arms import SliKey, SliSums
from services.core.errors import NoLeader
from services.core.estimates.finished import FinishedRequest
from services.core.estimates.sketch import merged
from services.core.paging import page_of
from services.rpc.convert.inference import PRIORITIES
from services.rpc.convert.slis import finished_to_proto
from services.rpc.convert.times import seconds_of
from services.runtime.ids import request_id_of

_LIMIT: Final = 100


class LeadingSlis(Protocol):
    """Queries of the leading control plane. Raises NoLeader within a bounded time when none leads."""

    async def page(self, request: pb.ListSlisRequest) -> pb.ListSlisResponse: ...

    async def finished(self, request: pb.ListFinishedRequestsRequest) -> pb.ListFinishedRequestsResponse: ...


class SliListing:
    """Answers from the store of indicators while this control plane leads."""

    def __init__(self, store: SliStore, leader: LeadingSlis) -> None:
        self._store = store
        self._leader = leader

    async def page(self, request: pb.ListSlisRequest, *, forwarded: bool) -> pb.ListSlisResponse:
        """Return a page of series. ``forwarded``: another control plane took this one for the leader.

        Only the series of the page are summed. Raises NoLeader or InvalidInput.
        """
        if not self._store.leads and not forwarded:
            return await self._leader.page(request)
        window_s = seconds_of(request.window) or SERIES_S
        wanted = sorted((one for one in self._store.series(window_s) if _takes(request, one)), key=_name)
        page, token = page_of(wanted, _name, size=request.page_size, token=request.page_token)
        slis = [_summary(one, self._store.sums_of(one, window_s)) for one in page]
        return pb.ListSlisResponse(slis=slis, next_page_token=token)

    async def finished(
        self, request: pb.ListFinishedRequestsRequest, *, forwarded: bool
    ) -> pb.ListFinishedRequestsResponse:
        """Return requests that have ended. Raises NoLeader."""
        if not self._store.leads:
            if forwarded:
                raise NoLeader("this control plane does not lead", retry_after_s=1.0)
            return await self._leader.finished(request)

        wanted = request_id_of(request.request_name)

        def takes(one: FinishedRequest) -> bool:
            return (
                request.tenant in ("", one.tenant)
                and request.model in ("", one.model)
                and (wanted == one.request_id or one.request_id.startswith(f"{wanted}-") or not wanted)
                and (one.failed or not request.failed)
            )

        found = self._store.requests.find(takes, slow=request.slow, limit=request.limit or _LIMIT)
        return pb.ListFinishedRequestsResponse(requests=map(finished_to_proto, found))


def _takes(request: pb.ListSlisRequest, series: SliKey) -> bool:
    return (
        request.model in ("", series.arm.model)
        and request.tenant in ("", series.tenant)
        and request.priority in (0, PRIORITIES[series.priority])
        and request.zone in ("", series.zone)
    )


def _name(series: SliKey) -> str:
    """Return a name that sorts by the columns; no column contains its separator."""
    arm = series.arm
    return "\0".join((arm.model, arm.version_digest, series.tenant, series.priority, series.zone))


def _summary(series: SliKey, sums: SliSums) -> pb.SliSummary:
    ttft = merged(sums.ttft.values())
    return pb.SliSummary(
        model=series.arm.model,
        version_digest=series.arm.version_digest,
        tenant=series.tenant,
        priority=PRIORITIES[series.priority],
        zone=series.zone,
        requests=sums.requests,
        errors=sums.errors,
        started=sums.started,
        broken=sums.broken,
        poisoned=sums.poisoned,
        output_tokens=sums.output_tokens,
        device_s=sums.device_s,
        ttft_p50_s=ttft.quantile(0.5),
        ttft_p95_s=ttft.quantile(0.95),
        ttft_p99_s=ttft.quantile(0.99),
        itl_p50_s=sums.itl.quantile(0.5),
        itl_p95_s=sums.itl.quantile(0.95),
    )
