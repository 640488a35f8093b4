"""What happens in the fleet, what waits in it and how it is placed: events, queues and placements."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Final

from fairway.client.admin.calls import Service
from fairway.client.admin.watch import Missed, OnLost, watch_events
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import scheduler_pb2 as sched

Kinds = Sequence[cp.ResourceKind.ValueType]
_NEWEST: Final = 20


class Events:
    """Kept for about an hour."""

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
        """Return the newest ``limit`` (None: all), newest first; of these kinds and this resource, if any."""
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
        """Yield the ``newest``, the oldest of them first, then every further one, until it is closed.

        It outlives connections and goes on where it was; Missed stands where that was not possible. Close
        it, with ``contextlib.aclosing``.
        """
        return watch_events(self._service, tuple(kinds), resource, newest, on_lost)


class Queues:
    """What waits and runs by pool, as the leading scheduler knows it."""

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
    """How requests came to their workers, and how the workers stand, as the leading scheduler knows it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def explain(
        self, request_id: str, *, timeout_s: float | None = None
    ) -> cp.ExplainPlacementResponse:
        """Return what is remembered of the request. Raises Unavailable without a leader."""
        answer: cp.ExplainPlacementResponse = await self._service.call(
            "ExplainPlacement", timeout_s=timeout_s, request_id=request_id
        )
        return answer

    async def workers(
        self, *, limit: int | None = None, timeout_s: float | None = None
    ) -> Sequence[sched.Reporter]:
        """Return the workers that reported to the leader. Raises Unavailable without a leader."""
        return await self._service.pages("ListWorkers", "workers", limit=limit, timeout_s=timeout_s)
