"""What happens in the fleet, and what waits in it: events and queues."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Final

from fairway.client.admin_calls import Service
from fairway.client.admin_watch import Missed, OnLost, watch_events
from fairway.v1 import controlplane_pb2 as cp

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
