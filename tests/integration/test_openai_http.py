"""The OpenAI face over real sockets, on a scripted service with GatewayService's signature."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.routing import Route
from structlog.testing import capture_logs

from fairway.v1 import inference_pb2
from services.core import errors
from services.core.generation import FinishReason, Principal, StageClock, TokenLogprobs, Usage
from services.core.records import KEYS, TENANTS, ApiKey, KeyRole, Meta, Tenant
from services.gateway.events import Accepted, ChoiceResult, Event, Finished, Heartbeat, Received, Tokens
from services.gateway.http_io import HttpLimits
from services.gateway.http_server import HttpServer
from services.gateway.openai_http import Access, build_app
from services.runtime import secrets
from services.runtime.clock import SystemClock
from services.runtime.identity import KeyDirectory
from services.runtime.ids import Ids
from services.runtime.informer import Versioned

DIGEST = "sha256:" + "ab" * 32
KEY, KEY_HASH = secrets.new_key("alpha", b"\x01" * 32)
ADMIN_KEY, ADMIN_HASH = secrets.new_key("root", b"\x02" * 32)
MAX_BODY = 20_000
ENTRY = TokenLogprobs(-0.5, (1,), (-0.25,), ("a",), "b")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


@dataclass
class Call:
    principal: Principal
    generation: inference_pb2.Generation
    received: Received
    timeout_s: float | None


@dataclass
class Completion:
    accepted: Accepted
    texts: list[str]
    ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    finished: Finished


@dataclass
class Model:
    name: str = "m"
    version_digest: str = DIGEST
    max_context_tokens: int = 128
    ready_replicas: int = 1
    created_unix_s: int = 1_700_000_000


class ScriptedService:
    """Plays what a test wrote; knows what was asked, what was made and what was closed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.made = 0
        self.running = 0
        self.closed = asyncio.Event()
        self._started = asyncio.Event()
        self.script: Callable[[Call], AsyncGenerator[Event, None]] = plain

    async def stream(
        self,
        principal: Principal,
        generation: inference_pb2.Generation,
        *,
        received: Received,
        timeout_s: Any = None,
    ) -> AsyncGenerator[Event, None]:
        call = Call(principal, generation, received, timeout_s)
        self.calls.append(call)
        self.running += 1
        self._started, started = asyncio.Event(), self._started
        started.set()
        try:
            async with aclosing(self.script(call)) as events:
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
    ) -> Completion:
        choices = max(1, generation.choices)
        texts, logprobs = [""] * choices, [[] for _ in range(choices)]  # type: ignore[var-annotated]
        accepted = None
        async with aclosing(
            self.stream(principal, generation, received=received, timeout_s=timeout_s)
        ) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    accepted = event
                elif isinstance(event, Tokens):
                    texts[event.choice] += event.text
                    logprobs[event.choice] += event.logprobs
                elif isinstance(event, Finished):
                    assert accepted is not None
                    return Completion(accepted, texts, [], logprobs, event)
        raise AssertionError("no terminal event")

    async def until_running(self, count: int) -> None:
        while self.running < count:
            await asyncio.wait_for(self._started.wait(), 5)

    async def list_models(self, principal: Principal) -> list[Model]:
        return [Model(), Model("org/m")]


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


async def endless(call: Call) -> AsyncGenerator[Event, None]:
    yield accepted(call)
    offset = 0
    while True:
        yield Tokens(0, offset, [1], "x" * 1000)
        offset += 1
        await asyncio.sleep(0)


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
async def serving(limits: HttpLimits | None = None, **changes: Any) -> AsyncIterator[Face]:
    service, reasons = ScriptedService(), []  # type: ignore[var-annotated]
    app = build_app(
        service,
        directory(),
        SystemClock(),
        Ids(),
        max_body_bytes=MAX_BODY,
        limits=limits,
        not_ready=lambda: reasons[0] if reasons else "",
    )
    server = HttpServer(app, "127.0.0.1", 0, **changes)
    await server.start()
    face = Face(service, server, app, reasons)
    try:
        yield face
    finally:
        await face.hang_up()
        await server.stop(0.2)


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    with capture_logs() as found:
        yield found


@pytest.fixture
async def face() -> AsyncIterator[Face]:
    async with serving() as found:
        yield found


