"""The gateway's client of its workers: one stream per worker address, opened on demand, closed when idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import isnan
from typing import Final, TypeAlias

import structlog

from fairway.task_group import TaskGroup
from fairway.v1 import scheduler_pb2, worker_pb2
from services.core.errors import FairwayError
from services.core.fixed_cost.rows import RowSpec
from services.core.generation import AnyGrant, StartSpec, TokenLogprobs
from services.core.rollouts.routes import Withdrawal
from services.ports.clock import Clock
from services.ports.streams import ClientStream, StepFrame, StreamClient, StreamLost
from services.ports.worker import RowSink, RunningRow, RunningSequence, SequenceSink
from services.rpc.convert.rows import row_to_proto
from services.rpc.convert.worker import frame_from_proto, start_to_proto
from services.rpc.methods import EXECUTE
from services.runtime.supervisor import Supervisor

MAX_LINKS: Final = 4096
_TOO_MANY: Final = f"{MAX_LINKS} worker streams are open"
CHECK_S: Final = 1.0  # interval of checks
ANSWER_S: Final = 5.0  # longest time without a response to a start, from a worker that sends heartbeats
log = structlog.get_logger()

MAX_WAITING_STARTS: Final = 4096
MAX_MESSAGE_TOKENS: Final = 1_000_000  # most tokens of the starts in one message, unless it has only one
MAX_WAITING_ROWS: Final = 65536
MAX_MESSAGE_ROWS: Final = 1024
MAX_MESSAGE_ROW_BYTES: Final = 4 * 1024 * 1024  # most input bytes of the rows in one message
_Stream: TypeAlias = ClientStream[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]
NONE: tuple[TokenLogprobs, ...] = ()


class SinkTable:
    """The sinks of one stream by handle. A handle is never reused, so a late entry finds no sink."""

    def __init__(self) -> None:
        self._sinks: dict[int, SequenceSink] = {}
        self._rows: dict[int, RowSink] = {}
        self._sent_s: dict[int, float] = {}  # starts without a response, in the order sent
        self._last = 0

    def __len__(self) -> int:
        return len(self._sinks) + len(self._rows)

    def __contains__(self, handle: int) -> bool:
        return handle in self._sinks

    def add(self, sink: SequenceSink) -> int:
        """Return the handle under which the sink is called from now on."""
        self._last += 1
        self._sinks[self._last] = sink
        return self._last

    def add_row(self, sink: RowSink) -> int:
        """The same for a row, which no response precedes its end."""
        self._last += 1
        self._rows[self._last] = sink
        return self._last

    def drop(self, handle: int) -> bool:
        """Remove the sink; it is not called again. Return whether it was there."""
        self._sent_s.pop(handle, None)
        return self._sinks.pop(handle, None) is not None or self._rows.pop(handle, None) is not None

    def sent(self, handles: Iterable[int], now_s: float) -> None:
        """Record that these starts were sent. A worker responds to each at once, whatever its load."""
        for handle in handles:
            if handle in self._sinks:
                self._sent_s[handle] = now_s

    def unanswered_s(self, now_s: float) -> float:
        """Return for how long the earliest start has been without a response; 0 if there is none."""
        return max(0.0, now_s - next(iter(self._sent_s.values()), now_s))

    def excuse(self, now_s: float) -> None:
        """Count unanswered starts from now, because nothing was read before."""
        self._sent_s = dict.fromkeys(self._sent_s, now_s)

    def dispatch(self, frame: StepFrame) -> None:
        """Call every sink that the frame names, in the frame's order."""
        sinks = self._sinks
        for handle in frame.accepted:
            self._sent_s.pop(handle, None)
            if (sink := sinks.get(handle)) is not None:
                sink.on_accepted()
        for handle, reason in frame.not_admitted:
            self._sent_s.pop(handle, None)
            if (refused := sinks.pop(handle, None) or self._rows.pop(handle, None)) is not None:
                refused.on_not_admitted(reason)
        if frame.handles:
            self._dispatch_tokens(frame)
        for handle, end in frame.finished:
            if (sink := sinks.pop(handle, None)) is not None:
                sink.on_finished(end)
        for handle, row_end in frame.rows:
            if (row := self._rows.pop(handle, None)) is not None:
                row.on_row_ended(row_end)

    def lose_all(self, message: str) -> None:
        """Notify every sink, once, that its worker was lost."""
        sinks, self._sinks = self._sinks, {}
        rows, self._rows = self._rows, {}
        self._sent_s.clear()
        lost: list[SequenceSink | RowSink] = [*sinks.values(), *rows.values()]
        for sink in lost:
            sink.on_lost(message)

    def _dispatch_tokens(self, frame: StepFrame) -> None:
        get = self._sinks.get
        ids = frame.ids
        logprobs, probed = frame.logprobs, frame.probe_scores
        at = 0
        columns = zip(frame.handles, frame.offsets, frame.counts, frame.texts, strict=True)
        for entry, (handle, offset, count, text) in enumerate(columns):
            end = at + count
            sink = get(handle)
            if sink is not None:
                if probed and (scores := probed[at:end]) and not isnan(scores[-1]):
                    sink.on_scores(offset, scores)
                sink.on_tokens(offset, ids[at:end], text, logprobs.get(entry, NONE) if logprobs else NONE)
            at = end


