"""What the clients of the leading scheduler share: its channel, and streams whose every wait ends."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from services.adapters.scheduler_directory import KnownLeader, LeaderDirectory
from services.core.errors import FairwayError, NoLeader
from services.rpc.channel import open_channel
from services.rpc.status import from_rpc_error

Call = grpc.aio.StreamStreamCall[Any, Any]

_STATUS_S: Final = 1.0


class LeaderCalls:
    """Owns the channel to the leader that was last asked for."""

    def __init__(self, directory: LeaderDirectory) -> None:
        self._directory = directory
        self._leader: KnownLeader | None = None
        self._address = ""
        self._channel: grpc.aio.Channel | None = None

    async def channel(self, timeout_s: float) -> grpc.aio.Channel:
        """Return a channel to the leader. Raises NoLeader when none is known within the time."""
        leader = self._directory.leader
        if leader is None:
            leader = await self._directory.wait_changed(None, timeout_s)
        self._leader = leader
        if leader is None:
            raise NoLeader("no scheduler leads", retry_after_s=1.0)
        if self._channel is None or leader.address != self._address:
            await self.close()
            self._address, self._channel = leader.address, open_channel(leader.address)
        return self._channel

    async def wait_change(self, timeout_s: float) -> None:
        """Return when the directory names another leader than that of the last channel, or in time."""
        await self._directory.wait_changed(self._leader, timeout_s)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


async def read_within(call: Call, timeout_s: float) -> Any:
    """Return the next message of the stream. Raises the FairwayError that ended it, or NoLeader when
    nothing came in time: the peer that beats every second is gone then."""
    try:
        async with asyncio.timeout(timeout_s):
            message = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise NoLeader("the stream was closed on this side") from None  # grpc.aio cancels who reads
    except TimeoutError:
        raise NoLeader(f"the scheduler was silent for {timeout_s:g} s", retry_after_s=1.0) from None
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise await stream_error(call, error) from None
    if message is grpc.aio.EOF:
        raise await stream_error(call, None)
    return message


async def stream_error(call: Call, error: BaseException | None) -> FairwayError:
    """Return why the stream ended, by its status."""
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