# Answers


async def test_a_chat(face: Face) -> None:
    answer = await face.chat({**CHAT, "n": 2, "logprobs": True, "top_logprobs": 1})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    found = answer.json
    assert found["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in found["choices"]] == ["Hello", "Hello"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.25, "bytes": [97]}
    ]
    assert found["usage"]["total_tokens"] == 7
    assert found["id"] == "chatcmpl-" + answer.headers["x-request-id"]


async def test_a_streamed_chat(face: Face) -> None:
    answer = await face.chat({**STREAM, "n": 2, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *frames, usage, done = answer.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(frame["usage"] is None for frame in frames)
    steps = [(c["index"], c["delta"], c["finish_reason"]) for frame in frames for c in frame["choices"]]
    opening = {"role": "assistant", "content": ""}
    assert steps == [
        (0, opening, None),
        (1, opening, None),
        (0, {"content": "Hel"}, None),
        (1, {"content": "Hel"}, None),
        (0, {"content": "lo"}, None),
        (1, {"content": "lo"}, None),
        (0, {}, "stop"),
        (1, {}, "stop"),
    ]
    assert len({frame["id"] for frame in frames}) == 1


async def test_without_usage_asked_for_there_is_none(face: Face) -> None:
    *frames, done = (await face.chat(STREAM)).events
    assert done == "[DONE]"
    assert all("usage" not in frame for frame in frames)


async def test_streamed_logprobs(face: Face) -> None:
    chat = await face.chat({**STREAM, "logprobs": True})
    assert [len(f["choices"][0]["logprobs"]["content"]) for f in chat.events[1:3]] == [1, 1]
    body = {"model": "m", "prompt": "x", "stream": True, "logprobs": 1}
    *frames, _ = (await face.ask("POST", "/v1/completions", body)).events
    assert [frame["choices"][0]["logprobs"]["text_offset"] for frame in frames[:2]] == [[0], [1]]


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]]])
async def test_a_completion(face: Face, prompt: Any) -> None:
    answer = await face.ask("POST", "/v1/completions", {"model": "m", "prompt": prompt, "logprobs": 1})
    assert answer.json["object"] == "text_completion"
    assert answer.json["choices"][0]["text"] == "Hello"
    assert answer.json["choices"][0]["logprobs"]["tokens"] == ["b", "b"]
    (call,) = face.service.calls
    kind = call.generation.WhichOneof("input")
    assert kind == ("token_ids" if isinstance(prompt, list) and prompt != ["a"] else "prompt")


async def test_a_batch_of_prompts_is_as_many_requests(face: Face) -> None:
    body = {"model": "m", "prompt": ["a", "b", "c"], "n": 2}
    answer = await face.ask("POST", "/v1/completions", body)
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(6))
    base = answer.headers["x-request-id"]
    assert [call.received.request_id for call in face.service.calls] == [f"{base}-{n}" for n in range(3)]
    assert answer.json["usage"]["prompt_tokens"] == 9
    streamed = (await face.ask("POST", "/v1/completions", {**body, "stream": True})).events
    assert streamed[-1] == "[DONE]"
    texts = dict.fromkeys(range(6), "")
    for frame in streamed[:-1]:
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"Hello"}


async def test_the_service_gets_who_when_and_how_long(face: Face) -> None:
    await face.chat({**CHAT, "seed": 5}, headers=(("x-request-timeout-s", "2.5"),))
    (call,) = face.service.calls
    assert call.principal == Principal("alpha", KeyRole.TENANT, "acme")
    assert call.timeout_s == 2.5
    assert call.generation.sampling.seed == 5
    assert abs(call.received.unix_us / 1e6 - SystemClock().unix_s()) < 30


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e3", "999999999", "", "1 2", "86401"])
async def test_a_senseless_timeout_is_refused(face: Face, value: str) -> None:
    answer = await face.chat(CHAT, headers=(("x-request-timeout-s", value),))
    assert (answer.status, answer.error["param"]) == (400, "x-request-timeout-s")
    assert face.service.calls == []


async def test_the_session_key_is_the_header_then_the_user(face: Face) -> None:
    body = {**CHAT, "user": "u"}
    await face.chat(body, headers=(("x-session-key", "s-1"),))
    await face.chat(body)
    assert [call.generation.session_key for call in face.service.calls] == ["s-1", "u"]
    strange = await face.chat(body, headers=(("x-session-key", "a b"),))
    assert (strange.status, strange.error["param"]) == (400, "x-session-key")


