"""One Execute stream from a gateway to one worker, for all of its sequences there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, TypeAlias

import grpc
import structlog

from fairway.v1 import scheduler_pb2, worker_pb2, worker_pb2_grpc
from services.adapters.frame_dispatch import NotStarted, SinkTable
from services.core.errors import InvalidInput
from services.core.generation import Grant, StartSpec
from services.ports.clock import Clock
from services.ports.worker import RunningSequence, SequenceSink
from services.rpc.channel import open_channel
from services.rpc.convert_worker import frame_from_proto, start_to_proto

log = structlog.get_logger()

MAX_WAITING_STARTS: Final = 4096
MAX_MESSAGE_TOKENS: Final = 1_000_000  # of the starts of one message, unless it is one start
CHECK_S: Final = 1.0
Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]"


class _Outgoing:
    """What the writer has not sent yet: starts in order, credits added up, cancels."""

    def __init__(self) -> None:
        self.starts: dict[int, StartSpec] = {}
        self.credits: dict[int, int] = {}
        self.cancels: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.starts or self.credits or self.cancels)

    def take(self) -> worker_pb2.ExecuteRequest:
        """Return one message of bounded size; what is left is for the next."""
        request = worker_pb2.ExecuteRequest(cancels=self.cancels)
        self.cancels = []
        room = MAX_MESSAGE_TOKENS
        for handle in list(self.starts):
            spec = self.starts[handle]
            room -= len(spec.generation.prompt_ids) + len(spec.produced_ids)
            if room < 0 and request.starts:
                break
            del self.starts[handle]
            request.starts.append(start_to_proto(handle, spec))
        credits_, self.credits = self.credits, {}
        for handle, tokens in credits_.items():
            if handle in self.starts:  # it comes after its start
                self.credits[handle] = tokens
            else:
                request.credit.handles.append(handle)
                request.credit.tokens.append(tokens)
        return request

    def forget(self, handle: int) -> StartSpec | None:
        """Return the start of a sequence that was not sent yet; it never will be."""
        self.credits.pop(handle, None)
        return self.starts.pop(handle, None)


class WorkerLink:
    """One stream to one worker, from its opening until it breaks or is idle for long. Not opened twice."""

    def __init__(
        self,
        address: str,
        *,
        clock: Clock,
        gateway_id: str,
        metadata: tuple[tuple[str, str], ...],
        after_frame: Callable[[], None] | None,
        unsent: Callable[[Grant], None] | None,
        silence_s: float,
        idle_s: float,
    ) -> None:
        self.address = address
        self.closed = False
        self.task: asyncio.Task[None] | None = None
        self._clock = clock
        self._gateway_id = gateway_id
        self._metadata = metadata
        self._after_frame = after_frame
        self._unsent = unsent
        self._silence_s = silence_s
        self._idle_s = idle_s
        self._sinks = SinkTable()
        self._outgoing = _Outgoing()
        self._wake = asyncio.Event()
        self._heard_s = self._busy_s = clock.monotonic_s()

    # --- the port -------------------------------------------------------------------------------

    def start(self, spec: StartSpec, sink: SequenceSink) -> RunningSequence:
        if len(self._outgoing.starts) >= MAX_WAITING_STARTS:
            asyncio.get_running_loop().call_soon(sink.on_lost, "the worker does not read its starts")
            return NotStarted()
        handle = self._sinks.add(sink)
        self._outgoing.starts[handle] = spec
        self._wake.set()
        return _Sequence(self, handle)

    def credit(self, handle: int, tokens: int) -> None:
        if handle in self._sinks:
            credits_ = self._outgoing.credits
            credits_[handle] = credits_.get(handle, 0) + tokens
            self._wake.set()

    def cancel(self, handle: int) -> None:
        if not self._sinks.drop(handle):
            return
        if (spec := self._outgoing.forget(handle)) is not None:
            self._give_back(spec)
        else:
            self._outgoing.cancels.append(handle)
            self._wake.set()

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    def _give_back(self, spec: StartSpec) -> None:
        if self._unsent is not None:
            self._unsent(spec.grant)

    # --- the stream -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry the stream until it ends, however it ends; then every sink is told."""
        message = "the stream to the worker was closed"
        channel = open_channel(self.address)
        try:
            stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            message = await self._carry(stub.Execute(metadata=self._metadata))
        finally:
            self.closed = True
            if len(self._sinks):
                log.warning("worker.lost", address=self.address, sequences=len(self._sinks), reason=message)
            for handle in list(self._outgoing.starts):
                if (spec := self._outgoing.forget(handle)) is not None:
                    self._give_back(spec)
            self._sinks.lose_all(message)
            await channel.close()

    async def _carry(self, call: Call) -> str:
        """Read, write and watch until one of them ends the stream; return why it ended."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(call))
                group.create_task(self._watch())
                async for response in call:
                    self._heard_s = self._clock.monotonic_s()
                    self._receive(response)
                raise _Ended("the worker ended the stream")
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
        finally:
            self.closed = True
            call.cancel()
        if isinstance(error, _Ended):
            return str(error)
        if isinstance(error, grpc.aio.AioRpcError):
            return f"the stream to the worker broke: {error.code().name}"
        raise error

    def _receive(self, response: worker_pb2.ExecuteResponse) -> None:
        try:
            frame = frame_from_proto(response)
        except InvalidInput as exc:
            raise _Ended(exc.message) from exc
        self._sinks.dispatch(frame)
        if self._after_frame is not None:
            self._after_frame()

    async def _write(self, call: Call) -> None:
        """The one writer. What was asked for since its last message goes into the next one."""
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over; the reader hears why
            hello = scheduler_pb2.GatewayHello(gateway_id=self._gateway_id)
            await call.write(worker_pb2.ExecuteRequest(hello=hello))
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outgoing:
                    await call.write(self._outgoing.take())

    async def _watch(self) -> None:
        """End a stream that fell silent or that nobody needs."""
        checked_s = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(CHECK_S)
            now_s = self._clock.monotonic_s()
            if now_s - checked_s > 2 * CHECK_S:  # this process stood still: what was said waits unread
                self._heard_s = now_s
            checked_s = now_s
            if len(self._sinks):
                self._busy_s = now_s
            if now_s - self._heard_s > self._silence_s:
                self.closed = True
                raise _Ended(f"the worker said nothing for {self._silence_s:g} s")
            if now_s - self._busy_s > self._idle_s:
                self.closed = True
                raise _Ended("the stream was idle")


class _Sequence:
    def __init__(self, link: WorkerLink, handle: int) -> None:
        self._link = link
        self._handle = handle

    def credit(self, tokens: int) -> None:
        self._link.credit(self._handle, tokens)

    def cancel(self) -> None:
        self._link.cancel(self._handle)


class _Ended(Exception):
    """The stream is over; the text says why."""
