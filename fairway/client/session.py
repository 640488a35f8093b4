"""Many generations on one stream: one connection, one message per engine step for all of them.

    async with client.session() as session:
        async with session.generate("tiny", "Once upon a time") as stream: ...

A slow reader delays only its own generation. When the gateway breaks or drains, the session connects to
another one, which continues each generation by its idempotency key.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self
from weakref import WeakSet

from fairway.client import convert
from fairway.client.attempts import Attempts, Core
from fairway.client.delivery import DeliveryPositions
from fairway.client.endpoints import Endpoint
from fairway.client.errors import Closed
from fairway.client.generation import GenerationStream
from fairway.client.link import Link, LinkEntry
from fairway.client.values import Input, Options, SessionOptions, checked_timeout_s
from fairway.v1 import inference_pb2 as pb


class Session:
    """Created by ``Client.session``. Connects with its first generation, and reconnects when needed."""

    def __init__(self, core: Core, options: SessionOptions) -> None:
        self._core = core
        self._options = options
        self._slots = asyncio.Semaphore(options.max_concurrency)
        self._link: Link | None = None
        self._tasks: dict[asyncio.Task[None], Link] = {}
        self._streams: WeakSet[GenerationStream] = WeakSet()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def generate(
        self,
        model: str,
        source: Input,
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> GenerationStream:
        """Return the stream of a generation; it is sent with the first read, once a slot is free."""
        if self._closed:
            raise Closed("the session is closed", reason="CLOSED")
        core = self._core
        timeout_s = core.options.generation_timeout_s if timeout_s is None else checked_timeout_s(timeout_s)
        message = convert.generation(model, source, options or Options(), core.key(idempotency_key))
        message.timeout.CopyFrom(convert.duration(timeout_s))
        stream = GenerationStream(core, self, message, timeout_s, own_key=idempotency_key is None)
        self._streams.add(stream)
        return stream

    async def aclose(self, why: str = "the session was closed") -> None:
        """Cancel all generations and return once the tasks ended; readers raise Closed. Idempotent."""
        self._closed = True
        for stream in list(self._streams):
            await stream.interrupt(why)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def open(
        self, generation: pb.Generation, attempts: Attempts, positions: DeliveryPositions
    ) -> SessionAttempt:
        """Send a generation on the current link, connecting when there is none."""
        try:
            async with asyncio.timeout(attempts.time_left_s):
                await self._slots.acquire()
        except TimeoutError:
            raise attempts.deadline_error() from None
        try:
            link = await self._usable_link(attempts)
            entry = link.start(
                generation,
                taken=positions.max_delivered,
                window=self._options.window_tokens,
                deadline_s=attempts.deadline_s,
                attempt=attempts.count - 1,
            )
        except BaseException:
            self._slots.release()
            raise
        return SessionAttempt(entry, self._slots)

    async def _usable_link(self, attempts: Attempts) -> Link:
        """Return a link to a gateway that is not avoided. Of several callers, the first connects for all."""
        if (link := self._current()) is not None:
            attempts.count += 1
            return link
        endpoint = await attempts.begin()
        if (link := self._current(endpoint)) is not None:
            self._core.pool.release(endpoint)
            return link
        if self._closed:
            self._core.pool.release(endpoint)
            raise Closed("the session is closed", reason="CLOSED")
        if self._link is not None:
            self._link.retire()
        self._link = link = Link(self._core, endpoint)
        task = asyncio.create_task(link.run(), name=f"session {endpoint.address}")
        self._tasks[task] = link
        task.add_done_callback(self._ended)
        return link

    def _current(self, chosen: Endpoint | None = None) -> Link | None:
        """Return the link if new generations may start on it: not avoided, or to ``chosen``; else None."""
        link = self._link
        if link is None or not link.usable:
            return None
        avoided = self._core.pool.is_avoided(link.endpoint)
        return link if not avoided or link.endpoint is chosen else None

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._core.pool.release(self._tasks.pop(task).endpoint)


class SessionAttempt:
    """An entry of a link, with its slot until ``aclose``."""

    def __init__(self, entry: LinkEntry, slots: asyncio.Semaphore) -> None:
        self.endpoint = entry.endpoint
        self.receive = entry.receive
        self.consumed = entry.consumed
        self._entry = entry
        self._slots = slots
        self._open = True

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._entry.cancel()
            self._slots.release()
