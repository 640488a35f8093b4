"""Unary calls to a role's leader. A leader that cannot be reached, or leads no more, is replaced by its
successor within the call's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from services.adapters.links.scheduler_directory import LeaderAddress, LeaderDirectory
from services.core.errors import FairwayError, NoLeader, Unavailable
from services.ports.clock import Clock
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.status import from_rpc_error

Method = Callable[[grpc.aio.Channel], Any]  # returns the stub's method


class LeaderCalls:
    """Keeps a channel to the last leader; the owner closes it. ``role`` names the leader in errors."""

    def __init__(self, directory: LeaderDirectory, internal_token: str, clock: Clock, *, role: str) -> None:
        self._directory = directory
        self._metadata = auth_metadata(internal_token)
        self._clock = clock
        self._role = role
        self._address = ""
        self._channel: grpc.aio.Channel | None = None

    async def call(self, method: Method, request: Message, timeout_s: float) -> Any:
        """Return the leader's response. Raises NoLeader after the timeout, or the leader's error."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        leader, error = self._directory.leader, None
        while (left_s := deadline_s - self._clock.monotonic_s()) > 0:
            if leader is not None:
                try:
                    return await self._call(leader, method, request, left_s)
                except Unavailable as failure:
                    error = failure
            leader = await self._directory.wait_changed(leader, left_s)
        raise NoLeader(f"no {self._role} leads that can be reached: {self._why(error)}", retry_after_s=1.0)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _call(self, leader: LeaderAddress, method: Method, request: Message, timeout_s: float) -> Any:
        if self._channel is None or self._address != leader.address:
            await self.close()
            self._address, self._channel = leader.address, open_channel(leader.address)
        try:
            return await method(self._channel)(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            raise self._error_of(failure, leader) from failure

    def _error_of(self, failure: grpc.aio.AioRpcError, leader: LeaderAddress) -> FairwayError:
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return NoLeader(f"the {self._role} at {leader.address} does not answer")
        return from_rpc_error(failure)

    def _why(self, error: FairwayError | None) -> str:
        return f"no leader exists; start a {self._role}" if error is None else error.message
