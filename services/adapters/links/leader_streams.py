"""Links to the leading scheduler over any transport: Connect for placements, Report for worker reports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

from fairway.v1 import scheduler_pb2
from services.adapters.links.leader_links import OPEN_S, SILENCE_S
from services.adapters.links.muxed_placement import PlacementLink, SlotsMessage
from services.adapters.links.reporter import ReportLink
from services.adapters.links.scheduler_directory import LeaderAddress, LeaderDirectory
from services.core.errors import NoLeader
from services.core.fleet import PlacementFrame, ReportSnapshot
from services.core.generation import PlaceSpec
from services.ports.streams import ClientStream, ReportAnswer, StreamClient, StreamLost, StreamMethod
from services.rpc.convert.scheduler import (
    connect_request,
    counters_from_proto,
    frame_from_proto,
    report_to_proto,
    slots_to_proto,
)
from services.rpc.methods import CONNECT, REPORT

Request = TypeVar("Request")
Response = TypeVar("Response", bound=scheduler_pb2.ConnectResponse | scheduler_pb2.ReportResponse)


class _LeaderStreams(Generic[Request, Response]):
    """The common part of ``LeaderLinks``: a stream to the leader that the directory returns."""

    def __init__(
        self, streams: StreamClient, directory: LeaderDirectory, *, silence_s: float = SILENCE_S
    ) -> None:
        self._streams = streams
        self._directory = directory
        self._silence_s = silence_s
        self._leader: LeaderAddress | None = None

    async def wait_leader_change(self, timeout_s: float) -> None:
        await self._directory.wait_changed(self._leader, timeout_s)

    async def _open(
        self, method: StreamMethod[Request, Response], hello: Request | None = None
    ) -> tuple[ClientStream[Request, Response], int]:
        """Return a stream and the epoch of its leader, who confirmed in time that it leads; ``hello`` is sent
        first. Raises NoLeader, or the error that ended the stream."""
        leader = self._directory.leader
        if leader is None:
            leader = await self._directory.wait_changed(None, OPEN_S)
        self._leader = leader
        if leader is None:
            raise NoLeader("no scheduler leads", retry_after_s=1.0)
        try:
            stream = await self._streams.open(leader.address, method, timeout_s=OPEN_S)
        except StreamLost as lost:
            raise _no_leader(lost) from None
        try:
            return stream, await _first_epoch(stream, hello)
        except BaseException:
            await stream.close()
            raise


async def _first_epoch(stream: ClientStream[Request, Response], hello: Request | None) -> int:
    try:
        if hello is not None:
            async with asyncio.timeout(OPEN_S):
                await stream.write(hello)
        first = await stream.read(OPEN_S)
    except TimeoutError:
        raise NoLeader(f"the scheduler was not reached within {OPEN_S:g} s", retry_after_s=1.0) from None
    except StreamLost as lost:
        raise _no_leader(lost) from None
    if not first.HasField("leadership"):
        raise NoLeader("the scheduler did not confirm that it leads")
    return first.leadership.epoch


def _no_leader(lost: StreamLost) -> NoLeader:
    return NoLeader(f"the stream to the scheduler ended: {lost.message}", retry_after_s=1.0)


class _LeaderStream(Generic[Request, Response]):
    """An open stream to a leader. Its errors are NoLeader and those of the scheduler."""

    def __init__(self, stream: ClientStream[Request, Response], epoch: int, silence_s: float) -> None:
        self._stream = stream
        self._silence_s = silence_s
        self.epoch = epoch

    async def _write(self, message: Request) -> None:
        try:
            await self._stream.write(message)
        except StreamLost as lost:
            raise _no_leader(lost) from None

    async def _read(self) -> Response:
        """Return the next message. The leader sends a heartbeat every second: a silent one is lost."""
        try:
            return await self._stream.read(self._silence_s)
        except StreamLost as lost:
            raise _no_leader(lost) from None

    async def close(self) -> None:
        await self._stream.close()


class StreamPlacementLinks(_LeaderStreams[scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse]):
    """Implements ``PlacementLinks`` over Connect streams."""

    def __init__(
        self,
        streams: StreamClient,
        directory: LeaderDirectory,
        gateway_id: str,
        *,
        silence_s: float = SILENCE_S,
        zone: str = "",
    ) -> None:
        super().__init__(streams, directory, silence_s=silence_s)
        self._hello = scheduler_pb2.GatewayHello(gateway_id=gateway_id, zone=zone)

    async def open(self) -> PlacementLink:
        hello = scheduler_pb2.ConnectRequest(hello=self._hello)
        return _PlacementStreamLink(*await self._open(CONNECT, hello), self._silence_s)


class _PlacementStreamLink(_LeaderStream[scheduler_pb2.ConnectRequest, scheduler_pb2.ConnectResponse]):
    async def send(self, places: Sequence[tuple[int, PlaceSpec, float]], cancelled: Sequence[int]) -> None:
        await self._write(connect_request(places, cancelled))

    async def send_slots(self, message: SlotsMessage) -> None:
        await self._write(slots_to_proto(message.demands, message.returned, message.explained))

    async def receive(self) -> PlacementFrame:
        return frame_from_proto(await self._read(), self.epoch)


class StreamReportLinks(_LeaderStreams[scheduler_pb2.ReportRequest, scheduler_pb2.ReportResponse]):
    """Implements ``ReportLinks`` over Report streams."""

    async def open(self) -> ReportLink:
        return _ReportStreamLink(*await self._open(REPORT), self._silence_s)


class _ReportStreamLink(_LeaderStream[scheduler_pb2.ReportRequest, scheduler_pb2.ReportResponse]):
    async def send(self, number: int, report: ReportSnapshot) -> None:
        await self._write(report_to_proto(report, number, full=number == 1))

    async def receive(self) -> ReportAnswer:
        response = await self._read()
        return ReportAnswer(
            response.leadership.epoch,
            response.report,
            counters_from_proto(response.counters),
        )
