"""A gateway of the tests: a real gRPC server that generates by counting, and fails where it is told to.

It keeps the promises that the client relies on: one run per idempotency key, replayed from the start to
whoever sends the key again, at any gateway of the same ``Fleet``; credit per generation of a session.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as PackedAny
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from fairway.v1 import common_pb2 as common
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the call with a status as the services send it; ``reason`` "": one without details."""

    code: grpc.StatusCode
    reason: str = ""
    retry_after_s: float | None = None
    field: str = ""
    after_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Send so many tokens, or nothing at all, then stay silent."""

    after_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Other:
    """Run it as another generation would run: another seed, or other tokens under the same one."""

    seed: int = 0
    shift: int = 0


Fault = Refuse | Hang | Other


@dataclass
class Fleet:
    """What the gateways share: the seed of each key, and what the clients sent."""

    seeds: dict[str, int] = field(default_factory=dict)
    bodies: list[pb.Generation] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    drawn: int = 0

    def accept(self, key: str) -> pb.Accepted:
        """Return the run of a key, which is its first one's, or a new run for none."""
        self.drawn += 1
        replayed = key in self.seeds
        seed = self.seeds.setdefault(key, self.drawn) if key else self.drawn
        return pb.Accepted(
            request_id=f"r{seed}", model="tiny", version_digest="sha256:x", seed=seed, replayed=replayed
        )


def token(seed: int, position: int) -> int:
    return (seed * 1000 + position) % 50_000


def status(fault: Refuse) -> grpc.Status:
    details = []
    if fault.reason:
        metadata = {"field": fault.field} if fault.field else {}
        info = error_details_pb2.ErrorInfo(reason=fault.reason, domain="fairway", metadata=metadata)
        details.append(_packed(info))
    if fault.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(fault.retry_after_s * 1000))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    message = status_pb2.Status(code=fault.code.value[0], message="as the test says", details=details)
    found: grpc.Status = rpc_status.to_status(message)
    return found


def _packed(message: Any) -> PackedAny:
    box = PackedAny()
    box.Pack(message)
    return box


