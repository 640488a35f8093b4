"""The gRPC face over a real socket: events in order, one terminal event, nothing left when a client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import pytest

from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from services.adapters.memory_limiter import MemoryLimiter
from services.core import errors
from services.core.generation import (
    AnyGrant,
    FinishReason,
    GenerationSpec,
    Grant,
    NotAdmittedReason,
    PlaceSpec,
    Principal,
    SamplingParams,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.core.records import KeyRole, Meta, Tenant
from services.gateway.events import Received
from services.gateway.service import GatewayService
from services.gateway.service_types import GatewayLimits, Ports
from services.gateway.servicer import InferenceServicer
from services.gateway.session import MAX_MESSAGE_TOKENS, MAX_UNREAD, MuxedSession
from services.ports.worker import SequenceSink
from services.rpc.server import RpcServer, Service
from services.rpc.status import by_reason, from_rpc_error
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor

CLOCK = SystemClock()
AUTH = (("authorization", "Bearer key"),)


class Validator:
    """Takes the prompt's length for its tokens; refuses the model "none"."""

    def check(self, principal: Principal, generation: pb.Generation, *, pinned: None = None) -> None:
        if generation.model == "none":
            raise errors.ModelNotFound("no model none", model="none")

    async def resolve(
        self, principal: Principal, generation: pb.Generation, request_id: str, checked: None
    ) -> GenerationSpec:
        return GenerationSpec(
            request_id=request_id,
            model=generation.model,
            version_digest="sha256:x",
            route_revision=1,
            prompt_ids=list(range(len(generation.prompt))),
            sampling=SamplingParams(generation.sampling.seed),
            max_output_tokens=generation.max_output_tokens or 8,
            choices=max(1, generation.choices),
        )


class Identity:
    """One tenant, whose key may be taken away."""

    def __init__(self) -> None:
        self.revoked = False

    def still_valid(self, principal: Principal) -> Tenant:
        if self.revoked:
            raise errors.Unauthenticated("the API key is not valid any more")
        return Tenant(Meta(principal.tenant_id), max_concurrency=40)


class Placement:
    def __init__(self) -> None:
        self.attempts: list[int] = []

    async def place(self, spec: PlaceSpec) -> Grant:
        self.attempts.append(spec.attempt)
        return Grant("w0", "127.0.0.1:1", 1, 1, 1, 4, 5.0, spec.version_digest)

    def give_back(self, grant: AnyGrant) -> None: ...

    def over(self, grant: AnyGrant, refusal: NotAdmittedReason | None = None) -> None: ...


@dataclass
class Running:
    """Emits a token every millisecond within its credit; prompts of up to two characters never end, and
    those of two have tokens of 8 KiB."""

    spec: StartSpec
    sink: SequenceSink
    credits: int
    live: set[Running]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    produced: int = 0

    __hash__ = object.__hash__

    def credit(self, tokens: int) -> None:
        self.credits += tokens
        self.wake.set()

    def cancel(self) -> None:
        self.live.discard(self)

    async def stalled(self) -> None:
        """Return once it had no credit at 50 looks in a row, between which it had its turns to go on."""
        looks, seen = 0, -1
        while looks < 50:
            await asyncio.sleep(0.005)
            looks = looks + 1 if self.produced == seen == self.credits else 0
            seen = self.produced

    async def run(self) -> None:
        self.sink.on_accepted()
        limit, prompt = self.spec.generation.max_output_tokens, len(self.spec.generation.prompt_ids)
        padding = "y" * 8192 if prompt == 2 else ""
        while self in self.live and (prompt <= 2 or self.produced < limit):
            if self.produced >= self.credits:
                self.wake.clear()
                await self.wake.wait()
                continue
            self.sink.on_tokens(self.produced, [self.produced], f"{self.produced} {padding}", ())
            self.produced += 1
            await asyncio.sleep(0.001)
        if self in self.live:
            self.live.discard(self)
            self.sink.on_finished(SequenceEnd(FinishReason.LENGTH, output_tokens=self.produced))