class NotStarted:
    """Implements ``ports.worker.RunningSequence`` for a sequence that never reached a worker."""

    def credit(self, tokens: int) -> None:
        return

    def cancel(self) -> None:
        return


class Outgoing:
    """Commands not sent yet: starts and rows in order, credits added up, cancels."""

    def __init__(self) -> None:
        self.starts: dict[int, StartSpec] = {}
        self.rows: dict[int, RowSpec] = {}
        self.credits: dict[int, int] = {}
        self.cancels: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.starts or self.rows or self.credits or self.cancels)

    def forget(self, handle: int) -> StartSpec | None:
        """Remove and return the start of a sequence that was not sent yet."""
        self.credits.pop(handle, None)
        return self.starts.pop(handle, None)

    def take_request(self) -> worker_pb2.ExecuteRequest:
        """Return one message of bounded size. The rest stays for the next one."""
        request = worker_pb2.ExecuteRequest(cancels=self.cancels)
        self.cancels = []
        room = MAX_MESSAGE_TOKENS
        for handle in list(self.starts):
            spec = self.starts[handle]
            room -= len(spec.generation.prompt.ids) + len(spec.produced_ids)
            if room < 0 and request.starts:
                break
            del self.starts[handle]
            request.starts.append(start_to_proto(handle, spec))
        credits_, self.credits = self.credits, {}
        for handle, tokens in credits_.items():
            if handle in self.starts:  # a credit follows its start
                self.credits[handle] = tokens
            else:
                request.credit.handles.append(handle)
                request.credit.tokens.append(tokens)
        self._take_rows(request)
        return request

    def _take_rows(self, request: worker_pb2.ExecuteRequest) -> None:
        size = 0
        for handle in list(self.rows):
            spec = self.rows[handle]
            size += sum(len(tensor.data) for tensor in spec.inputs)
            if request.rows and (size > MAX_MESSAGE_ROW_BYTES or len(request.rows) >= MAX_MESSAGE_ROWS):
                return
            del self.rows[handle]
            request.rows.append(row_to_proto(handle, spec))


