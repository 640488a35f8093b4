"""Placements over gRPC: one Connect stream to the leading scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import grpc

from fairway.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.adapters.grpc_streams import LeaderCalls, read_within, stream_error
from services.adapters.muxed_placement import MuxedPlacement, PlacementLink, PlacementSettings
from services.adapters.scheduler_directory import LeaderDirectory
from services.core.errors import NoLeader
from services.core.fleet import PlacementFrame
from services.core.generation import PlaceSpec
from services.ports.clock import Clock
from services.rpc.channel import auth_metadata
from services.rpc.convert_scheduler import connect_request, frame_from_proto
from services.runtime.supervisor import Supervisor

ConnectCall = grpc.aio.StreamStreamCall[Any, Any]

OPEN_S: Final = 2.0
SILENCE_S: Final = 3.5  # several of the leader's heartbeats


class GrpcPlacement(MuxedPlacement):
    """Implements ``ports.placement.PlacementClient`` against whichever scheduler the directory names."""

    def __init__(
        self,
        directory: LeaderDirectory,
        token: str,
        gateway_id: str,
        clock: Clock,
        supervisor: Supervisor,
        rng: Random,
        settings: PlacementSettings | None = None,
    ) -> None:
        links = GrpcPlacementLinks(directory, token, gateway_id)
        super().__init__(links, clock, supervisor, rng, settings)


class GrpcPlacementLinks:
    """Implements ``PlacementLinks``: a channel per leader, a stream per link."""

    def __init__(
        self, directory: LeaderDirectory, token: str, gateway_id: str, *, silence_s: float = SILENCE_S
    ) -> None:
        self._calls = LeaderCalls(directory)
        self._token = token
        self._gateway_id = gateway_id
        self._silence_s = silence_s

    async def open(self) -> PlacementLink:
        channel = await self._calls.channel(OPEN_S)
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call: ConnectCall = stub.Connect(metadata=auth_metadata(self._token))
        try:
            hello = scheduler_pb2.GatewayHello(gateway_id=self._gateway_id)
            first = await _first(call, scheduler_pb2.ConnectRequest(hello=hello))
        except BaseException:
            call.cancel()
            raise
        return _GrpcLink(call, first.leadership.epoch, self._silence_s)

    async def wait_leader_change(self, timeout_s: float) -> None:
        await self._calls.wait_change(timeout_s)

    async def close(self) -> None:
        await self._calls.close()


async def _first(call: ConnectCall, hello: scheduler_pb2.ConnectRequest) -> scheduler_pb2.ConnectResponse:
    """Say hello and return what the leader says first."""
    try:
        async with asyncio.timeout(OPEN_S):
            await call.write(hello)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
        raise await stream_error(call, error) from None
    first: scheduler_pb2.ConnectResponse = await read_within(call, OPEN_S)
    if not first.HasField("leadership"):
        raise NoLeader("the scheduler did not say that it leads")
    return first


class _GrpcLink:
    def __init__(self, call: ConnectCall, epoch: int, silence_s: float) -> None:
        self._call = call
        self._epoch = epoch
        self._silence_s = silence_s

    @property
    def epoch(self) -> int:
        return self._epoch

    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        try:
            await self._call.write(connect_request(places, cancelled))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await stream_error(self._call, error) from None

    async def receive(self) -> PlacementFrame:
        return frame_from_proto(await read_within(self._call, self._silence_s), self._epoch)

    async def close(self) -> None:
        self._call.cancel()
