"""The OpenAI face over real sockets, on a scripted service with the signature of ``Generations``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fairway.formats.safety import SafetyPack
from fairway.v1 import inference_pb2
from services.core.errors import TokenRateExceeded
from services.core.generation import FinishReason, Principal, StageClock, TokenLogprobs, Usage
from services.core.limits import RateState
from services.core.records import KEYS, TENANTS, ApiKey, Deployment, KeyRole, Meta, Tenant
from services.core.safety import SafetyPins
from services.gateway.catalog import Route
from services.gateway.events import Accepted, ChoiceResult, Event, Finished, Received, Tokens, never
from services.gateway.faces.openai.exchange import HttpLimits
from services.gateway.faces.openai.routes import build_app
from services.gateway.faces.openai.server import HttpServer
from services.gateway.policy.degrade import Degradation, DegradationKind
from services.gateway.requests.parts import in_parts
from services.gateway.requests.streaming import Completion
from services.gateway.safety.packs import SafetyTerms, compiled
from services.gateway.safety.requests import RequestSafety
from services.gateway.service import ServedModel
from services.runtime import secrets
from services.runtime.audit import AuditRecorder
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Versioned
from services.runtime.identity import KeyDirectory
from services.runtime.ids import Ids
from tests.support.memory_batches import memory_batches
from tests.support.no_rows import NoRows
from tests.support.safety import asker_of, desk_of
from tests.support.stored_responses import memory_responses

DIGEST = "sha256:" + "ab" * 32


KEY, KEY_HASH = secrets.new_key("alpha", b"\x01" * 32)


ADMIN_KEY, ADMIN_HASH = secrets.new_key("root", b"\x02" * 32)


MAX_BODY = 20_000


ENTRY = TokenLogprobs(-0.5, (97,), (-0.25,), ("a",), "b", "b")


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


STREAM = {**CHAT, "stream": True}


@dataclass
class Call:
    principal: Principal
    generation: inference_pb2.Generation
    received: Received
    timeout_s: float | None


class ScriptedService:
    """Plays what a test wrote; knows what was asked, what was made and what was closed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.made = 0
        self.running = 0
        self.closed = asyncio.Event()
        self._started = asyncio.Event()
        self.script: Callable[[Call], AsyncGenerator[Event, None]] = plain
        self.terms = SafetyTerms(SafetyPins(deployment="strict"), compiled(SafetyPack(), None))

    def check_open(self, tenant_id: str, model: str, received: Received) -> None: ...

    @asynccontextmanager
    async def counted(self, principal: Principal) -> AsyncIterator[None]:
        yield

    async def judging(self, principal: Principal, *_: Any) -> RequestSafety:
        return desk_of().open(self.terms, asker_of())

    async def stream(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: Any = None,
        withdraws: Callable[[], bool] = never,
    ) -> AsyncGenerator[Event, None]:
        call = Call(principal, generation, received, timeout_s)
        self.calls.append(call)
        self.running += 1
        self._started, started = asyncio.Event(), self._started
        started.set()
        try:
            events = self.script(call)
            async with aclosing(in_parts(events, None) if generation.parts else events) as events:
                async for event in events:
                    self.made += 1
                    yield event
        finally:
            self.running -= 1
            if not self.running:
                self.closed.set()

    async def complete(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: Any = None,
        withdraws: Callable[[], bool] = never,
    ) -> Completion:
        choices = max(1, generation.choices)
        texts, ids = [""] * choices, [list[int]() for _ in range(choices)]
        logprobs = [list[TokenLogprobs]() for _ in range(choices)]
        accepted = None
        async with aclosing(
            self.stream(principal, generation, received=received, timeout_s=timeout_s)
        ) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    accepted = event
                elif isinstance(event, Tokens):
                    texts[event.choice] += event.text
                    ids[event.choice] += event.ids
                    logprobs[event.choice] += event.logprobs
                elif isinstance(event, Finished):
                    assert accepted is not None
                    return Completion(accepted, texts, ids, logprobs, event)
        raise AssertionError("no terminal event")

    async def until_running(self, count: int) -> None:
        while self.running < count:
            await asyncio.wait_for(self._started.wait(), 30)

    async def token_ids(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, list[int]]:
        deployment = Deployment(Meta(request.model), request.model, "", DIGEST, replicas=1)
        text = request.prompt or "".join(turn.content for turn in request.chat.messages)
        return Route(request.model, deployment, DIGEST, 1, ready_replicas=1), list(text.encode())

    async def count_tokens(
        self, principal: Principal, request: inference_pb2.CountTokensRequest
    ) -> tuple[Route, int]:
        route, ids = await self.token_ids(principal, request)
        return route, len(ids)

    async def text_of(self, principal: Principal, model: str, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    def max_context_tokens(self, route: Route) -> int:
        return 128

    async def list_models(self, principal: Principal) -> list[ServedModel]:
        return [ServedModel(name, DIGEST, 128, 1, 1_700_000_000) for name in ("m", "org/m")]


def accepted(call: Call) -> Accepted:
    return Accepted(call.received.request_id, call.generation.model, DIGEST, 1, 1, 3)


def finished(call: Call, tokens: int = 2) -> Finished:
    choices = max(1, call.generation.choices)
    results = tuple(ChoiceResult(choice, FinishReason.STOP, "", tokens) for choice in range(choices))
    return Finished(results, Usage(3, tokens * choices, 1), StageClock(0))


async def plain(call: Call) -> AsyncGenerator[Event, None]:
    yield accepted(call)
    for offset, text in enumerate(("Hel", "lo")):
        for choice in range(max(1, call.generation.choices)):
            logprobs = (ENTRY,) if call.generation.HasField("logprobs") else ()
            yield Tokens(choice, offset, [offset], text, logprobs)
    yield finished(call)


async def degraded(call: Call) -> AsyncGenerator[Event, None]:
    found = Degradation(DegradationKind.OUTPUT_CAPPED, "100", "10", 0.7)
    yield replace(accepted(call), degradations=(found,))
    yield Tokens(0, 0, [0], "Hel")
    yield finished(call)


async def limited(call: Call) -> AsyncGenerator[Event, None]:
    requests, tokens = RateState(600, 598, 0.2), RateState(6000, 4000, 61.5)
    yield replace(accepted(call), request_rate=requests, token_rate=tokens)
    yield Tokens(0, 0, [0], "Hel")
    yield finished(call)


async def rejected(call: Call) -> AsyncGenerator[Event, None]:
    error = TokenRateExceeded("no room", retry_after_s=7.25)
    error.request_rate, error.token_rate = RateState(600, 598, 0.2), RateState(6000, 100, 59.0)
    raise error
    yield accepted(call)


async def endless(call: Call) -> AsyncGenerator[Event, None]:
    yield accepted(call)
    offset = 0
    while True:
        yield Tokens(0, offset, [1], "x" * 1000)
        offset += 1
        await asyncio.sleep(0)


async def begun(call: Call) -> AsyncGenerator[Event, None]:
    yield accepted(call)
    yield Tokens(0, 0, [1], "Hel")
    await asyncio.sleep(60)


async def silent(call: Call) -> AsyncGenerator[Event, None]:
    yield accepted(call)
    await asyncio.sleep(60)


def failing(error: Exception, *, after: int) -> Callable[[Call], AsyncGenerator[Event, None]]:
    async def script(call: Call) -> AsyncGenerator[Event, None]:
        events: list[Event] = [accepted(call), Tokens(0, 0, [1], "Hel"), finished(call)]
        for event in events[:after]:
            yield event
        raise error

    return script


class View:
    def __init__(self, records: dict[str, Any]) -> None:
        self.view = {key: Versioned(record, 1, 1) for key, record in records.items()}


def directory() -> KeyDirectory:
    keys = {
        KEYS + "alpha": ApiKey(Meta("alpha"), KeyRole.TENANT, KEY_HASH, tenant="acme"),
        KEYS + "root": ApiKey(Meta("root"), KeyRole.ADMIN, ADMIN_HASH),
    }
    return KeyDirectory(View(keys), View({TENANTS + "acme": Tenant(Meta("acme"))}), SystemClock())


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Data of the server-sent events; "[DONE]" and comments as text."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        found: list[Any] = []
        for block in blocks:
            assert "\n" not in block
            if block.startswith("data: {"):
                found.append(json.loads(block[6:]))
            else:
                found.append(block.removeprefix("data: "))
        return found


@dataclass
class Face:
    service: ScriptedService
    server: HttpServer
    app: Any
    not_ready: list[str] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1 << 22)
        self.writers.append(writer)
        return reader, writer

    async def hang_up(self) -> None:
        """Close what the test left open."""
        for writer in self.writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = KEY,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> Answer:
        """One request on its own connection; waits for the end of the answer."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "connection: close"]
        names = {name for name, _ in headers}
        lines += [] if "host" in names else ["host: localhost"]
        lines += [] if "content-length" in names else [f"content-length: {len(data)}"]
        lines += [] if key is None else [f"authorization: Bearer {key}"]
        lines += [f"{name}: {value}" for name, value in headers]
        reader, writer = await self.connect()
        try:
            writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)
            return await asyncio.wait_for(read_answer(reader), 10)
        finally:
            writer.close()

    async def chat(self, body: Any, **changes: Any) -> Answer:
        return await self.ask("POST", "/v1/chat/completions", body, **changes)

    async def send(self, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connect()
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {KEY}"]
        lines += [f"content-length: {len(data)}", "", ""]
        writer.write("\r\n".join(lines).encode() + data)
        await writer.drain()
        return reader, writer


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    if headers.get("transfer-encoding") != "chunked":
        return Answer(int(head[0].split()[1]), headers, await reader.read())
    body = b""
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    assert await reader.read() == b"\r\n"
    return Answer(int(head[0].split()[1]), headers, body)


@asynccontextmanager
async def serving(
    limits: HttpLimits | None = None,
    *,
    cors_origins: Sequence[str] = (),
    identity: KeyDirectory | None = None,
    audit: AuditRecorder | None = None,
    **changes: Any,
) -> AsyncIterator[Face]:
    service, reasons = ScriptedService(), []  # type: ignore[var-annotated]
    async with memory_responses(SystemClock()) as responses:
        app = build_app(
            service,
            NoRows(),
            memory_batches(),
            identity or directory(),
            SystemClock(),
            Ids(),
            responses,
            event_secret=b"e" * 32,
            limits=limits or HttpLimits(MAX_BODY),
            not_ready=lambda: reasons[0] if reasons else "",
            cors_origins=cors_origins,
            audit=audit,
        )
        server = HttpServer(app, "127.0.0.1", 0, **changes)
        await server.start()
        face = Face(service, server, app, reasons)
        try:
            yield face
        finally:
            await face.hang_up()
            await server.stop(0.2)
