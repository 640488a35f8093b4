"""Connections to whichever scheduler leads, by the store's leader key."""

from __future__ import annotations

from typing import Any

from services.adapters.links.scheduler_directory import KnownLeader, LeaderDirectory
from services.core.errors import FairwayError, NoLeader
from simulator.kernel.connection import Broken, Connection, Silent
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process


class LeaderConnections:
    """Replaces the channel of ``adapters.grpc_streams.GrpcLinks``. Stores the leader last requested."""

    def __init__(self, process: Process, network: Network, directory: LeaderDirectory) -> None:
        self._process = process
        self._network = network
        self._directory = directory
        self._leader: KnownLeader | None = None

    async def open(self, within_s: float) -> Connection:
        """Return a connection to the leader. Raises NoLeader when there is none within the time."""
        leader = self._directory.leader
        if leader is None:
            leader = await self._directory.wait_changed(None, within_s)
        self._leader = leader
        if leader is None:
            raise NoLeader("no scheduler leads", retry_after_s=1.0)
        try:
            return await self._network.connect(self._process, leader.address, within_s=within_s)
        except Unreachable as error:
            raise NoLeader(str(error), retry_after_s=1.0) from None

    async def wait_change(self, timeout_s: float) -> None:
        """Return when the directory names another leader than the last one, or in time."""
        await self._directory.wait_changed(self._leader, timeout_s)


async def read_within(connection: Connection, within_s: float) -> Any:
    """Return the next message. Raises the FairwayError that ended the stream, NoLeader after silence."""
    try:
        return await connection.receive(within_s)
    except Silent:
        raise NoLeader(f"the scheduler was silent for {within_s:g} s", retry_after_s=1.0) from None
    except Broken as broken:
        raise stream_error(broken) from None


def stream_error(broken: Broken) -> FairwayError:
    """Return why the stream ended."""
    if isinstance(broken.error, FairwayError):
        return broken.error
    return NoLeader(f"the stream ended: {broken.message}", retry_after_s=1.0)