class Workers:
    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.live: set[Running] = set()
        self.started: list[Running] = []

    def start(self, spec: StartSpec, sink: SequenceSink) -> Running:
        running = Running(spec, sink, spec.initial_credit_tokens, self.live)
        self.live.add(running)
        self.started.append(running)
        self.supervisor.spawn("run", running.run())
        return running


@dataclass
class Gateway:
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    service: GatewayService
    workers: Workers
    limiter: MemoryLimiter
    identity: Identity
    port: int
    placement: Placement

    async def at_rest(self, timeout_s: float = 30.0) -> None:
        """Return once nothing runs and no slot is held."""
        async with asyncio.timeout(timeout_s):
            while self.workers.live or self.service.running or await self.limiter.concurrency("acme"):
                await asyncio.sleep(0.01)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    supervisor = Supervisor(CLOCK)
    workers, limiter, identity = Workers(supervisor), MemoryLimiter(CLOCK), Identity()
    placement = Placement()
    numbers = iter(range(10**6))
    service = GatewayService(
        validator=Validator(),  # type: ignore[arg-type]
        identity=identity,  # type: ignore[arg-type]
        catalog=None,  # type: ignore[arg-type]
        ports=Ports(
            limiter=limiter,
            placement=placement,
            workers=workers,
            clock=CLOCK,
            supervisor=supervisor,
            rng=Random(0),
            sign_ticket=lambda tenant, request, expiry: b"t",
            new_incident=lambda: "inc_1",
            error_of=by_reason,
        ),
        limits=GatewayLimits(heartbeat_s=0.15, window_tokens=16),
    )

    def received() -> Received:
        return Received(CLOCK.monotonic_s(), 1, f"req_{next(numbers)}")

    server = RpcServer(
        [
            Service(
                pb.DESCRIPTOR.services_by_name["InferenceService"],
                inference_pb2_grpc.add_InferenceServiceServicer_to_server,
                InferenceServicer(service, received, heartbeat_s=0.15, write_timeout_s=1.5),
            )
        ],
        listen="127.0.0.1:0",
        internal_token="i" * 32,
        new_incident=lambda: "inc_2",
        authenticate=lambda token: Principal("k", KeyRole.TENANT, "acme"),
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Gateway(
            inference_pb2_grpc.InferenceServiceStub(channel),
            service,
            workers,
            limiter,
            identity,
            server.port,
            placement,
        )
    await server.stop(0)
    assert supervisor.healthy, supervisor.failures
    await supervisor.close()


def generation(**values: Any) -> pb.Generation:
    return pb.Generation(**{"model": "m", "prompt": "hello", **values})


async def test_generate_streams_in_order_and_ends_once(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(max_output_tokens=50))
    events = [event async for event in gateway.stub.Generate(request, metadata=AUTH)]
    assert events[0].HasField("accepted")
    assert [e.WhichOneof("event") for e in events].count("finished") == 1
    assert events[-1].HasField("finished")
    assert [i for e in events for i in e.chunk.ids] == list(range(50))
    assert events[-1].finished.usage.output_tokens == 50
    clock = events[-1].finished.clock
    assert clock.decode_us >= 45_000
    await gateway.at_rest()


async def test_a_generation_of_a_session_says_which_attempt_it_is(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    for stream_id, attempt in ((1, 0), (2, 4)):
        start = pb.SessionStart(
            stream_id=stream_id, generation=generation(max_output_tokens=1), attempt=attempt
        )
        await call.write(pb.SessionRequest(start=start))
    await call.done_writing()
    async for _ in call:
        pass
    assert sorted(gateway.placement.attempts) == [0, 4]
    await gateway.at_rest()


async def test_complete_returns_the_whole_answer(gateway: Gateway) -> None:
    request = pb.CompleteRequest(generation=generation(max_output_tokens=3, choices=2))
    answer = await gateway.stub.Complete(request, metadata=AUTH)
    assert [choice.text for choice in answer.choices] == ["0 1 2 ", "0 1 2 "]
    assert answer.finished.usage.output_tokens == 6


async def test_an_error_is_a_rich_status(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(model="none"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [event async for event in gateway.stub.Generate(request, metadata=AUTH)]
    error = from_rpc_error(caught.value)
    assert isinstance(error, errors.ModelNotFound)
    assert error.metadata["model"] == "none"
    assert error.metadata["request_id"].startswith("req_")


async def test_a_client_that_goes_away_frees_everything(gateway: Gateway) -> None:
    call = gateway.stub.Generate(pb.GenerateRequest(generation=generation(prompt="x")), metadata=AUTH)
    async for event in call:
        if event.HasField("chunk"):
            break
    assert len(gateway.workers.live) == 1
    call.cancel()
    await gateway.at_rest()


async def test_a_reader_that_stops_stops_the_worker(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(prompt="xy"))
    call: Any = gateway.stub.Generate(request, metadata=AUTH)
    await call.read()
    (running,) = gateway.workers.started
    async with asyncio.timeout(60):
        # Nothing is read: the transport's buffers fill, then no credit is given.
        await running.stalled()
        stopped_at = running.produced
        while running.produced <= stopped_at + 16:
            await call.read()  # a reader that comes back finds everything, and the worker goes on
    call.cancel()
    await gateway.at_rest()


async def test_a_silent_stream_has_heartbeats(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(prompt="x"))
    call: Any = gateway.stub.Generate(request, metadata=AUTH)
    await call.read()
    for running in gateway.workers.started:
        running.credits = -(10**9)  # the worker stays silent
    heartbeats = 0
    async with asyncio.timeout(30):
        while heartbeats < 2:
            heartbeats += (await call.read()).HasField("heartbeat")
    call.cancel()


async def test_the_deadline_of_the_rpc_ends_the_request(gateway: Gateway) -> None:
    request = pb.GenerateRequest(generation=generation(prompt="x"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [event async for event in gateway.stub.Generate(request, metadata=AUTH, timeout=0.2)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await gateway.at_rest()


@asynccontextmanager
async def no_read_ahead(gateway: Gateway) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    """Yield a stub whose transport takes no message before it is read."""
    options = (("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}", options=options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


# --- Session ---------------------------------------------------------------------------------------


async def requests(
    messages: Sequence[pb.SessionRequest], hold: asyncio.Event
) -> AsyncIterator[pb.SessionRequest]:
    for message in messages:
        yield message
    await hold.wait()


def start(stream_id: int, credit: int = 0, **values: Any) -> pb.SessionRequest:
    return pb.SessionRequest(
        start=pb.SessionStart(
            stream_id=stream_id, generation=generation(**values), initial_credit_tokens=credit
        )
    )


async def read(call: Any) -> pb.SessionResponse:
    """Return the next message of a session that must have one."""
    message = await call.read()
    assert isinstance(message, pb.SessionResponse), "the session ended"
    return message


class Heard:
    """What came over a session, by stream."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, pb.SessionFinished] = {}
        self.accepted: list[int] = []

    def add(self, message: pb.SessionResponse) -> None:
        self.accepted += [accepted.stream_id for accepted in message.accepted]
        frame, at = message.tokens, 0
        for handle, offset, count in zip(frame.handles, frame.offsets, frame.counts, strict=True):
            got = self.tokens.setdefault(handle >> 4, [])
            assert (handle >> 4) not in self.finished, "tokens after the terminal event"
            assert offset == len(got)
            got += frame.ids[at : at + count]
            at += count
        for finished in message.finished:
            assert finished.stream_id not in self.finished, "two terminal events"
            self.finished[finished.stream_id] = finished


async def test_a_session_runs_many_and_ends_each_once(gateway: Gateway) -> None:
    hold = asyncio.Event()
    hold.set()
    messages = [start(number, max_output_tokens=10 + number) for number in range(32)]
    heard = Heard()
    async with asyncio.timeout(30):
        async for message in gateway.stub.Session(requests(messages, hold), metadata=AUTH):
            heard.add(message)
    assert sorted(heard.finished) == list(range(32))
    assert all(heard.tokens[number] == list(range(10 + number)) for number in range(32))
    await gateway.at_rest()


async def test_a_bad_generation_ends_alone(gateway: Gateway) -> None:
    hold = asyncio.Event()
    hold.set()
    messages = [start(1, max_output_tokens=3), start(2, model="none"), start(3, choices=99), start(4)]
    heard = Heard()
    async with asyncio.timeout(30):
        async for message in gateway.stub.Session(requests(messages, hold), metadata=AUTH):
            heard.add(message)
    assert heard.finished[2].error.reason == "MODEL_NOT_FOUND"
    assert heard.finished[3].error.reason == "INVALID_INPUT"
    assert heard.finished[3].error.metadata["field"] == "start.generation.choices"
    assert heard.finished[1].HasField("finished")
    assert heard.finished[4].HasField("finished")


async def test_a_window_holds_a_stream_until_credit_comes(gateway: Gateway) -> None:
    hold = asyncio.Event()
    call = gateway.stub.Session(metadata=AUTH)
    await call.write(start(7, credit=5, max_output_tokens=12))
    await call.write(start(8, max_output_tokens=12))
    heard = Heard()
    async with asyncio.timeout(30):
        while 8 not in heard.finished:
            heard.add(await read(call))
        assert heard.tokens[7] == list(range(5))
        credit = pb.SessionCredit(stream_ids=[7], tokens=[100])
        await call.write(pb.SessionRequest(credit=credit))
        while 7 not in heard.finished:
            heard.add(await read(call))
    assert heard.tokens[7] == list(range(12))
    await call.done_writing()
    hold.set()
    await gateway.at_rest()


async def test_cancelling_one_stream_leaves_the_others(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    await call.write(start(1, prompt="x"))
    await call.write(start(2, max_output_tokens=30))
    heard = Heard()
    async with asyncio.timeout(30):
        while not heard.tokens.get(1):
            heard.add(await read(call))
        await call.write(pb.SessionRequest(cancel=pb.SessionCancel(stream_ids=[1, 99])))
        while len(heard.finished) < 2:
            heard.add(await read(call))
    assert heard.finished[1].error.reason == "CANCELLED"
    assert heard.tokens[2] == list(range(30))
    call.cancel()
    await gateway.at_rest()


async def test_a_session_that_breaks_frees_everything(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    for number in range(16):
        await call.write(start(number, prompt="x"))
    heard = Heard()
    async with asyncio.timeout(30):
        while len(heard.tokens) < 16:
            heard.add(await read(call))
    assert len(gateway.workers.live) == 16
    call.cancel()
    await gateway.at_rest()


@pytest.mark.parametrize(
    "message",
    [
        pb.SessionRequest(),
        pb.SessionRequest(credit=pb.SessionCredit(stream_ids=[1], tokens=[1, 2])),
        pb.SessionRequest(credit=pb.SessionCredit(stream_ids=[1], tokens=[2**31])),
        pb.SessionRequest(credit=pb.SessionCredit(stream_ids=[1] * 5000, tokens=[1] * 5000)),
    ],
)
async def test_a_senseless_message_ends_the_session_clearly(
    gateway: Gateway, message: pb.SessionRequest
) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    await call.write(start(1, prompt="x"))
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(30):
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await gateway.at_rest()


async def test_a_senseless_message_that_meets_a_write_ends_the_session_clearly(gateway: Gateway) -> None:
    async with no_read_ahead(gateway) as stub:
        call: Any = stub.Session(metadata=AUTH)
        await call.write(start(1, prompt="x"))
        async with asyncio.timeout(30):
            while not gateway.workers.started:
                await asyncio.sleep(0.005)
            await call.write(pb.SessionRequest())  # the first message is on its way, and nobody reads it
            await gateway.at_rest(30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(30):
                while True:
                    await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_reader_that_never_comes_hears_why_it_was_cut_off(gateway: Gateway) -> None:
    async with no_read_ahead(gateway) as stub:
        call: Any = stub.Session(metadata=AUTH)
        await call.write(start(1, prompt="x"))
        async with asyncio.timeout(30):
            while not gateway.workers.started:
                await asyncio.sleep(0.005)
            await gateway.at_rest(30)  # cut while the first message of all waits for its reader
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(30):
                while True:
                    await call.read()
        assert isinstance(from_rpc_error(caught.value), errors.SlowReader)


async def test_concurrency_is_exact_across_faces(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    for number in range(45):
        await call.write(start(number, prompt="x"))
    heard = Heard()
    async with asyncio.timeout(30):
        while len(heard.tokens) < 40 or len(heard.finished) < 5:
            heard.add(await read(call))
    assert {end.error.reason for end in heard.finished.values()} == {"CONCURRENCY_EXCEEDED"}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.stub.Complete(pb.CompleteRequest(generation=generation()), metadata=AUTH)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    await gateway.at_rest()
    await gateway.stub.Complete(pb.CompleteRequest(generation=generation()), metadata=AUTH)


async def test_a_reader_that_stays_away_is_cut_off(gateway: Gateway) -> None:
    stream: Any = gateway.stub.Generate(pb.GenerateRequest(generation=generation(prompt="xy")), metadata=AUTH)
    await stream.read()
    session = gateway.stub.Session(metadata=AUTH)
    await session.write(start(1, prompt="xy"))
    await read(session)
    assert gateway.service.running == 2
    await gateway.at_rest()
    for call in (stream, session):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(30):
                while True:
                    await call.read()  # one that comes back after all hears why
        assert isinstance(from_rpc_error(caught.value), errors.SlowReader)


async def test_a_client_that_does_not_read_its_session_is_not_read_either(gateway: Gateway) -> None:
    session = MuxedSession(gateway.service, Principal("k", KeyRole.TENANT, "acme"), _received)
    for _ in range(MAX_UNREAD):
        session.handle(start(5, choices=99), None)
    blocked = asyncio.ensure_future(session.readable())
    await asyncio.sleep(0.01)
    assert not blocked.done()
    assert len((await session.next_message(1.0)).finished) == MAX_UNREAD
    await blocked


async def test_messages_of_a_session_are_bounded_and_keep_their_order(gateway: Gateway) -> None:
    session = MuxedSession(gateway.service, Principal("k", KeyRole.TENANT, "acme"), _received)
    top = TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0), ("a", "b"), "a")
    for offset in range(0, 3 * MAX_MESSAGE_TOKENS, 1024):
        session.add_tokens(16, offset, range(offset, offset + 1024), "x", ())
        session.add_tokens(32, offset // 1024, [offset], "y", [top])
    session.finished.append(pb.SessionFinished(stream_id=1))
    heard, messages = Heard(), 0
    while 1 not in heard.finished:
        message = await session.next_message(1.0)
        assert len(message.tokens.ids) <= MAX_MESSAGE_TOKENS
        for found in message.tokens.logprobs:
            assert message.tokens.handles[found.entry] == 32
        heard.add(message)
        messages += 1
    assert messages > 3
    assert heard.tokens[1] == list(range(3 * MAX_MESSAGE_TOKENS))
    assert len(heard.tokens[2]) == 96
    assert session.idle


async def test_a_key_that_is_taken_away_starts_nothing_more_on_an_open_session(gateway: Gateway) -> None:
    call = gateway.stub.Session(metadata=AUTH)
    heard = Heard()
    await call.write(start(1, max_output_tokens=2))
    async with asyncio.timeout(30):
        while 1 not in heard.finished:
            heard.add(await read(call))
        gateway.identity.revoked = True
        await call.write(start(2, max_output_tokens=2))
        while 2 not in heard.finished:
            heard.add(await read(call))
    assert heard.finished[2].error.reason == "UNAUTHENTICATED"
    call.cancel()


async def test_fanout_is_checked_before_anything_of_that_size_is_made(gateway: Gateway) -> None:
    with pytest.raises(errors.FairwayError):
        async with asyncio.timeout(30):
            await gateway.service.complete(
                Principal("k", KeyRole.TENANT, "acme"),
                generation(model="none", choices=2**32 - 1),
                received=_received(),
            )


def _received() -> Received:
    return Received(CLOCK.monotonic_s(), 1, "req_x")