class ScriptedGateway(inference_pb2_grpc.InferenceServiceServicer):
    """``faults`` are taken one per call (of a session: per generation) until there are none left."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.faults: deque[Fault] = deque()
        self.calls = 0
        self.cancelled = 0
        self.sessions = 0
        self.session_cancels: list[int] = []
        self.running = 0
        self.most_running = 0
        self.unread: dict[int, int] = {}
        self.key = ""
        self.time_left_s: float | None = None
        self._server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    # --- unary ---------------------------------------------------------------------------------------

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        await self._meet(context)
        return pb.ListModelsResponse(models=[pb.ServedModel(name="tiny", ready_replicas=1)])

    async def CountTokens(self, request: pb.CountTokensRequest, context: Context) -> pb.CountTokensResponse:
        await self._meet(context)
        return pb.CountTokensResponse(model=request.model, prompt_tokens=len(request.prompt.split()))

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        self.fleet.bodies.append(request.generation)
        await self._meet(context)
        accepted, count = self.fleet.accept(request.generation.idempotency_key), _count(request.generation)
        ids = [token(accepted.seed, position) for position in range(count)]
        choice = pb.CompletedChoice(choice=0, ids=ids, text="".join(map(_text, ids)))
        if request.generation.parts:
            texts = list(map(_text, ids))
            choice.answer.reasoning, choice.answer.content = texts[0], texts[1]
            choice.answer.tool_calls.add(id="c0", name="f", arguments="".join((*texts[2:], "end")))
        return pb.CompleteResponse(accepted=accepted, choices=[choice], finished=_ended(request.generation))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        raise NotImplementedError

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        raise NotImplementedError

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        raise NotImplementedError

    async def Infer(self, request: pb.InferRequest, context: Context) -> pb.InferResponse:
        raise NotImplementedError

    async def Moderate(self, request: pb.ModerateRequest, context: Context) -> pb.ModerateResponse:
        raise NotImplementedError

    async def _meet(self, context: Context) -> Fault | None:
        """Take the next fault; one that sends nothing happens here."""
        self.calls += 1
        sent = dict(context.invocation_metadata() or ())
        self.key = str(sent.get("authorization", ""))
        self.fleet.attempts.append(int(sent.get("x-fairway-attempt", "0")))
        self.time_left_s = context.time_remaining()
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, Refuse) and fault.after_tokens is None:
            await context.abort_with_status(status(fault))
        if isinstance(fault, Hang) and fault.after_tokens is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return fault

    # --- streams -------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        self.fleet.bodies.append(request.generation)
        fault = await self._meet(context)
        accepted, shift = self._drawn(request.generation, fault)
        try:
            await context.write(pb.GenerateResponse(accepted=accepted))
            for position in range(_count(request.generation)):
                await self._break(fault, position, context)
                chunk = pb.TokenChunk(offset=position, ids=[token(accepted.seed, position) + shift])
                chunk.text = _text(chunk.ids[0])
                if request.generation.parts:
                    chunk.parts.append(_part(position, chunk.text))
                await context.write(pb.GenerateResponse(chunk=chunk))
                await asyncio.sleep(0)
            await context.write(pb.GenerateResponse(finished=_ended(request.generation)))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _drawn(self, generation: pb.Generation, fault: Fault | None) -> tuple[pb.Accepted, int]:
        accepted = self.fleet.accept(generation.idempotency_key)
        if not isinstance(fault, Other):
            return accepted, 0
        accepted.seed = fault.seed or accepted.seed
        return accepted, fault.shift

    async def _break(self, fault: Fault | None, position: int, context: Context) -> None:
        if isinstance(fault, Refuse) and fault.after_tokens == position:
            await context.abort_with_status(status(fault))
        if isinstance(fault, Hang) and fault.after_tokens == position:
            await asyncio.Event().wait()

    # --- session -------------------------------------------------------------------------------------

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        self.sessions += 1
        run = _ScriptedSession(self, context)
        async with asyncio.TaskGroup() as group:
            async for message in request_iterator:
                run.handle(message, group)


class _ScriptedSession:
    def __init__(self, gateway: ScriptedGateway, context: Context) -> None:
        self._gateway = gateway
        self._context = context
        self._lock = asyncio.Lock()
        self._credit: dict[int, int] = {}
        self._more: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def handle(self, message: pb.SessionRequest, group: asyncio.TaskGroup) -> None:
        kind = message.WhichOneof("kind")
        if kind == "start":
            start = message.start
            self._credit[start.stream_id] = start.initial_credit_tokens
            self._more[start.stream_id] = asyncio.Event()
            self._tasks[start.stream_id] = group.create_task(self._generate(start))
        elif kind == "credit":
            for stream_id, tokens in zip(message.credit.stream_ids, message.credit.tokens, strict=True):
                self._credit[stream_id] += tokens
                self._more[stream_id].set()
        else:
            self._gateway.session_cancels += message.cancel.stream_ids
            for stream_id in message.cancel.stream_ids:
                self._tasks[stream_id].cancel()

    async def _generate(self, start: pb.SessionStart) -> None:
        gateway, generation, stream_id = self._gateway, start.generation, start.stream_id
        gateway.fleet.bodies.append(generation)
        gateway.fleet.attempts.append(start.attempt)
        gateway.calls += 1
        gateway.running += 1
        gateway.most_running = max(gateway.most_running, gateway.running)
        try:
            fault = gateway.faults.popleft() if gateway.faults else None
            if isinstance(fault, Refuse) and fault.after_tokens is None:
                await self._end(stream_id, error=_error(fault))
                return
            await self._tokens(stream_id, generation, gateway.fleet.accept(generation.idempotency_key), fault)
        finally:
            gateway.running -= 1

    async def _tokens(
        self, stream_id: int, generation: pb.Generation, accepted: pb.Accepted, fault: Fault | None
    ) -> None:
        start = pb.SessionAccepted(stream_id=stream_id, accepted=accepted)
        await self._send(pb.SessionResponse(accepted=[start]))
        for position in range(_count(generation)):
            if isinstance(fault, Refuse) and fault.after_tokens == position:
                await self._context.abort_with_status(status(fault))
            if isinstance(fault, Hang) and fault.after_tokens == position:
                await asyncio.Event().wait()
            while position >= self._credit[stream_id]:
                self._more[stream_id].clear()
                await self._more[stream_id].wait()
            frame = common.TokenFrame(
                handles=[stream_id * 16], offsets=[position], counts=[1], ids=[token(accepted.seed, position)]
            )
            frame.texts.append(_text(frame.ids[0]))
            if generation.parts:
                frame.parts.add(entry=0, parts=[_part(position, frame.texts[0])])
            self._gateway.unread[stream_id] = position + 1
            await self._send(pb.SessionResponse(tokens=frame))
        await self._end(stream_id, finished=_ended(generation))

    async def _end(self, stream_id: int, **outcome: Any) -> None:
        await self._send(pb.SessionResponse(finished=[pb.SessionFinished(stream_id=stream_id, **outcome)]))

    async def _send(self, message: pb.SessionResponse) -> None:
        async with self._lock:
            await self._context.write(message)


def _count(generation: pb.Generation) -> int:
    return generation.max_output_tokens or 8


def _text(token_id: int) -> str:
    return f"{token_id} "


def _part(position: int, text: str) -> common.OutputPart:
    """An output in parts: one token of reasoning, one of content, and a call of the others."""
    if position < 2:
        return common.OutputPart(content=text) if position else common.OutputPart(reasoning=text)
    call = common.ToolCallDelta(arguments=text)
    if position == 2:
        call.id, call.name = "c0", "f"
    return common.OutputPart(call=call)


def _ended(generation: pb.Generation) -> pb.Finished:
    count = _count(generation)
    result = pb.ChoiceResult(choice=0, finish_reason=common.FINISH_REASON_LENGTH, output_tokens=count)
    if generation.parts:
        result.parts.add(call=common.ToolCallDelta(arguments="end"))
    return pb.Finished(choices=[result], usage=common.Usage(prompt_tokens=1, output_tokens=count))


def _error(fault: Refuse) -> common.Error:
    found = common.Error(code=fault.code.value[0], reason=fault.reason, message="as the test says")
    if fault.retry_after_s is not None:
        found.retry_after.FromMilliseconds(round(fault.retry_after_s * 1000))
    return found
