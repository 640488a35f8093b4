"""One Execute stream from a gateway to one worker, for all of its sequences there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, TypeAlias

import grpc

from fairway.task_group import TaskGroup
from fairway.v1 import scheduler_pb2, worker_pb2, worker_pb2_grpc
from services.adapters.links.link_health import CHECK_S
from services.adapters.links.sequence_link import Outgoing, SequenceLink
from services.core.errors import InvalidInput
from services.core.generation import AnyGrant
from services.ports.clock import Clock
from services.rpc.channel import open_channel
from services.rpc.convert.worker import frame_from_proto, start_to_proto

MAX_MESSAGE_TOKENS: Final = 1_000_000  # of all starts in one message, unless it has only one start
Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse]"


class WorkerLink(SequenceLink):
    """A ``SequenceLink`` over gRPC with its own channel."""

    def __init__(
        self,
        address: str,
        *,
        clock: Clock,
        gateway_id: str,
        metadata: tuple[tuple[str, str], ...],
        after_frame: Callable[[], None] | None,
        unsent: Callable[[AnyGrant], None] | None,
        silence_s: float,
        idle_s: float,
    ) -> None:
        super().__init__(
            address, clock, after_frame=after_frame, unsent=unsent, silence_s=silence_s, idle_s=idle_s
        )
        self._gateway_id = gateway_id
        self._metadata = metadata
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Run the stream until it ends, then notify every sink."""
        channel = open_channel(self.address)
        try:
            await self._run(self._carry(worker_pb2_grpc.WorkerServiceStub(channel)))
        finally:
            await channel.close()

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    def _wake(self) -> None:
        self._woken.set()

    async def _carry(self, stub: worker_pb2_grpc.WorkerServiceAsyncStub) -> str:
        """Read, write and check the health until one of them ends the stream; return the reason."""
        call: Call = stub.Execute(metadata=self._metadata)
        try:
            async with TaskGroup() as group:
                group.create_task(self._write(call))
                group.create_task(self._watch())
                async for response in call:
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
        self._on_message(frame)

    async def _write(self, call: Call) -> None:
        """The only writer. Everything requested since its last message goes into the next one."""
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over; the reader gets the reason
            hello = scheduler_pb2.GatewayHello(gateway_id=self._gateway_id)
            await call.write(worker_pb2.ExecuteRequest(hello=hello))
            while True:
                await self._woken.wait()
                self._woken.clear()
                while self._outgoing:
                    request = _take_request(self._outgoing)
                    self._sinks.sent((start.handle for start in request.starts), self._clock.monotonic_s())
                    await call.write(request)

    async def _watch(self) -> None:
        """End a stream that its ``LinkHealth`` reports as over."""
        checked_s = self._clock.monotonic_s()
        while True:
            await self._clock.sleep(CHECK_S)
            now_s = self._clock.monotonic_s()
            if (why := self._health.reason_to_end(now_s, checked_s=checked_s)) is not None:
                self.closed = True
                raise _Ended(why)
            checked_s = now_s


def _take_request(outgoing: Outgoing) -> worker_pb2.ExecuteRequest:
    """Return one message of bounded size. The rest stays for the next one."""
    request = worker_pb2.ExecuteRequest(cancels=outgoing.cancels)
    outgoing.cancels = []
    room = MAX_MESSAGE_TOKENS
    for handle in list(outgoing.starts):
        spec = outgoing.starts[handle]
        room -= len(spec.generation.prompt.ids) + len(spec.produced_ids)
        if room < 0 and request.starts:
            break
        del outgoing.starts[handle]
        request.starts.append(start_to_proto(handle, spec))
    credits_, outgoing.credits = outgoing.credits, {}
    for handle, tokens in credits_.items():
        if handle in outgoing.starts:  # a credit follows its start
            outgoing.credits[handle] = tokens
        else:
            request.credit.handles.append(handle)
            request.credit.tokens.append(tokens)
    return request


class _Ended(Exception):
    """The stream is over; the text is the reason."""