async def test_models(face: Face) -> None:
    listed = (await face.ask("GET", "/v1/models")).json
    assert [entry["id"] for entry in listed["data"]] == ["m", "org/m"]
    one = await face.ask("GET", "/v1/models/org/m")
    assert one.json["object"] == "model"
    missing = await face.ask("GET", "/v1/models/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_health_and_readiness(face: Face) -> None:
    assert (await face.ask("GET", "/healthz", key=None)).status == 200
    assert (await face.ask("GET", "/readyz", key=None)).status == 200
    face.not_ready.append("no view of the fleet yet")
    answer = await face.ask("GET", "/readyz", key=None)
    assert (answer.status, answer.json["status"]) == (503, "no view of the fleet yet")
    assert (await face.ask("GET", "/healthz", key=None)).status == 200


async def test_many_streams_at_once(face: Face) -> None:
    answers = await asyncio.gather(*[face.chat({**STREAM, "user": f"u{n}"}) for n in range(64)])
    assert all(answer.events[-1] == "[DONE]" for answer in answers)
    assert len({answer.headers["x-request-id"] for answer in answers}) == 64
    assert face.service.running == 0


async def test_one_connection_serves_request_after_request(face: Face) -> None:
    reader, writer = await face.send("/v1/chat/completions", CHAT)
    for _ in range(3):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b" 200 " in head
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        data = json.dumps(CHAT).encode()
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
    writer.close()


# Errors


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.RequestRateExceeded("slow down", retry_after_s=1.5), 429, "rate_limit_exceeded"),
        (errors.NoWorkerAvailable("none", retry_after_s=0.2), 503, "no_worker_available"),
        (errors.PromptTooLong("long", field="chat.messages"), 400, "context_length_exceeded"),
        (errors.ModelNotFound("none", field="model"), 404, "model_not_found"),
        (errors.DeadlineExceeded("late"), 504, "deadline_exceeded"),
        (RuntimeError("secret detail"), 500, "internal"),
    ],
)
async def test_before_the_first_token_an_error_is_a_status(
    face: Face, error: Exception, status: int, code: str, streamed: bool
) -> None:
    face.service.script = failing(error, after=0)
    answer = await face.chat({**CHAT, "stream": streamed})
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.StreamBroken("the worker was lost", retry_after_s=1.0), "stream_broken"),
        (errors.DeadlineExceeded("late"), "deadline_exceeded"),
        (KeyError("secret detail"), "internal"),
    ],
)
async def test_in_the_middle_an_error_is_the_last_frame(face: Face, error: Exception, code: str) -> None:
    face.service.script = failing(error, after=2)
    answer = await face.chat(STREAM)
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == code
    assert "[DONE]" not in answer.events
    assert answer.events[-2]["choices"][0]["delta"] == {"content": "Hel"}
    assert b"secret" not in answer.body


async def test_an_error_of_one_prompt_ends_its_batch(face: Face) -> None:
    async def script(call: Call) -> AsyncGenerator[Event, None]:
        if call.generation.prompt == "bad":
            raise errors.PromptTooLong("too long", field="prompt")
        yield accepted(call)
        await asyncio.sleep(30)

    face.service.script = script
    for streamed in (False, True):
        body = {"model": "m", "prompt": ["good", "bad", "good"], "stream": streamed}
        answer = await face.ask("POST", "/v1/completions", body)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        await asyncio.wait_for(face.service.closed.wait(), 2)
        assert face.service.running == 0


async def test_a_bug_is_an_incident_without_its_text(face: Face, logs: list[Any]) -> None:
    face.service.script = failing(RuntimeError("secret /etc/path"), after=0)
    answer = await face.chat(CHAT)
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    (crashed,) = [entry for entry in logs if entry["event"] == "http.crashed"]
    assert crashed["incident"] in answer.error["message"]


