"""Service level indicators on the wire: reports of gateways, and queries of the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import grpc

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import slis_pb2, slis_pb2_grpc
from services.adapters.grpc.leader_calls import LeadingPlane
from services.controlplane.objectives.policy.book import SERIES_S
from services.controlplane.objectives.store import SliStore
from services.core.arms import ArmKey, SliKey, SliSums
from services.core.errors import FairwayError, NoLeader
from services.core.estimates.finished import FinishedRequest
from services.core.estimates.sketch import merged
from services.core.paging import page_of
from services.core.records import Objective, Worker
from services.rpc.convert.inference import PRIORITIES, seconds_of
from services.rpc.convert.slis import finished_to_proto, report_from_proto
from services.runtime.ids import request_id_of

_LIMIT: Final = 100
_HOUR_S: Final = 3600.0


class SliListing:
    """Answers from the store of indicators while this control plane leads, else forwards to the leader."""

    def __init__(
        self, store: SliStore, leader: LeadingPlane, *, workers: Callable[[], Iterable[Worker]] = tuple
    ) -> None:
        self._store = store
        self._leader = leader
        self._workers = workers

    async def page(self, request: pb.ListSlisRequest, *, forwarded: bool) -> pb.ListSlisResponse:
        """Return a page of series. ``forwarded``: another control plane took this one for the leader.

        Only the series of the page are summed. Raises NoLeader or InvalidInput.
        """
        if not self._store.leads and not forwarded:
            return await self._leader.ask(lambda plane: plane.ListSlis, request)
        window_s = seconds_of(request.window) or SERIES_S
        wanted = sorted((one for one in self._store.series(window_s) if _takes(request, one)), key=_name)
        page, token = page_of(wanted, _name, size=request.page_size, token=request.page_token)
        prices = _prices(self._workers()) if page else {}
        slis = [_summary(one, self._store.sums_of(one, window_s), prices) for one in page]
        return pb.ListSlisResponse(slis=slis, next_page_token=token)

    async def finished(
        self, request: pb.ListFinishedRequestsRequest, *, forwarded: bool
    ) -> pb.ListFinishedRequestsResponse:
        """Return requests that have ended. Raises NoLeader."""
        if not self._store.leads:
            if forwarded:
                raise NoLeader("this control plane does not lead", retry_after_s=1.0)
            return await self._leader.ask(lambda plane: plane.ListFinishedRequests, request)

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


def _prices(workers: Iterable[Worker]) -> dict[ArmKey, float]:
    """Return the mean hourly price of the workers that have each version, of those that state one."""
    found: dict[ArmKey, list[float]] = {}
    for worker in workers:
        for one in worker.versions if worker.cost_per_hour else ():
            found.setdefault(ArmKey(one.deployment, one.version_digest), []).append(worker.cost_per_hour)
    return {arm: sum(prices) / len(prices) for arm, prices in found.items()}


def _summary(series: SliKey, sums: SliSums, prices: Mapping[ArmKey, float]) -> pb.SliSummary:
    ttft = merged(sums.ttft.values())
    price = prices.get(series.arm)
    cost = 1000.0 * sums.device_s * price / _HOUR_S if price is not None and sums.tokens else None
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
        total_p50_s=sums.total.quantile(0.5),
        total_p95_s=sums.total.quantile(0.95),
        tokens=sums.tokens,
        prompt_tokens=sums.prompt_tokens,
        cached_tokens=sums.cached_tokens,
        cost_per_1k_tokens=None if cost is None else cost / sums.tokens,
    )


class SliPages(Protocol):
    """``objectives.listing.SliListing``."""

    async def page(self, request: pb.ListSlisRequest, *, forwarded: bool) -> pb.ListSlisResponse: ...

    async def finished(
        self, request: pb.ListFinishedRequestsRequest, *, forwarded: bool
    ) -> pb.ListFinishedRequestsResponse: ...


async def warnings_of(objective: Objective, slis: SliPages) -> list[str]:
    """Return the warnings; none for an objective that only observes."""
    found, target_s = list[str](), objective.ttft.seconds
    whose = f"{objective.priority} requests of {objective.model}"
    if not objective.shapes_serving:
        return found
    if target_s:
        found.append(
            f"{whose} are refused when their predicted wait exceeds {target_s:g} s, in place of the target "
            "of the class; what waits is shed at 1.5 times that, and pressure and degrading follow it"
        )
        usual_s = await _usual_ttft_s(objective, slis)
        if usual_s is not None and target_s < usual_s:
            found.append(
                f"half of the {whose} of the last hour had their first token after {usual_s:.3g} s or more: "
                f"with {target_s:g} s almost every one that has to wait at all is refused"
            )
    if objective.itl.seconds:
        found.append(f"prefill on the workers of {objective.model} is paced for {objective.itl.seconds:g} s")
    return found


async def _usual_ttft_s(objective: Objective, slis: SliPages) -> float | None:
    """Return the median of the series with the lowest one, None without any or without a leader."""
    request = pb.ListSlisRequest(
        model=objective.model, priority=PRIORITIES[objective.priority], page_size=1000
    )
    try:
        page = await slis.page(request, forwarded=False)
    except FairwayError:
        return None
    return min((one.ttft_p50_s for one in page.slis if one.HasField("ttft_p50_s")), default=None)


class SliServicer(slis_pb2_grpc.SliServiceServicer):
    def __init__(self, store: SliStore) -> None:
        self._store = store

    async def ReportSlis(
        self, request: slis_pb2.ReportSlisRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> slis_pb2.ReportSlisResponse:
        reports = tuple(map(report_from_proto, request.reports))
        receipt = self._store.report(
            request.source,
            request.first,
            request.oldest,
            reports,
            sent_unix_s=request.sent_unix_ms / 1000 or None,
        )
        return slis_pb2.ReportSlisResponse(last=receipt.last, durable=receipt.durable)
