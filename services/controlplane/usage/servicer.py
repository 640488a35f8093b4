"""Usage on the wire: reports of gateways and workers, and ListUsage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import usage_pb2, usage_pb2_grpc
from services.adapters.grpc.leader_calls import LeadingPlane
from services.controlplane.fleet import readable
from services.controlplane.resources.deployments import revisions_of
from services.controlplane.usage.codec import SOURCES
from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.policy.book import UsageReport
from services.controlplane.usage.policy.lines import HOUR_S
from services.controlplane.usage.policy.queries import Dimension, UsageQuery, UsageRow
from services.core.errors import InvalidInput
from services.core.generation import Usage
from services.core.limits import Price
from services.core.paging import page_of
from services.core.records import DEPLOYMENTS, Deployment
from services.core.usage import RequestUsage, UsageEvent
from services.ports.clock import Clock
from services.ports.store import Store
from services.rpc.convert.usage import event_from_proto

MAX_HOURS: Final = 93 * 24
_CACHED_S: Final = 30.0
_DAY_HOURS: Final = 24
_DIMENSIONS: Final = {
    pb.USAGE_DIMENSION_TENANT: Dimension.TENANT,
    pb.USAGE_DIMENSION_KEY: Dimension.KEY,
    pb.USAGE_DIMENSION_USER: Dimension.USER,
    pb.USAGE_DIMENSION_MODEL: Dimension.MODEL,
    pb.USAGE_DIMENSION_VERSION: Dimension.VERSION,
}
_HOURS_EACH: Final = {
    pb.USAGE_GRANULARITY_UNSPECIFIED: 0,
    pb.USAGE_GRANULARITY_HOUR: 1,
    pb.USAGE_GRANULARITY_DAY: _DAY_HOURS,
}
_MOST_NAMES: Final = 10_000


class ListPrices:
    """The highest prices of deployments, as they were read last: bounds of what a reported request may cost.

    A request costs at most its tokens at the highest price in its deployment's history, which outlives the
    deployment, and without a history at the highest price of the fleet. So what an earlier price makes right
    is never refused; the history is read again before anything is.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._highest: dict[str, Price] = {}

    async def check(self, events: Iterable[UsageEvent]) -> None:
        """Return if each request costs at most its bound. Raises InvalidInput or StoreUnavailable."""
        for event in events:
            if not isinstance(event, RequestUsage) or event.list_micros <= self._most_micros(event):
                continue
            await self._read(event.model)
            if event.list_micros > (most := self._most_micros(event)):
                field = "events.request.list_micros"
                raise InvalidInput(
                    f"{field} is {event.list_micros}; its tokens cost at most {most} at the highest price "
                    f"that {event.model} had",
                    field=field,
                )

    def _most_micros(self, event: RequestUsage) -> int:
        usage = Usage(event.usage.prompt_tokens, event.usage.output_tokens)  # cached ones never cost more
        return self._highest.get(event.model, Price()).cost_micros(usage)

    async def _read(self, model: str) -> None:
        prices = [one.deployment.price for _, one in await revisions_of(self._store, model)]
        if not prices:
            entries = (await self._store.list(DEPLOYMENTS)).entries
            prices = [one.price for entry in entries if (one := readable(entry, Deployment)) is not None]
        if len(self._highest) >= _MOST_NAMES:
            self._highest.clear()
        self._highest[model] = Price(
            max((price.input_micros for price in prices), default=0),
            output_micros=max((price.output_micros for price in prices), default=0),
        )


@dataclass(frozen=True, slots=True)
class _Listed:
    """The rows of a query whose pages are being read."""

    query: UsageQuery
    rows: list[UsageRow]
    until_s: float


