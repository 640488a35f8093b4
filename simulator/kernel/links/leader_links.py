"""Links to the leading scheduler over the simulated network, with the time limits of those over gRPC."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from services.adapters.links.leader_links import OPEN_S, SILENCE_S
from services.adapters.links.scheduler_directory import LeaderAddress, LeaderDirectory
from services.core.errors import FairwayError, NoLeader
from simulator.kernel.connection import Broken, Connection, Silent
from simulator.kernel.network import Network, Unreachable
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


class LeaderConnections:
    """Replaces the channel of ``adapters.grpc_streams.GrpcLinks``. Stores the leader last requested."""

    def __init__(self, process: Process, network: Network, directory: LeaderDirectory) -> None:
        self._process = process
        self._network = network
        self._directory = directory
        self._leader: LeaderAddress | None = None

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
