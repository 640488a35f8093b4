"""Placements in the scheduler's own process, over the same streams that the servicer drives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Final

from services.adapters.muxed_placement import MuxedPlacement, PlacementLink, PlacementSettings
from services.core.errors import NoLeader
from services.core.fleet import PlacementFrame
from services.core.generation import PlaceSpec
from services.ports.clock import Clock
from services.ports.placement_stream import PlacementStream, PlacementStreams
from services.runtime.supervisor import Supervisor

_LOOK_S: Final = 0.2  # how often a scheduler that does not lead is asked again


class LocalPlacement(MuxedPlacement):
    """Implements ``ports.placement.PlacementClient`` against a scheduler service of this process."""

    def __init__(
        self,
        scheduler: PlacementStreams,
        gateway_id: str,
        clock: Clock,
        supervisor: Supervisor,
        rng: Random,
        settings: PlacementSettings | None = None,
    ) -> None:
        super().__init__(LocalPlacementLinks(scheduler, gateway_id, clock), clock, supervisor, rng, settings)


class LocalPlacementLinks:
    """Implements ``PlacementLinks`` without a wire."""

    def __init__(self, scheduler: PlacementStreams, gateway_id: str, clock: Clock) -> None:
        self._scheduler = scheduler
        self._gateway_id = gateway_id
        self._clock = clock

    async def open(self) -> PlacementLink:
        woken = asyncio.Event()
        return _LocalLink(self._scheduler.open(self._gateway_id, woken.set), woken)

    async def wait_leader_change(self, timeout_s: float) -> None:
        await self._clock.sleep(min(timeout_s, _LOOK_S))

    async def close(self) -> None:
        pass


class _LocalLink:
    def __init__(self, stream: PlacementStream, woken: asyncio.Event) -> None:
        self._stream = stream
        self._woken = woken
        self._closed = False

    @property
    def epoch(self) -> int:
        return self._stream.epoch

    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        if places:
            self._stream.submit(
                [(number, replace(spec, queue_ttl_s=ttl_s)) for number, spec, ttl_s in places]
            )
        if cancelled:
            self._stream.cancel(cancelled)

    async def receive(self) -> PlacementFrame:
        """Without heartbeats: the end of a stream of this process wakes its reader."""
        while not self._closed:
            if (frame := self._stream.take()) is not None:
                return frame
            await self._woken.wait()
            self._woken.clear()
        raise NoLeader("the stream was closed on this side")

    async def close(self) -> None:
        self._closed = True
        self._stream.close()
        self._woken.set()