async def test_logs_hold_neither_prompts_nor_outputs_nor_keys(face: Face, logs: list[Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a very private prompt"}]}
    await face.chat(body)
    await face.chat({**body, "n": "x"})
    await face.chat(body, key=KEY[:-1] + "x")
    face.service.script = failing(errors.StreamBroken("lost"), after=2)
    await face.chat({**body, "stream": True})
    assert len(logs) == 3
    for secret in ("private", "Hel", KEY[-20:-2]):
        assert secret not in repr(logs)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"m","messages":' + b"[" * 19_000,
        b'{"model":"m","model":"n","messages":[{"role":"user","content":"x"}]}',
        b'{"model":"\xff","messages":[]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":1' + b"0" * 5000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"unheard_of":1}',
    ],
)
async def test_a_bad_body_is_a_400(face: Face, body: bytes) -> None:
    answer = await face.chat(body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert face.service.calls == []


# Who may come in


def routes(face: Face) -> list[tuple[str, str]]:
    found = []
    for route in face.app.routes:
        assert isinstance(route, Route)
        found += [(method, route.path) for method in sorted(route.methods or ())]
    return found


async def test_every_route_has_a_rule_and_keeps_it(face: Face) -> None:
    rules = {(e.method, e.path): e.access for e in face.app.state.endpoints}
    assert {pair for pair in routes(face) if pair[0] != "HEAD"} == set(rules)
    assert {path for (_, path), access in rules.items() if access is Access.PUBLIC} == {"/healthz", "/readyz"}
    for (method, path), access in rules.items():
        target = path.replace("{model:path}", "m")
        for key, status in ((None, 401), (KEY[:-1] + "x", 401), (ADMIN_KEY, 403)):
            answer = await face.ask(method, target, CHAT if method == "POST" else None, key=key)
            assert answer.status == (200 if access is Access.PUBLIC else status), (method, path)
            if answer.status == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
    assert face.service.calls == []


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/models", (("host", "localhost/healthz"),)),
        ("/v1/models", (("host", "x?"),)),
        ("/v1/models", (("host", "x/healthz?a="), ("x-forwarded-host", "localhost"))),
        ("/v1/models", (("x-original-url", "/healthz"), ("x-rewrite-url", "/healthz"))),
        ("/v1/models?path=/healthz", ()),
        ("/healthz/../v1/models", ()),
        ("/v1/models/../../healthz", ()),
        ("//v1/models", ()),
        ("/v1//models", ()),
        ("/v1/models/", ()),
        ("/healthz/", ()),
        ("/v1/chat/completions/", ()),
        ("/%761/models", ()),
        ("/v1/models%00", ()),
        ("/v1/models;x=/healthz", ()),
        ("http://localhost/healthz/../v1/models", ()),
        ("/docs", ()),
        ("/openapi.json", ()),
        ("/", ()),
    ],
)
async def test_no_spelling_of_a_url_opens_anything(
    face: Face, path: str, headers: tuple[tuple[str, str], ...]
) -> None:
    answer = await face.ask("GET", path, key=None, headers=headers)
    assert answer.status in (400, 401, 404)
    assert "location" not in answer.headers
    assert b"org/m" not in answer.body


async def test_two_authorization_headers_are_none(face: Face) -> None:
    answer = await face.ask("GET", "/v1/models", headers=(("authorization", "Bearer x"),))
    assert answer.status == 400


async def test_the_wrong_method_or_path_has_the_error_shape(face: Face) -> None:
    answer = await face.ask("GET", "/v1/chat/completions")
    assert (answer.status, answer.error["code"]) == (405, None)
    assert answer.headers["x-request-id"].startswith("req_")
    assert (await face.ask("GET", "/v2")).status == 404


async def test_an_unauthenticated_body_is_not_read(face: Face) -> None:
    reader, writer = await face.connect()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\n{")
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


# Identifiers


async def test_the_request_id_is_ours(face: Face) -> None:
    headers = (("x-request-id", "mine-1"),)
    one, two = [await face.chat(CHAT, headers=headers) for _ in range(2)]
    assert one.headers["x-client-request-id"] == "mine-1"
    assert one.headers["x-request-id"] != two.headers["x-request-id"]
    assert [call.received.request_id for call in face.service.calls] == [
        one.headers["x-request-id"],
        two.headers["x-request-id"],
    ]


@pytest.mark.parametrize("value", ["a b", "x" * 129, "<script>", "a\tb", "\xe9"])
async def test_a_strange_client_id_is_not_echoed(face: Face, value: str) -> None:
    answer = await face.chat(CHAT, headers=(("x-request-id", value),))
    assert answer.status == 200
    assert "x-client-request-id" not in answer.headers


# Bodies


async def test_a_large_body_is_refused_by_its_length(face: Face) -> None:
    reader, writer = await face.connect()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        + KEY.encode()
        + b"\r\ncontent-length: 99999999999\r\n\r\n"
    )
    answer = await asyncio.wait_for(read_answer(reader), 5)  # without a byte of it sent; the connection ends
    assert answer.status == 413
    assert answer.headers["connection"] == "close"
    writer.close()