class UsageListing:
    """Answers from the ledger while this control plane leads. A standby forwards queries to the leader."""

    def __init__(self, ledger: UsageLedger, leader: LeadingPlane, clock: Clock) -> None:
        self._ledger = ledger
        self._leader = leader
        self._clock = clock
        self._listed: _Listed | None = None

    async def page(self, request: pb.ListUsageRequest, *, forwarded: bool) -> pb.ListUsageResponse:
        """Return a page of records. ``forwarded``: another control plane took this one for the leader.

        Raises NoLeader, InvalidInput or StoreUnavailable.
        """
        query = query_of(request, self._clock.unix_s())
        if not self._ledger.leads and not forwarded:
            return await self._leader.ask(lambda plane: plane.ListUsage, request)
        rows = await self._rows(query, first=not request.page_token)
        page, token = page_of(rows, lambda row: row.name, size=request.page_size, token=request.page_token)
        return pb.ListUsageResponse(records=[_record(query, row) for row in page], next_page_token=token)

    async def _rows(self, query: UsageQuery, *, first: bool) -> list[UsageRow]:
        """Return the rows; further pages of the last query read what its first page did."""
        listed, now_s = self._listed, self._clock.monotonic_s()
        if listed is None or first or listed.query != query or now_s > listed.until_s:
            rows = await self._ledger.rows(query)
            listed = self._listed = _Listed(query, rows, now_s + _CACHED_S)
        return listed.rows


def query_of(request: pb.ListUsageRequest, now_s: float) -> UsageQuery:
    """Return the query. Raises InvalidInput for an empty or too long time range."""
    this_hour = int(now_s // HOUR_S)
    start = this_hour - this_hour % _DAY_HOURS
    if request.HasField("start_time"):
        start = max(0, request.start_time.seconds // HOUR_S)
    end = this_hour + 1
    if request.HasField("end_time"):
        end = min(end, -(-request.end_time.seconds // HOUR_S))
    if request.HasField("start_time") and request.HasField("end_time") and end <= start <= this_hour:
        raise InvalidInput("end_time is not after start_time", field="end_time")
    if end - start > MAX_HOURS:
        raise InvalidInput(
            f"at most {MAX_HOURS // _DAY_HOURS} days can be listed at once", field="start_time"
        )
    if any(one not in _DIMENSIONS for one in request.group_by):
        raise InvalidInput("an unknown dimension cannot be grouped by", field="group_by")
    return UsageQuery(
        start,
        end,
        tenant=request.tenant,
        key_id=request.key,
        user=request.user,
        model=request.model,
        labels=dict(request.labels),
        group_by=tuple(sorted({_DIMENSIONS[one] for one in request.group_by})),
        group_by_labels=tuple(sorted(set(request.group_by_labels))),
        hours_each=_HOURS_EACH[request.granularity],
    )


def _record(query: UsageQuery, row: UsageRow) -> pb.UsageRecord:
    line, amounts = row.line, row.amounts.bounded()
    hour = Timestamp()
    hour.FromDatetime(datetime.fromtimestamp(line.hour * HOUR_S, UTC))
    return pb.UsageRecord(
        tenant=line.tenant,
        key=line.key_id,
        user=line.user,
        model=line.model,
        version_digest=line.version_digest,
        labels=dict(line.labels),
        source=SOURCES[line.source],
        hour=hour,
        requests=max(0, amounts.requests),
        prompt_tokens=max(0, amounts.prompt_tokens),
        cached_tokens=max(0, amounts.cached_tokens),
        output_tokens=max(0, amounts.output_tokens),
        device_us=max(0, amounts.device_us),
        list_cost_micros=max(0, amounts.list_micros),
        measured_cost_micros=max(0, round(amounts.measured_nanos / 1000)),
    )


class UsageServicer(usage_pb2_grpc.UsageServiceServicer):
    def __init__(self, ledger: UsageLedger, prices: ListPrices) -> None:
        self._ledger = ledger
        self._prices = prices

    async def ReportUsage(
        self, request: usage_pb2.ReportUsageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> usage_pb2.ReportUsageResponse:
        events = tuple(map(event_from_proto, request.events))
        await self._prices.check(events)
        report = UsageReport(request.source, request.first, events, request.lost_until, request.apart)
        return usage_pb2.ReportUsageResponse(last=await self._ledger.report(report))