class WorkerLink:
    """One stream to one worker, from its opening until it breaks or is idle for too long. It is not
    reopened."""

    def __init__(
        self,
        address: str,
        streams: StreamClient,
        clock: Clock,
        *,
        gateway_id: str,
        after_frame: Callable[[], None] | None,
        unsent: Callable[[AnyGrant], None] | None,
        withdrawn: Callable[[Withdrawal], None],
        silence_s: float,
        idle_s: float,
    ) -> None:
        self.address = address
        self.closed = False
        self.task: asyncio.Task[None] | None = None
        self.credentials = streams.credentials
        self._streams = streams
        self._clock = clock
        self._gateway_id = gateway_id
        self._after_frame = after_frame
        self._unsent = unsent
        self._withdrawn = withdrawn
        self._silence_s = silence_s
        self._sinks = SinkTable()
        self._outgoing = Outgoing()
        self._woken = asyncio.Event()
        self._health = LinkHealth(self._sinks, clock.monotonic_s(), silence_s=silence_s, idle_s=idle_s)

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        if len(self._outgoing.starts) >= MAX_WAITING_STARTS:
            asyncio.get_running_loop().call_soon(sink.on_lost, "the worker does not read its starts")
            return NotStarted()
        handle = self._sinks.add(sink)
        self._outgoing.starts[handle] = spec
        self._woken.set()
        return _Sequence(self, handle)

    def start_row(self, spec: RowSpec, sink: RowSink) -> RunningRow:
        if len(self._outgoing.rows) >= MAX_WAITING_ROWS:
            asyncio.get_running_loop().call_soon(sink.on_lost, "the worker does not read its rows")
            return NotStarted()
        handle = self._sinks.add_row(sink)
        self._outgoing.rows[handle] = spec
        self._woken.set()
        return _Sequence(self, handle)

    def credit(self, handle: int, tokens: int) -> None:
        if handle in self._sinks:
            credits_ = self._outgoing.credits
            credits_[handle] = credits_.get(handle, 0) + tokens
            self._woken.set()

    def cancel(self, handle: int) -> None:
        if not self._sinks.drop(handle):
            return
        if self._outgoing.rows.pop(handle, None) is not None:
            return
        if (spec := self._outgoing.forget(handle)) is not None:
            self._give_back(spec)
        else:
            self._outgoing.cancels.append(handle)
            self._woken.set()

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    async def run(self) -> None:
        """Run the stream until it ends, for any reason; then notify every sink with the reason."""
        stream: _Stream | None = None
        message = "the stream to the worker was closed"
        try:
            stream = await self._streams.open(self.address, EXECUTE, timeout_s=self._silence_s)
            message = await self._carry(stream)
        except StreamLost as lost:
            message = _ended(lost)
        finally:
            self.closed = True
            self._lose_all(message)
            if stream is not None:
                await stream.close()

    def _lose_all(self, message: str) -> None:
        if len(self._sinks):
            log.warning("worker.lost", address=self.address, sequences=len(self._sinks), reason=message)
        for handle in list(self._outgoing.starts):
            if (spec := self._outgoing.forget(handle)) is not None:
                self._give_back(spec)
        self._outgoing.rows.clear()
        self._sinks.lose_all(message)

    async def _carry(self, stream: _Stream) -> str:
        """Read, write and check the health until one of them ends the stream; return the reason."""
        try:
            async with TaskGroup() as group:
                group.create_task(self._write(stream))
                group.create_task(self._watch())
                await stream.read_each(self._receive)
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, StreamLost | FairwayError):
                return _ended(error)
            raise error from None

    def _receive(self, response: worker_pb2.ExecuteResponse) -> None:
        """Pass a frame to its sinks; a heartbeat has none. Raises InvalidInput."""
        if not response.HasField("heartbeat"):
            frame = frame_from_proto(response)
            for each in frame.withdrawn:
                self._withdrawn(each)
            self._sinks.dispatch(frame)
        self._health.received(self._clock.monotonic_s())
        if self._after_frame is not None:
            self._after_frame()

    async def _write(self, stream: _Stream) -> None:
        """The only writer. Everything requested since its last message goes into the next one."""
        hello = scheduler_pb2.GatewayHello(gateway_id=self._gateway_id)
        await stream.write(worker_pb2.ExecuteRequest(hello=hello))
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._outgoing:
                request = self._outgoing.take_request()
                self._sinks.sent((start.handle for start in request.starts), self._clock.monotonic_s())
                await stream.write(request)

    async def _watch(self) -> None:
        """End a stream that its ``LinkHealth`` reports as over."""
        checked_s = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(CHECK_S)
            now_s = self._clock.monotonic_s()
            if (why := self._health.reason_to_end(now_s, checked_s=checked_s)) is not None:
                self.closed = True
                raise StreamLost(why)
            checked_s = now_s

    def _give_back(self, spec: StartSpec) -> None:
        if self._unsent is not None:
            self._unsent(spec.grant)


class _Sequence:
    __slots__ = ("_handle", "_link")

    def __init__(self, link: WorkerLink, handle: int) -> None:
        self._link = link
        self._handle = handle

    def credit(self, tokens: int) -> None:
        self._link.credit(self._handle, tokens)

    def cancel(self) -> None:
        self._link.cancel(self._handle)


def _ended(error: StreamLost | FairwayError) -> str:
    return f"the stream to the worker ended: {error.message}"


