"""Links to the leading scheduler over the simulated network, with the time limits of those over gRPC."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from services.adapters.links.leader_links import OPEN_S, SILENCE_S
from services.adapters.links.scheduler_directory import LeaderDirectory
from simulator.kernel.connection import Broken, Connection
from simulator.kernel.links.leader_calls import LeaderConnections, read_within, stream_error
from simulator.kernel.network import Network
from simulator.kernel.process import Process

Heard = TypeVar("Heard")


class SimLinks:
    """Base of all ``adapters.leader_links.LeaderLinks`` over the simulated network."""

    def __init__(
        self, process: Process, network: Network, directory: LeaderDirectory, *, silence_s: float = SILENCE_S
    ) -> None:
        self._leaders = LeaderConnections(process, network, directory)
        self._silence_s = silence_s

    async def wait_leader_change(self, timeout_s: float) -> None:
        await self._leaders.wait_change(timeout_s)

    async def close(self) -> None:
        pass

    async def _connect(self, hello: Any) -> tuple[Connection, Any]:
        """Return a connection on which the leader answered the hello, and its answer."""
        connection = await self._leaders.open(OPEN_S)
        try:
            connection.post(hello)
            return connection, await read_within(connection, OPEN_S)
        except Broken as broken:
            raise stream_error(broken) from None
        except BaseException:
            connection.close()
            raise


class SimLink(Generic[Heard]):
    """Implements ``adapters.leader_links.LeaderLink``: ``Heard`` is what the scheduler sends."""

    def __init__(self, connection: Connection, epoch: int, silence_s: float) -> None:
        self._connection = connection
        self._epoch = epoch
        self._silence_s = silence_s

    @property
    def epoch(self) -> int:
        return self._epoch

    async def receive(self) -> Heard:
        heard: Heard = await read_within(self._connection, self._silence_s)
        return heard

    async def close(self) -> None:
        self._connection.close()

    async def _send(self, message: Any) -> None:
        try:
            await self._connection.send(message)
        except Broken as broken:
            raise stream_error(broken) from None
