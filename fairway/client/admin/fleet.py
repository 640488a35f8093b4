"""Events, queues and placements of the fleet."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Final

from fairway.client.admin.calls import Service
from fairway.client.admin.watch import Missed, OnLost, watch_events
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import scheduler_pb2 as sched

Kinds = Sequence[cp.ResourceKind.ValueType]
_NEWEST: Final = 20


class Events:
    """The fleet's events, retained for about an hour."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(
        self,
        *,
        kinds: Kinds = (),
        resource: str = "",
        limit: int | None = 100,
        timeout_s: float | None = None,
    ) -> Sequence[cp.Event]:
        """Return the newest ``limit`` (None: all), newest first; filtered by kinds and resource, if given."""
        return await self._service.pages(
            "ListEvents", "events", limit=limit, timeout_s=timeout_s, kinds=kinds, resource=resource
        )

    def watch(
        self,
        *,
        kinds: Kinds = (),
        resource: str = "",
        newest: int = _NEWEST,
        on_lost: OnLost | None = None,
    ) -> AsyncGenerator[cp.Event | Missed, None]:
        """Yield the ``newest`` events, oldest first, then every further one, until it is closed.

        It survives lost connections and continues at its position; Missed marks a gap where that was not
        possible. Close it, with ``contextlib.aclosing``.
        """
        return watch_events(self._service, tuple(kinds), resource, newest, on_lost)


class Queues:
    """Queued and running requests by pool, from the leading scheduler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(
        self, *, tenant: str = "", limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[cp.Queue]:
        """Return the pools, with the shares of one tenant or of all. Raises Unavailable without a leader."""
        return await self._service.pages(
            "ListQueues", "queues", limit=limit, timeout_s=timeout_s, tenant=tenant
        )


class Placements:
    """Placement decisions of requests and the state of the workers, from the leading scheduler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def explain(
        self, request_id: str, *, timeout_s: float | None = None
    ) -> cp.ExplainPlacementResponse:
        """Return the recorded decisions on the request. Raises Unavailable without a leader."""
        answer: cp.ExplainPlacementResponse = await self._service.call(
            "ExplainPlacement", timeout_s=timeout_s, request_id=request_id
        )
        return answer

    async def workers(
        self, *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[sched.Reporter]:
        """Return the workers that reported to the leader. Raises Unavailable without a leader."""
        return await self._service.pages("ListWorkers", "workers", limit=limit, timeout_s=timeout_s)


class UsageRecords:
    """What was used and what it cost, from the leading control plane."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(
        self,
        *,
        tenant: str = "",
        key: str = "",
        user: str = "",
        model: str = "",
        labels: Mapping[str, str] | None = None,
        group_by: Sequence[cp.UsageDimension.ValueType] = (),
        group_by_labels: Sequence[str] = (),
        granularity: cp.UsageGranularity.ValueType = cp.USAGE_GRANULARITY_UNSPECIFIED,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Sequence[cp.UsageRecord]:
        """Return the records of whole hours from ``start_time``, by default of today (UTC), to ``end_time``.

        Dimensions that are not in ``group_by`` are summed. Raises Unavailable without a leader.
        """
        return await self._service.pages(
            "ListUsage",
            "records",
            limit=limit,
            timeout_s=timeout_s,
            tenant=tenant,
            key=key,
            user=user,
            model=model,
            labels=labels or {},
            group_by=group_by,
            group_by_labels=group_by_labels,
            granularity=granularity,
            start_time=start_time,
            end_time=end_time,
        )