async def test_a_large_chunked_body_is_refused_on_the_way(face: Face) -> None:
    reader, writer = await face.connect()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        + KEY.encode()
        + b"\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    sent = 0
    answer = asyncio.ensure_future(read_answer(reader))
    while not answer.done() and sent < 50 * MAX_BODY:
        writer.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        sent += 0x1000
        await asyncio.sleep(0.005)
    assert (await asyncio.wait_for(answer, 5)).status == 413
    assert sent < 10 * MAX_BODY
    writer.close()


async def test_a_slow_body_is_not_waited_for() -> None:
    async with serving(HttpLimits(MAX_BODY, body_timeout_s=0.2)) as face:
        reader, writer = await face.connect()
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            "content-length: 50\r\n\r\n{".encode()
        )
        answer = await asyncio.wait_for(read_answer(reader), 5)
        assert answer.status == 408
        writer.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((("content-type", "text/plain"),), 415),
        ((("content-type", "application/x-www-form-urlencoded"),), 415),
        ((("content-encoding", "gzip"),), 415),
        ((("content-type", "application/json; charset=utf-8"),), 200),
        ((("content-type", "APPLICATION/JSON"),), 200),
        ((("content-type", "application/json; charset=latin-1"),), 415),
    ],
)
async def test_content_types(face: Face, headers: tuple[tuple[str, str], ...], status: int) -> None:
    assert (await face.chat(CHAT, headers=headers)).status == status


@pytest.mark.parametrize(
    "head",
    [
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 400_000,
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"x-a: b\r\n" * 10_000 + b"\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /healthz?" + b"a" * 400_000,
    ],
)
async def test_a_giant_head_is_refused(face: Face, head: bytes) -> None:
    reader, writer = await face.connect()
    writer.write(head)
    try:
        answer = await asyncio.wait_for(reader.read(), 5)
    except ConnectionResetError:  # what was not read is answered by a reset
        answer = b""
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    assert b" 200 " not in answer
    writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"GET /healthz\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_broken_http_harms_nobody(face: Face, data: bytes) -> None:
    reader, writer = await face.connect()
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b" 200 " not in answer
    assert b" 500 " not in answer
    writer.close()
    assert (await face.ask("GET", "/healthz")).status == 200


async def test_connections_that_say_nothing_are_closed(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http_server._Protocol.head_timeout_s", 0.15)
    mute, _ = await face.connect()
    slow, writer = await face.connect()
    writer.write(b"GET /healthz HTTP/1.1\r\nho")
    for reader in (mute, slow):
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 3)


async def test_connections_are_bounded() -> None:
    async with serving(max_connections=3) as face:
        face.service.script = silent
        held = [await face.send("/v1/chat/completions", STREAM) for _ in range(2)]
        for reader, _ in held:
            await asyncio.wait_for(reader.readline(), 5)
        assert (await face.ask("GET", "/healthz")).status == 503
        for _, writer in held:
            writer.close()


# Clients that leave, lag or wait


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_ends_its_request_at_once(face: Face, streamed: bool) -> None:
    face.service.script = silent
    reader, writer = await face.send("/v1/chat/completions", {**CHAT, "stream": streamed})
    if streamed:
        await asyncio.wait_for(reader.readuntil(b"assistant"), 5)
    await face.service.until_running(1)
    started_s = SystemClock().monotonic_s()
    writer.close()
    await asyncio.wait_for(face.service.closed.wait(), 10)
    assert SystemClock().monotonic_s() - started_s < 4.0, "a heartbeat found it, not the watch"


