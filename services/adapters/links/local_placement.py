"""Placement client in the scheduler's own process, over the streams that the servicer uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from services.adapters.links.local_links import LocalLink, LocalLinks
from services.adapters.links.muxed_placement import MuxedPlacement, PlacementLink, PlacementSettings
from services.core.fleet import PlacementFrame
from services.core.generation import PlaceSpec
from services.ports.clock import Clock
from services.ports.placement import FallbackPlacer
from services.ports.placement_stream import PlacementStream, PlacementStreams
from services.runtime.supervisor import Supervisor


class LocalPlacement(MuxedPlacement):
    """Implements ``ports.placement.PlacementClient`` against a scheduler service in this process."""

    def __init__(
        self,
        scheduler: PlacementStreams,
        gateway_id: str,
        clock: Clock,
        supervisor: Supervisor,
        rng: Random,
        settings: PlacementSettings | None = None,
        *,
        fallback: FallbackPlacer | None = None,
        zone: str = "",
    ) -> None:
        links = LocalPlacementLinks(scheduler, gateway_id, clock, zone=zone)
        super().__init__(links, clock, supervisor, rng, settings, fallback=fallback)


class LocalPlacementLinks(LocalLinks):
    """Implements ``PlacementLinks`` without a network."""

    def __init__(self, scheduler: PlacementStreams, gateway_id: str, clock: Clock, *, zone: str = "") -> None:
        super().__init__(clock)
        self._scheduler = scheduler
        self._gateway_id = gateway_id
        self._zone = zone

    async def open(self) -> PlacementLink:
        woken = asyncio.Event()
        return _LocalPlacementLink(self._scheduler.open(self._gateway_id, woken.set, zone=self._zone), woken)


class _LocalPlacementLink(LocalLink[PlacementStream, PlacementFrame]):
    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        if places:
            self._stream.submit(
                [(number, replace(spec, queue_ttl_s=ttl_s)) for number, spec, ttl_s in places]
            )
        if cancelled:
            self._stream.cancel(cancelled)
