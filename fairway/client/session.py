"""Many generations on one stream: one connection, one message per engine step for all of them.

    async with client.session() as session:
        async with session.generate("tiny", "Once upon a time") as stream: ...

A slow reader delays only its own generation. When the gateway breaks or drains, the session connects to
another one, which continues each generation by its idempotency key.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakSet

import grpc

from fairway.client import convert
from fairway.client.attempts import Attempts, Core
from fairway.client.endpoints import Endpoint
from fairway.client.errors import (
    STATUS_LOST,
    Closed,
    FairwayError,
    ServerBug,
    connection_lost,
    from_message,
    from_rpc,
)
from fairway.client.generation import DeliveryPositions, GenerationStream
from fairway.client.values import Event, Input, Options, SessionOptions, checked_timeout_s
from fairway.task_group import TaskGroup
from fairway.v1 import inference_pb2 as pb

CHOICE_BITS: Final = 4
MAX_STREAM_ID: Final = 2**28 - 1
_MAX_ATTEMPT: Final = 1000
_MAX_CREDIT: Final = 1_048_576
_BATCH: Final = 4096
_PROBE_TIMEOUT_S: Final = 2.0


class LinkEntry:
    """One generation on a link: the events that its reader has not taken yet.

    Bounded by the window: the server sends at most ``window`` tokens of a choice beyond those taken. With
    several choices the furthest read one counts, so that a choice that ended early does not block the others.
    """

    def __init__(self, link: Link, stream_id: int, taken: int, window: int, deadline_s: float) -> None:
        """``taken``: tokens of a continued stream that the reader took before."""
        self.endpoint = link.endpoint
        self.stream_id = stream_id
        self.initial_credit = min(_MAX_CREDIT, taken + window)
        self._link = link
        self._window = window
        self._taken = taken
        self._allowed = self.initial_credit
        self._deadline_s = deadline_s
        self._events: deque[Event] = deque()
        self._error: FairwayError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> Event:
        while not self._events:
            if self._error is not None:
                raise self._error
            async with asyncio.timeout(self._deadline_s - self._link.now()):
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        return self._events.popleft()

    def consumed(self, choice: int, tokens: int) -> None:
        self._taken = max(self._taken, tokens)
        missing = self._taken + self._window - self._allowed
        if missing * 2 >= self._window:
            self._allowed += missing
            self._link.add_credit(self.stream_id, missing)

    def cancel(self) -> None:
        """Stop delivery for a reader that has ended."""
        self._link.cancel(self)

    def push(self, event: Event) -> None:
        self._events.append(event)
        self._wake()

    def fail(self, error: FairwayError) -> None:
        """Raise ``error`` in the reader after the events received so far."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Link:
    """A Session RPC. ``run`` is the body of its task; at its end every remaining entry gets an error.

    Pending writes are stored as state, not as a queue: credit adds up per stream, so its size is bounded by
    the number of streams.
    """

    def __init__(self, core: Core, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.now = core.now
        self._core = core
        self._entries: dict[int, LinkEntry] = {}
        self._starts: deque[pb.SessionStart] = deque()
        self._credit: dict[int, int] = {}
        self._cancels: dict[int, None] = {}
        self._write_pending = asyncio.Event()
        self._next_id = 1
        self._ended: FairwayError | None = None
        self._has_received = False
        self.retired = False
        self._metadata = core.metadata

    @property
    def usable(self) -> bool:
        """Whether new generations may start on it."""
        current = self._metadata == self._core.metadata and not self._core.bearer.due
        return self._ended is None and not self.retired and current and self._next_id < MAX_STREAM_ID

    def start(
        self, generation: pb.Generation, *, taken: int, window: int, deadline_s: float, attempt: int = 0
    ) -> LinkEntry:
        """Send a generation; the entry receives its events. ``attempt``: how often it was sent before."""
        entry = LinkEntry(self, self._next_id, taken, window, deadline_s)
        self._next_id += 1
        self._entries[entry.stream_id] = entry
        self._starts.append(
            pb.SessionStart(
                stream_id=entry.stream_id,
                generation=generation,
                initial_credit_tokens=entry.initial_credit,
                attempt=min(attempt, _MAX_ATTEMPT),
            )
        )
        self._write_pending.set()
        return entry

    def add_credit(self, stream_id: int, tokens: int) -> None:
        if stream_id in self._entries:
            self._credit[stream_id] = min(_MAX_CREDIT, self._credit.get(stream_id, 0) + tokens)
            self._write_pending.set()

    def cancel(self, entry: LinkEntry) -> None:
        """Cancel the generation of a reader that left, unless it ended."""
        if self._entries.pop(entry.stream_id, None) is not None:
            self._credit.pop(entry.stream_id, None)
            self._cancels[entry.stream_id] = None
            self._write_pending.set()

    def retire(self) -> None:
        """Start no new generations; running ones continue, and the stream ends with the last one."""
        self.retired = True
        self._write_pending.set()

    async def run(self) -> None:
        """Return when the stream ended: broken, or half-closed after ``retire`` and read to its end."""
        call = self.endpoint.stub.Session(metadata=self._metadata)
        error: FairwayError = connection_lost("the session was closed")
        try:
            async with TaskGroup() as group:
                writing = group.create_task(self._write(call))
                error = await self._read(call)
                writing.cancel()
        finally:
            call.cancel()
            self._end(error)

    def _end(self, error: FairwayError) -> None:
        self._ended = error
        entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.fail(_copy(error))

    async def _read(self, call: Any) -> FairwayError:
        """Return the error that ended the stream."""
        silence_s = self._core.options.silence_timeout_s
        try:
            async with asyncio.timeout(None) as timeout:
                while True:
                    timeout.reschedule(asyncio.get_running_loop().time() + silence_s)
                    message = await call.read()
                    if not isinstance(message, pb.SessionResponse):
                        return connection_lost("the session's stream ended")
                    self._dispatch(message)
        except TimeoutError:
            return connection_lost(f"the gateway was silent for {silence_s:g} s")
        except grpc.aio.AioRpcError as error:
            return await self._status_error(error)
        except ValueError:
            return ServerBug("the gateway sent an invalid message", reason="BAD_ANSWER")

    async def _status_error(self, error: grpc.aio.AioRpcError) -> FairwayError:
        """Return the server's error for the status of the failed stream.

        When a write fails, grpc.aio loses the status and reports an internal error of gRPC instead. A
        gateway that rejects the session, for example for a wrong key, also rejects a small call, which has
        the status.
        """
        if self._has_received or STATUS_LOST not in (error.details() or ""):
            return from_rpc(error)
        try:
            await self.endpoint.stub.ListModels(
                pb.ListModelsRequest(), timeout=_PROBE_TIMEOUT_S, metadata=self._core.metadata
            )
        except grpc.aio.AioRpcError as refusal:
            return from_rpc(refusal)
        return from_rpc(error)

    def _dispatch(self, message: pb.SessionResponse) -> None:
        self._has_received = True
        for accepted in message.accepted:
            self._push(accepted.stream_id, convert.accepted(accepted.accepted))
        if message.tokens.handles:
            for stream_id, tokens in convert.frame(message.tokens, CHOICE_BITS):
                self._push(stream_id, tokens)
        for end in message.finished:
            entry = self._entries.pop(end.stream_id, None)
            self._credit.pop(end.stream_id, None)
            if entry is not None and end.HasField("error"):
                entry.fail(from_message(end.error))
            elif entry is not None:
                entry.push(convert.finished(end.finished))
        if message.finished and self.retired:
            self._write_pending.set()

    def _push(self, stream_id: int, event: Event) -> None:
        entry = self._entries.get(stream_id)
        if entry is not None:  # else its reader left, and a cancellation is pending
            entry.push(event)

    async def _write(self, call: Any) -> None:
        """Send pending messages until the stream is retired and none is left."""
        try:
            while True:
                self._write_pending.clear()
                while (message := self._next_message()) is not None:
                    await call.write(message)
                if self.retired and not self._entries:
                    await call.done_writing()
                    return
                await self._write_pending.wait()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the stream has ended: ``_read`` returns the reason

    def _next_message(self) -> pb.SessionRequest | None:
        if self._starts:
            return pb.SessionRequest(start=self._starts.popleft())
        if self._credit:
            batch = [(key, self._credit.pop(key)) for key in list(self._credit)[:_BATCH]]
            ids, tokens = zip(*batch, strict=True)
            return pb.SessionRequest(credit=pb.SessionCredit(stream_ids=ids, tokens=tokens))
        if self._cancels:
            cancelled = list(self._cancels)[:_BATCH]
            for key in cancelled:
                del self._cancels[key]
            return pb.SessionRequest(cancel=pb.SessionCancel(stream_ids=cancelled))
        return None


def _copy(error: FairwayError) -> FairwayError:
    """Return a copy for each reader: errors carry attempts and a traceback."""
    return type(error)(
        error.message, reason=error.reason, metadata=error.metadata, retry_after_s=error.retry_after_s
    )


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
