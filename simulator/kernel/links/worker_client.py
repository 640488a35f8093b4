"""A gateway's streams to its workers over the simulated network: one per address, as over gRPC."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

from services.adapters.grpc.worker import MAX_LINKS
from services.adapters.links.frame_dispatch import NotStarted
from services.adapters.links.link_health import CHECK_S
from services.adapters.links.sequence_link import Outgoing, SequenceLink
from services.core.generation import AnyGrant, StartSpec
from services.ports.worker import RunningSequence, SequenceSink
from services.ports.worker_stream import StepFrame
from simulator.kernel.connection import Broken, Connection
from simulator.kernel.links.messages import Execute
from simulator.kernel.network import Network, Unreachable
from simulator.kernel.process import Process


class SimWorkers:
    """Implements ``ports.worker.WorkerClient`` with the limits of ``adapters.grpc_worker.GrpcWorkers``."""

    def __init__(
        self,
        process: Process,
        network: Network,
        *,
        after_frame: Callable[[], None] | None = None,
        unsent: Callable[[AnyGrant], None] | None = None,
        silence_s: float = 5.0,
        idle_s: float = 60.0,
    ) -> None:
        """A worker silent for ``silence_s`` is lost; a stream without sequences ends after ``idle_s``."""
        self.process = process
        self.network = network
        self.after_frame = after_frame
        self.unsent = unsent
        self.silence_s = silence_s
        self.idle_s = idle_s
        self._links: dict[str, _Link] = {}
        self._checks, self._checked_s = False, 0.0
        self._context = contextvars.copy_context()

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        address = spec.grant.address
        link = self._links.get(address)
        if link is None or link.closed:
            if len(self._links) >= MAX_LINKS:
                self.process.loop.call_soon(sink.on_lost, f"{MAX_LINKS} worker streams are open")
                return NotStarted()
            link = self._open(address)
        return link.start(spec, sink)

    @property
    def links(self) -> int:
        """How many streams are open."""
        return len(self._links)

    async def close(self) -> None:
        """End every stream; sinks are notified that their worker was lost."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, address: str) -> _Link:
        link = _Link(self, address)
        if not self._checks:
            self._checks, self._checked_s = True, self.process.clock.monotonic_s()
            self.process.call_later(CHECK_S, self._check)
        self._links[address] = link
        link.task = self._context.run(self.process.spawn, f"worker-stream-{address}", self._own(link))
        return link

    def _check(self) -> None:
        """Check every stream once a second: one timer serves all of them."""
        now_s = self.process.clock.monotonic_s()
        for link in self._links.values():
            link.check(now_s, checked_s=self._checked_s)
        self._checked_s = now_s
        self._checks = bool(self._links)
        if self._checks:
            self.process.call_later(CHECK_S, self._check)

    async def _own(self, link: _Link) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(link.address) is link:
                del self._links[link.address]


class _Link(SequenceLink):
    def __init__(self, owner: SimWorkers, address: str) -> None:
        super().__init__(
            address,
            owner.process.clock,
            after_frame=owner.after_frame,
            unsent=owner.unsent,
            silence_s=owner.silence_s,
            idle_s=owner.idle_s,
        )
        self._owner = owner
        self._loop = owner.process.loop
        self._connection: Connection | None = None
        self._writing = False
        self._ended: asyncio.Future[str] = self._loop.create_future()

    async def run(self) -> None:
        """Carry the stream until it ends; then notify every sink."""
        await self._run(self._carry())

    def check(self, now_s: float, *, checked_s: float) -> None:
        """End the stream if its ``LinkHealth`` reports that it is over."""
        if self._connection is None or self.closed:
            return
        if (why := self._health.reason_to_end(now_s, checked_s=checked_s)) is not None:
            self._end(why)

    async def _carry(self) -> str:
        """Return why the stream ended."""
        process = self._owner.process
        try:
            connection = await self._owner.network.connect(
                process, self.address, within_s=self._owner.silence_s
            )
        except Unreachable as error:
            return f"the stream to the worker broke: {error}"
        self._connection = connection
        connection.on_message = self._receive
        connection.on_broken = self._broke
        try:
            self._write()
            return await self._ended
        finally:
            self.closed = True
            connection.close()

    def _receive(self, message: Any) -> None:
        if not self.closed:
            self._on_message(message if type(message) is StepFrame else None)

    def _broke(self, broken: Broken) -> None:
        self._end(f"the stream to the worker broke: {broken.message}")

    def _end(self, why: str) -> None:
        self.closed = True
        if not self._ended.done():
            self._ended.set_result(why)

    def _wake(self) -> None:
        if not self._writing and self._connection is not None:
            self._writing = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        """One message carries the commands since the last one."""
        self._writing = False
        connection = self._connection
        if connection is None or connection.over is not None:
            return
        if not self._outgoing:
            return
        if not connection.has_room:
            self._writing = True
            self._owner.process.spawn("worker-stream.writer", self._catch_up(connection))
            return
        outgoing, self._outgoing = self._outgoing, Outgoing()
        starts, credits_ = outgoing.starts, outgoing.credits
        self._sinks.sent(starts, self._clock.monotonic_s())
        connection.post(
            Execute(outgoing.cancels, tuple(starts.items()), tuple(credits_), tuple(credits_.values()))
        )

    async def _catch_up(self, connection: Connection) -> None:
        await connection.wait_room()
        self._write()
