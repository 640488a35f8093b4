"""Links to the leading scheduler over gRPC: its channel, and streams whose waits are all bounded."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from fairway.v1 import scheduler_pb2_grpc
from services.adapters.links.leader_links import OPEN_S, SILENCE_S
from services.adapters.links.scheduler_directory import LeaderAddress, LeaderDirectory
from services.core.errors import FairwayError, NoLeader
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.status import from_rpc_error

Call = grpc.aio.StreamStreamCall[Any, Any]

_STATUS_S: Final = 1.0


class GrpcLinks:
    """The common part of ``LeaderLinks`` over gRPC: a stream per link, and the channel to the last leader."""

    def __init__(self, directory: LeaderDirectory, token: str, *, silence_s: float = SILENCE_S) -> None:
        self._directory = directory
        self._metadata = auth_metadata(token)
        self._silence_s = silence_s
        self._leader: LeaderAddress | None = None
        self._address = ""
        self._channel: grpc.aio.Channel | None = None

    async def wait_leader_change(self, timeout_s: float) -> None:
        await self._directory.wait_changed(self._leader, timeout_s)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _stub(self) -> scheduler_pb2_grpc.SchedulerServiceAsyncStub:
        """Return a stub of the leader. Raises NoLeader when the directory returns no leader in time."""
        leader = self._directory.leader
        if leader is None:
            leader = await self._directory.wait_changed(None, OPEN_S)
        self._leader = leader
        if leader is None:
            raise NoLeader("no scheduler leads", retry_after_s=1.0)
        if self._channel is None or leader.address != self._address:
            await self.close()
            self._address, self._channel = leader.address, open_channel(leader.address)
        return scheduler_pb2_grpc.SchedulerServiceStub(self._channel)


class GrpcLink:
    """Implements ``LeaderLink`` except for the message types."""

    def __init__(self, call: Call, epoch: int, silence_s: float) -> None:
        self._call = call
        self._epoch = epoch
        self._silence_s = silence_s

    @property
    def epoch(self) -> int:
        return self._epoch

    async def close(self) -> None:
        self._call.cancel()

    async def _write(self, request: Any) -> None:
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await stream_error(self._call, error) from None

    async def _read(self) -> Any:
        return await read_within(self._call, self._silence_s)


async def first_epoch(call: Call, hello: Any = None) -> int:
    """Send the hello message, if there is one, and return the epoch under which the scheduler leads.

    Raises NoLeader when the scheduler does not confirm in time that it leads, or the error that ended the
    stream. On an error the call is cancelled.
    """
    try:
        if hello is not None:
            await _write_within(call, hello, OPEN_S)
        first = await read_within(call, OPEN_S)
        if not first.HasField("leadership"):
            raise NoLeader("the scheduler did not confirm that it leads")
    except BaseException:
        call.cancel()
        raise
    epoch: int = first.leadership.epoch
    return epoch


async def _write_within(call: Call, message: Any, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(message)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
        raise await stream_error(call, error) from None


async def read_within(call: Call, timeout_s: float) -> Any:
    """Return the next message of the stream. Raises the FairwayError that ended it, or NoLeader when nothing
    was received in time: the peer sends a heartbeat every second, so it counts as lost."""
    try:
        async with asyncio.timeout(timeout_s):
            message = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise NoLeader("the stream was closed on this side") from None  # grpc.aio cancels the reader
    except TimeoutError:
        raise NoLeader(f"the scheduler was silent for {timeout_s:g} s", retry_after_s=1.0) from None
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise await stream_error(call, error) from None
    if message is grpc.aio.EOF:
        raise await stream_error(call, None)
    return message


async def stream_error(call: Call, error: BaseException | None) -> FairwayError:
    """Return the error that ended the stream, from its status."""
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error)
    try:
        async with asyncio.timeout(_STATUS_S):
            code, details = await call.code(), await call.details()
    except TimeoutError:
        return NoLeader("the scheduler's stream stalled", retry_after_s=1.0)
    if code is grpc.StatusCode.OK:
        return NoLeader("the scheduler closed the stream", retry_after_s=1.0)
    return from_rpc_error(
        grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details)
    )