class LinkHealth:
    """Judges the silence, unanswered starts and idleness of one stream, by its sinks and its last message.

    Times are of one monotonic clock.
    """

    def __init__(self, sinks: SinkTable, now_s: float, *, silence_s: float, idle_s: float) -> None:
        """A worker silent for ``silence_s`` is lost; a stream without sequences ends after ``idle_s``."""
        self._sinks = sinks
        self._silence_s = silence_s
        self._idle_s = idle_s
        self._received_s = self._busy_s = now_s

    def received(self, now_s: float) -> None:
        """Record that a message of the worker was received, which may be a heartbeat."""
        self._received_s = now_s

    def reason_to_end(self, now_s: float, *, checked_s: float) -> str | None:
        """Return the reason to end the stream: it is silent, starts are unanswered, or it is idle. None if
        healthy. ``checked_s`` is the time of the owner's last check.

        A late check means that this process stalled, so that received messages are still unread: every wait
        for the worker starts again.
        """
        if now_s - checked_s > 2 * CHECK_S:
            self._received_s = now_s
            self._sinks.excuse(now_s)
        if len(self._sinks):
            self._busy_s = now_s
        if now_s - self._received_s > self._silence_s:
            return f"the worker sent nothing for {self._silence_s:g} s"
        if (unanswered_s := self._sinks.unanswered_s(now_s)) > ANSWER_S:
            return f"the worker sends heartbeats but answered no start for {unanswered_s:.0f} s"
        if now_s - self._busy_s > self._idle_s:
            return "the stream was idle"
        return None


class MuxedWorkers:
    """Implements ``ports.worker.WorkerClient`` and ``RowClient``. Sinks are called from the event loop, never
    from within ``start`` and ``start_row``.

    ``after_frame`` is called once after all sinks of a message were called, so that their output can be
    written once per engine step. ``unsent`` receives the grant of each start that was dropped before it was
    sent: no worker will receive it. ``withdrawn`` receives what starts are refused for, before their sinks.
    """

    def __init__(
        self,
        streams: StreamClient,
        gateway_id: str,
        clock: Clock,
        supervisor: Supervisor,
        *,
        after_frame: Callable[[], None] | None = None,
        unsent: Callable[[AnyGrant], None] | None = None,
        withdrawn: Callable[[Withdrawal], None] = lambda _: None,
        silence_s: float = 5.0,
        idle_s: float = 60.0,
    ) -> None:
        """A worker silent for ``silence_s`` is lost; a stream without sequences ends after ``idle_s``."""
        self._streams = streams
        self._gateway_id = gateway_id
        self._clock = clock
        self._supervisor = supervisor
        self._after_frame = after_frame
        self._unsent = unsent
        self._withdrawn = withdrawn
        self._silence_s = silence_s
        self._idle_s = idle_s
        self._links: dict[str, WorkerLink] = {}
        # A stream outlives the request that opens it. Its log lines must not carry that request's context.

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        if (link := self._link_to(spec.grant.address)) is not None:
            return link.start(spec, sink)
        asyncio.get_running_loop().call_soon(sink.on_lost, _TOO_MANY)
        return NotStarted()

    def start_row(self, address: str, spec: RowSpec, sink: RowSink) -> RunningRow:
        if (link := self._link_to(address)) is not None:
            return link.start_row(spec, sink)
        asyncio.get_running_loop().call_soon(sink.on_lost, _TOO_MANY)
        return NotStarted()

    def _link_to(self, address: str) -> WorkerLink | None:
        """Return the stream to this worker, opened on demand; None when too many are open.

        A worker ends a stream with the certificate that opened it: new sequences go to a new stream once that
        was replaced, and the earlier one ends when it is idle.
        """
        link = self._links.get(address)
        if link is not None and not link.closed and link.credentials is self._streams.credentials:
            return link
        return self._open(address) if len(self._links) < MAX_LINKS else None

    @property
    def links(self) -> int:
        """Number of open streams."""
        return len(self._links)

    async def close(self) -> None:
        """Close every stream. Every sink is notified that its worker was lost."""
        await asyncio.gather(*(link.close() for link in list(self._links.values())))

    def _open(self, address: str) -> WorkerLink:
        link = WorkerLink(
            address,
            self._streams,
            self._clock,
            gateway_id=self._gateway_id,
            after_frame=self._after_frame,
            unsent=self._unsent,
            withdrawn=self._withdrawn,
            silence_s=self._silence_s,
            idle_s=self._idle_s,
        )
        self._links[address] = link
        link.task = self._supervisor.spawn(f"worker-stream-{address}", self._own(link), shared=True)
        return link

    async def _own(self, link: WorkerLink) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(link.address) is link:
                del self._links[link.address]
