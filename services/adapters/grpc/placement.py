"""Placement client over gRPC: one Connect stream to the leading scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from fairway.v1 import scheduler_pb2
from services.adapters.grpc.streams import Call, GrpcLink, GrpcLinks, first_epoch
from services.adapters.links.leader_links import SILENCE_S
from services.adapters.links.muxed_placement import MuxedPlacement, PlacementLink, PlacementSettings
from services.adapters.links.scheduler_directory import LeaderDirectory
from services.core.fleet import PlacementFrame
from services.core.generation import PlaceSpec
from services.ports.clock import Clock
from services.ports.placement import FallbackPlacer
from services.rpc.convert.scheduler import connect_request, frame_from_proto
from services.runtime.supervisor import Supervisor


class GrpcPlacement(MuxedPlacement):
    """Implements ``ports.placement.PlacementClient`` against the leader that the directory returns."""

    def __init__(
        self,
        directory: LeaderDirectory,
        token: str,
        gateway_id: str,
        clock: Clock,
        supervisor: Supervisor,
        rng: Random,
        settings: PlacementSettings | None = None,
        *,
        fallback: FallbackPlacer | None = None,
        zone: str = "",
    ) -> None:
        links = GrpcPlacementLinks(directory, token, gateway_id, zone=zone)
        super().__init__(links, clock, supervisor, rng, settings, fallback=fallback)


class GrpcPlacementLinks(GrpcLinks):
    """Implements ``PlacementLinks`` over Connect streams."""

    def __init__(
        self,
        directory: LeaderDirectory,
        token: str,
        gateway_id: str,
        *,
        silence_s: float = SILENCE_S,
        zone: str = "",
    ) -> None:
        super().__init__(directory, token, silence_s=silence_s)
        self._hello = scheduler_pb2.GatewayHello(gateway_id=gateway_id, zone=zone)

    async def open(self) -> PlacementLink:
        stub = await self._stub()
        call: Call = stub.Connect(metadata=self._metadata)
        epoch = await first_epoch(call, scheduler_pb2.ConnectRequest(hello=self._hello))
        return _GrpcPlacementLink(call, epoch, self._silence_s)


class _GrpcPlacementLink(GrpcLink):
    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        await self._write(connect_request(places, cancelled))

    async def receive(self) -> PlacementFrame:
        return frame_from_proto(await self._read(), self.epoch)
