"""WebSockets of the OpenAI face: the answers of HTTP, many at once on one connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from services.core.errors import QueueTimeout, StreamBroken
from services.gateway.events import Event
from services.gateway.faces.openai.exchange import HttpLimits
from services.gateway.faces.sockets import face as sockets
from tests.integration.openai.face import (
    ADMIN_KEY,
    CHAT,
    KEY,
    MAX_BODY,
    STREAM,
    Call,
    Face,
    accepted,
    begun,
    endless,
    failing,
    finished,
    limited,
    plain,
    rejected,
    serving,
    silent,
)
from tests.support.socket_client import closed, opened, received, request, until_over

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**STREAM, "n": 2, "stream_options": {"include_usage": True}}),
    "completions": ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "stream": True, "logprobs": 1}),
    "responses": ("/v1/responses", {"model": "m", "input": "hi", "stream": True, "store": False}),
    "messages": ("/v1/messages", {**STREAM, "max_tokens": 9}),
}


def url(face: Face) -> str:
    return f"http://127.0.0.1:{face.server.port}"


def alike(text: str, request_id: str) -> str:
    """Return an event without what differs between two requests: ids and times."""
    frame = json.loads(text.replace(request_id, "ID")) if text.startswith("{") else text
    if isinstance(frame, dict):
        for part in (frame, frame.get("response", {})):
            part.update({name: 0 for name in ("created", "created_at", "completed_at") if name in part})
    return json.dumps(frame)


@pytest.mark.parametrize("form", FORMS)
async def test_a_request_has_the_events_that_it_has_over_http(face: Face, form: str) -> None:
    path, body = FORMS[form]
    answer = await face.ask("POST", path, body)
    expected = []
    for frame in answer.body.decode().split("\n\n")[:-1]:
        fields = dict(line.partition(": ")[::2] for line in frame.split("\n"))
        event = alike(fields["data"], answer.headers["x-request-id"])
        expected.append((fields.get("event"), event))
    async with opened(url(face), KEY) as socket:
        await socket.send(request("a", body, path=path))
        started, *events, end = await until_over(socket, "a")
    assert (started["type"], end) == ("started", {"type": "end", "id": "a", "complete": True})
    request_id = started["headers"]["x-request-id"]
    found = []
    for each in events:
        data = each["data"]
        text = data if isinstance(data, str) else json.dumps(data)
        found.append((each.get("event"), alike(text, request_id)))
    assert found == expected
    assert len(found) > 3
    assert [call.received.face for call in face.service.calls[-1:]] == ["websocket"]


async def test_a_whole_answer_and_an_error_have_status_headers_and_body_of_http(face: Face) -> None:
    async with opened(url(face), KEY) as socket:
        face.service.script = limited
        await socket.send(request("a", CHAT, x_request_id="mine"))
        (answer,) = await until_over(socket, "a")
        assert (answer["type"], answer["status"]) == ("answer", 200)
        assert answer["data"]["choices"][0]["message"]["content"] == "Hel"
        assert answer["headers"]["x-client-request-id"] == "mine"
        assert answer["headers"]["x-ratelimit-limit-requests"] == "600"
        for script, status, code in (
            (rejected, 429, "token_rate_exceeded"),
            (failing(QueueTimeout("no place", retry_after_s=2.5), after=1), 503, "queue_timeout"),
        ):
            face.service.script = script
            over_http = await face.chat(STREAM)
            await socket.send(request("b", STREAM))
            (answer,) = await until_over(socket, "b")
            assert (answer["status"], over_http.status) == (status, status)
            assert answer["data"] == over_http.json
            assert answer["headers"]["retry-after"] == over_http.headers["retry-after"], code
        await socket.send(request("c", {**STREAM, "suffix": "x"}))
        (answer,) = await until_over(socket, "c")
        assert (answer["status"], answer["data"]) == (400, (await face.chat({**STREAM, "suffix": "x"})).json)
        face.service.script = failing(StreamBroken("lost"), after=2)
        await socket.send(request("d", STREAM))
        found = await until_over(socket, "d")
        assert found[-2]["data"]["error"]["code"] == "stream_broken"
        assert found[-1]["complete"]


async def test_requests_run_at_once_and_a_cancelled_one_ends_alone(face: Face) -> None:
    async def script(call: Call) -> AsyncGenerator[Event, None]:
        async for event in (begun if call.generation.session_key == "never" else plain)(call):
            yield event

    face.service.script = script
    async with opened(url(face), KEY) as socket:
        await socket.send(request("never", {**STREAM, "user": "never"}))
        await face.service.until_running(1)
        for number in range(3):
            await socket.send(request(f"short{number}", STREAM))
        ends: list[str] = []
        while len(ends) < 3:
            message = await received(socket)
            ends += [message["id"]] if message["type"] == "end" else []
        assert sorted(ends) == ["short0", "short1", "short2"]
        assert face.service.running == 1
        await socket.send(json.dumps({"type": "cancel", "id": "unknown"}))
        await socket.send(json.dumps({"type": "cancel", "id": "never"}))
        found = await until_over(socket, "never")
        assert found[-1] == {"type": "end", "id": "never", "complete": False}
        assert face.service.running == 0
        await socket.send(request("never", STREAM))  # its id is free
        assert (await until_over(socket, "never"))[-1]["complete"]


async def test_a_client_that_leaves_ends_its_requests(face: Face) -> None:
    face.service.script = silent
    async with opened(url(face), KEY) as socket:
        for number in range(4):
            await socket.send(request(f"r{number}", STREAM))
        await face.service.until_running(4)
        socket.transport.abort()
    async with asyncio.timeout(30):
        await face.service.closed.wait()
        while face.server.connections:
            await asyncio.sleep(0.01)
    face.server.table.check_integrity()


async def test_one_request_more_than_may_run_is_told_to_wait(face: Face) -> None:
    face.service.script = silent
    async with opened(url(face), KEY) as socket:
        for number in range(sockets.MAX_REQUESTS + 1):
            await socket.send(request(f"r{number}", STREAM))
        answer = await received(socket)
        assert (answer["id"], answer["status"]) == (f"r{sockets.MAX_REQUESTS}", 429)
        assert answer["headers"]["retry-after"] == "1"
        await face.service.until_running(sockets.MAX_REQUESTS)
        await socket.send(json.dumps({"type": "cancel", "id": "r0"}))
        assert (await until_over(socket, "r0"))[-1]["type"] == "end"
        face.service.script = limited
        await socket.send(request("again", CHAT))
        assert (await until_over(socket, "again"))[-1]["status"] == 200


async def test_a_client_that_does_not_read_holds_the_service_back_and_is_cut() -> None:
    async with serving(HttpLimits(MAX_BODY, write_timeout_s=2.0)) as face:
        face.service.script = endless
        async with opened(url(face), KEY, max_queue=1) as socket:
            for number in range(4):
                await socket.send(request(f"r{number}", STREAM))
            await face.service.until_running(4)
            made = -1
            while made != face.service.made:
                made = face.service.made
                await asyncio.sleep(0.3)
            assert face.service.running == 4
            assert made < 20_000  # of 1000 characters: what sockets' buffers take, no more
            async with asyncio.timeout(10):
                await face.service.closed.wait()
                while face.server.connections:
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"key": None}, 401),
        ({"key": KEY[:-1] + "x"}, 401),
        ({"key": ADMIN_KEY}, 403),
        ({"subprotocols": ["fairway.v1", f"fairway.key.{KEY[:-1]}x"]}, 401),
        ({"subprotocols": ["fairway.v1", f"fairway.key.{ADMIN_KEY}"]}, 403),
        ({"subprotocols": ["fairway.v1"]}, 401),
        ({"subprotocols": ["chat", f"fairway.key.{KEY}"]}, 400),
        ({"key": KEY, "subprotocols": ["fairway.v1", f"fairway.key.{KEY}"]}, 400),
        ({"key": KEY, "origin": "https://evil.example"}, 403),
        ({"key": KEY, "origin": "null"}, 403),
    ],
)
async def test_who_may_not_open_a_socket(face: Face, options: Any, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused:
        async with opened(url(face), options.pop("key", None), **options):
            pass
    answer = refused.value.response
    assert answer.status_code == status
    assert json.loads(answer.body)["error"]["message"]
    assert KEY not in str(answer.headers)


async def test_a_page_of_an_origin_in_the_setting_opens_one_with_its_key_as_a_subprotocol() -> None:
    async with serving(cors_origins=["https://app.example"]) as face:
        offered: Any = ["fairway.v1", f"fairway.key.{KEY}"]
        page: Any = "https://app.example"
        async with opened(url(face), subprotocols=offered, origin=page) as socket:
            assert socket.subprotocol == "fairway.v1"
            assert socket.response is not None
            assert KEY not in str(socket.response.headers)
            await socket.send(request("a", STREAM))
            assert (await until_over(socket, "a"))[-1]["complete"]
        with pytest.raises(InvalidStatus):
            async with opened(url(face), subprotocols=offered, origin="https://other.example"):
                pass


async def test_a_stopping_server_ends_sockets_when_their_requests_have_ended(face: Face) -> None:
    release = asyncio.Event()

    async def script(call: Call) -> AsyncGenerator[Event, None]:
        yield accepted(call)
        await release.wait()
        yield finished(call)

    face.service.script = script
    async with opened(url(face), KEY) as idle, opened(url(face), KEY) as busy:
        await busy.send(request("a", STREAM))
        await face.service.until_running(1)
        face.server.drain()
        code, reason = await closed(idle)
        assert (code, reason) == (1012, "shutting down: connect again after 1 s")
        assert busy.close_code is None
        with pytest.raises(InvalidStatus) as refused:
            # Its port is still open: load balancers take seconds.
            async with opened(url(face), KEY):
                pass
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
        release.set()
        assert (await until_over(busy, "a"))[-1]["complete"]
        assert (await closed(busy))[0] == 1012


async def test_a_socket_without_a_request_is_closed() -> None:
    async with serving(HttpLimits(MAX_BODY, socket_idle_s=1.0)) as face:
        face.service.script = begun
        async with opened(url(face), KEY) as idle, opened(url(face), KEY) as busy:
            await busy.send(request("a", STREAM))
            assert await closed(idle) == (1000, "no request for 1 s")
            await asyncio.sleep(0.2)
            assert busy.close_code is None
            await busy.send(json.dumps({"type": "cancel", "id": "a"}))
            assert await closed(busy) == (1000, "no request for 1 s")