async def test_a_client_that_resets_ends_its_request(face: Face) -> None:
    face.service.script = silent
    _, writer = await face.send("/v1/chat/completions", STREAM)
    await face.service.until_running(1)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()
    await asyncio.wait_for(face.service.closed.wait(), 2)


async def test_leaving_ends_every_prompt_of_a_batch(face: Face) -> None:
    face.service.script = silent
    _, writer = await face.send("/v1/completions", {"model": "m", "prompt": ["a", "b", "c"], "stream": True})
    await face.service.until_running(3)
    writer.close()
    await asyncio.wait_for(face.service.closed.wait(), 2)
    assert face.service.running == 0


def pause(writer: asyncio.StreamWriter) -> None:
    writer.transport.pause_reading()  # type: ignore[attr-defined]


async def test_a_slow_reader_holds_the_service_back(face: Face) -> None:
    face.service.script = endless
    _, writer = await face.send("/v1/chat/completions", STREAM)
    pause(writer)
    made = -1
    while made != face.service.made:
        made = face.service.made
        await asyncio.sleep(0.3)
    # What the kernel and the server buffer, not more.
    assert 10 < made < 12_000
    assert face.service.running == 1
    writer.close()
    await asyncio.wait_for(face.service.closed.wait(), 2)


async def test_a_reader_that_stays_away_is_cut_off() -> None:
    async with serving(HttpLimits(MAX_BODY, write_timeout_s=0.3)) as face:
        face.service.script = endless
        reader, writer = await face.send("/v1/chat/completions", STREAM)
        pause(writer)
        await asyncio.wait_for(face.service.closed.wait(), 10)
        await asyncio.sleep(0.05)
        assert not face.server.connections  # although what it was sent is still unread
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := await asyncio.wait_for(reader.read(1 << 20), 5):
                received = received[-10:] + data
        # Cut, not ended: a client must not take it for a whole answer.
        assert not received.endswith(b"0\r\n\r\n")


async def test_silence_is_kept_alive_by_comments(face: Face) -> None:
    async def script(call: Call) -> AsyncGenerator[Event, None]:
        yield Heartbeat()  # before it is accepted there is no answer to keep alive
        yield accepted(call)
        yield Heartbeat()
        yield Tokens(0, 0, [1], "Hel")
        yield Heartbeat()
        yield finished(call)

    face.service.script = script
    answer = await face.chat(STREAM)
    assert answer.events.count(": keep-alive") == 2
    assert answer.events[-1] == "[DONE]"


# The server


async def test_a_taken_port_is_named() -> None:
    async with serving() as face:
        other = HttpServer(face.app, "127.0.0.1", face.server.port)
        with pytest.raises(errors.FailedPrecondition, match=f"port {face.server.port} on 127.0.0.1 is taken"):
            await other.start()
        await other.stop(0.1)


async def test_an_address_of_another_machine_is_named(face: Face) -> None:
    with pytest.raises(errors.FailedPrecondition, match="no address of this machine"):
        await HttpServer(face.app, "192.0.2.1", 0).start()


async def test_stopping_lets_answers_end_and_cuts_the_rest() -> None:
    async with serving() as face:
        release = asyncio.Event()

        async def script(call: Call) -> AsyncGenerator[Event, None]:
            yield accepted(call)
            await (release.wait() if call.generation.session_key == "short" else asyncio.sleep(60))
            yield finished(call)

        face.service.script = script
        short, _ = await face.send("/v1/chat/completions", {**STREAM, "user": "short"})
        long, _ = await face.send("/v1/chat/completions", {**STREAM, "user": "long"})
        await face.service.until_running(2)
        stopping = asyncio.ensure_future(face.server.stop(0.5))
        await asyncio.sleep(0.05)
        with pytest.raises(OSError):
            await face.connect()
        release.set()
        assert b"[DONE]" in await asyncio.wait_for(short.read(), 5)
        rest = await asyncio.wait_for(long.read(), 5)
        assert not rest.endswith(b"0\r\n\r\n")  # cut, so that no client takes it for complete
        await asyncio.wait_for(stopping, 5)
        assert face.service.running == 0


async def test_a_stopped_port_is_free_again() -> None:
    async with serving() as face:
        port = face.server.port
    again = HttpServer(face.app, "127.0.0.1", port)
    await again.start()
    await again.stop(0.1)
