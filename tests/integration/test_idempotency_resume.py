"""A client whose stream broke continues behind its last event, on any gateway, without repetition or gap."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from tests.support.keyed_faces import Faces, keyed_faces
from tests.support.keyed_gateways import token

CUTS = 20  # of each form
MESSAGES = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 24}
CHAT = {**MESSAGES, "seed": 7}
TEXT = {"model": "m", "prompt": "hello", "stream": True, "max_tokens": 24, "seed": 7}
RESPONSE = {"model": "m", "input": "hi", "stream": True, "max_output_tokens": 24, "seed": 7}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat n=2 usage": (
        "/v1/chat/completions",
        {**CHAT, "n": 2, "stream_options": {"include_usage": True}, "temperature": 1.0},
    ),
    "chat logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    "completions logprobs": ("/v1/completions", {**TEXT, "logprobs": 1, "temperature": 0}),
    "prompts n=2": ("/v1/completions", {**TEXT, "prompt": ["one", "three"], "n": 2, "max_tokens": 9}),
    "messages": ("/v1/messages", MESSAGES),
    "responses": ("/v1/responses", {**RESPONSE, "store": False}),
    "stored responses": ("/v1/responses", RESPONSE),
}
ONE_OF_EACH = ("chat", "messages", "stored responses")
# The last events of streams without [DONE], and what differs between two answers of the same output.
LAST = ("message_stop", "response.incomplete")
OWN = ("sequence_number", "created_at", "completed_at")


@dataclass
class EventSource:
    """Receives a stream as the WHATWG rules say, over several connections."""

    path: str
    body: dict[str, Any]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    last_id: str = ""
    events: list[bytes] = field(default_factory=list)
    status: int = 0
    answer: bytes = b""

    async def read(self, url: str, most: int | None = None) -> None:
        """Read an answer, or its first ``most`` events before the connection is cut."""
        data = json.dumps(self.body).encode()
        head = [
            f"POST {self.path} HTTP/1.1",
            "host: a",
            "authorization: Bearer key",
            "content-type: application/json",
            f"content-length: {len(data)}",
        ]
        head += [f"idempotency-key: {self.key}"] if self.key else []
        head += [f"last-event-id: {self.last_id}"] if self.last_id else []
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
        try:
            writer.write("\r\n".join([*head, "connection: close", "", ""]).encode() + data)
            started = await reader.readuntil(b"\r\n\r\n")
            self.status = int(started.split()[1])
            if b"text/event-stream" not in started:
                self.answer = await reader.read()
                return
            seen, received, event_id = 0, b"", self.last_id
            while most is None or seen < most:
                size = int(await reader.readline(), 16)
                received += (await reader.readexactly(size + 2))[:-2]
                while b"\n\n" in received and (most is None or seen < most):
                    event, _, received = received.partition(b"\n\n")
                    for line in event.split(b"\n"):
                        name, _, value = line.partition(b": ")
                        if name == b"id":
                            event_id = value.decode()
                        elif name == b"data":
                            self.events.append(value)
                            self.last_id = event_id
                            seen += 1
                if not size:
                    return
        finally:
            writer.close()

    def joined(self) -> dict[Any, Any]:
        """Return per choice its text and entries, and how often each frame came; see ``joined_events``."""
        if self.path in ("/v1/messages", "/v1/responses"):
            return joined_events(self.events)
        found: dict[Any, Any] = {"usage": [], "done": 0, "ids": set()}
        for event in self.events:
            if event == b"[DONE]":
                found["done"] += 1
                continue
            frame = json.loads(event)
            assert "error" not in frame, frame
            found["ids"].add(frame["id"])
            found["usage"] += [frame["usage"]] if frame.get("usage") else []
            for choice in frame["choices"]:
                into = found.setdefault(
                    choice["index"], {"text": "", "roles": 0, "ends": [], "entries": [], "offsets": []}
                )
                delta = choice.get("delta", {})
                into["text"] += delta.get("content", "") + choice.get("text", "")
                into["roles"] += "role" in delta
                into["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
                logprobs = choice.get("logprobs") or {}
                into["entries"] += logprobs.get("content", []) + logprobs.get("tokens", [])
                into["offsets"] += logprobs.get("text_offset", [])
        found["ids"] = len(found["ids"])
        return found


def joined_events(events: list[bytes]) -> dict[Any, Any]:
    """Return typed events without what is an answer's own, the deltas of a block put together."""
    first = json.loads(events[0])
    name = (first.get("message") or first["response"])["id"].partition("_")[2]
    found: list[Any] = []
    for event in events:
        frame = json.loads(event.replace(name.encode(), b"ID"), object_pairs_hook=_without_own)
        assert frame["type"] not in ("error", "response.failed"), frame
        kind = frame["type"]
        if kind == "content_block_delta" or (kind.startswith("response.") and kind.endswith(".delta")):
            last, text = found[-1], frame.pop("delta")
            text = text["text"] if isinstance(text, dict) else text
            if last[0] == frame:
                found[-1] = (frame, last[1] + text)
                continue
            found.append((frame, text))
        else:
            found.append((frame, ""))
    return {"events": found, "done": sum(frame["type"] in LAST for frame, _ in found)}


def _without_own(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name not in OWN}


@pytest_asyncio.fixture
async def faces(redis_url: str) -> AsyncIterator[Faces]:
    async with keyed_faces(redis_url) as found:
        yield found


@pytest.mark.parametrize("form", FORMS)
async def test_cut_streams_are_whole(faces: Faces, form: str) -> None:
    """Each is cut one to four times, while it runs and after it ended, and goes on at a drawn gateway."""
    path, body = FORMS[form]
    whole = EventSource(path, body)
    await whole.read(faces.urls[0])
    expected = whole.joined()
    assert expected["done"] == 1
    rng = Random(form)
    resumed_late = 0
    for number in range(CUTS):
        faces.fleet.step_s = rng.choice([0.0005, 0.002])
        source = EventSource(path, body)
        for _ in range(rng.randint(1, 4)):
            await source.read(rng.choice(faces.urls), rng.randint(1, max(1, len(whole.events) // 2)))
            if rng.random() < 0.2:
                await asyncio.sleep(0.08)  # it may end meanwhile
                resumed_late += 1
        await source.read(rng.choice(faces.urls))
        assert source.status == 200
        again = EventSource(path, body, source.key)
        await again.read(rng.choice(faces.urls))
        assert source.joined() == again.joined(), number
        assert "seed" not in body or source.joined() == expected, number
    assert resumed_late


@pytest.mark.parametrize("form", FORMS)
async def test_an_answer_that_was_received_whole_has_nothing_left(faces: Faces, form: str) -> None:
    source = EventSource(*FORMS[form])
    await source.read(faces.urls[0])
    count = len(source.events)
    await source.read(faces.urls[1])
    assert (source.status, len(source.events)) == (200, count)


@pytest.mark.parametrize("form", ONE_OF_EACH)
async def test_without_a_key_events_have_no_ids(faces: Faces, form: str) -> None:
    source = EventSource(*FORMS[form], key="")
    await source.read(faces.urls[0])
    assert source.joined()["done"] == 1
    assert source.last_id == ""


@pytest.mark.parametrize("form", ONE_OF_EACH)
async def test_an_id_that_is_not_of_the_request_is_refused_by_name(faces: Faces, form: str) -> None:
    path, body = FORMS[form]
    source = EventSource(path, body)
    await source.read(faces.urls[0], 3)
    mine = source.last_id
    computed = faces.fleet.engine_tokens
    changed = mine[:-3] + ("A" if mine[-3] != "A" else "B") + mine[-2:]
    flipped = ("A" if mine[0] != "A" else "B") + mine[1:]
    for key, event_id, asked in (
        (source.key, "x", body),
        (source.key, changed, body),
        (source.key, flipped, body),
        (source.key, mine + "AAAA", body),
        (source.key, "\u00fc", body),
        (source.key, "A" * 20_000, body),
        ("another", mine, body),
        ("", mine, body),
        (source.key, mine, {**body, "stream": False}),
        *([(source.key, mine, {**body, "n": 2})] if form == "chat" else []),
    ):
        other = EventSource(path, asked, key, event_id)
        await other.read(faces.urls[1])
        assert other.status == 400, event_id
        assert param_of(other) == "last-event-id"
    assert faces.fleet.engine_tokens <= computed + 24
    bound = "max_output_tokens" if "responses" in form else "max_tokens"
    other = EventSource(path, {**body, bound: 23}, source.key, mine)
    await other.read(faces.urls[1])
    assert other.status == 409


def param_of(source: EventSource) -> str:
    """Return the field that an error names."""
    error = json.loads(source.answer)["error"]
    found: str = error.get("details", error)["param"]
    return found


async def test_an_id_is_of_one_route(faces: Faces) -> None:
    """Two routes may have the same generation under a key: the ids of their events are not exchanged."""
    source = EventSource("/v1/chat/completions", MESSAGES)
    await source.read(faces.urls[0], 3)
    other = EventSource("/v1/messages", MESSAGES, source.key, source.last_id)
    await other.read(faces.urls[0])
    assert (other.status, param_of(other)) == (400, "last-event-id")


async def test_a_response_in_the_background_continues_by_its_id(faces: Faces) -> None:
    body = {**RESPONSE, "background": True}
    source = EventSource("/v1/responses", body)
    await source.read(faces.urls[0], 3)
    await source.read(faces.urls[0])
    assert (source.status, param_of(source)) == (400, "last-event-id")
    assert "GET" in json.loads(source.answer)["error"]["message"]


@pytest.mark.parametrize("form", ONE_OF_EACH)
async def test_a_key_that_is_free_again_is_not_continued(faces: Faces, redis_url: str, form: str) -> None:
    """Its record is gone, so what the client has is of another request; the new one ends at once."""
    source = EventSource(*FORMS[form])
    await source.read(faces.urls[0])
    await faces.gateways[0].at_rest()
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        names = [name async for name in client.scan_iter(match=f"fw:{{{faces.fleet.tenant}}}:idem*")]
        await client.delete(*names)
    faces.fleet.hold_at = 2
    await source.read(faces.urls[1])
    assert source.status == 400
    assert param_of(source) == "last-event-id"
    await faces.gateways[1].at_rest(15.0)


@pytest.mark.parametrize("form", ONE_OF_EACH)
@pytest.mark.parametrize("diverge", [False, True])
async def test_a_client_is_ahead_of_the_record_of_a_dead_gateway(
    faces: Faces, diverge: bool, form: str
) -> None:
    path, body = FORMS[form]
    source = EventSource(path, body)
    faces.fleet.step_s = 0.01
    await source.read(faces.urls[0], 11)
    received = [*source.events]
    await faces.gateways[0].supervisor.close()
    faces.fleet.diverge = diverge
    await asyncio.sleep(1.1)  # the lease
    await source.read(faces.urls[1])
    if not diverge:
        again = EventSource(path, body, source.key)
        await again.read(faces.urls[1])
        assert source.joined() == again.joined()
        if form == "chat":
            text = "".join(f"{token(7, 0, position)} " for position in range(24))
            assert source.joined()[0]["text"] == text
        return
    # Nothing was sent on this connection yet, so the answer is an error and no stream with one.
    assert source.status == 503
    assert b"stream_broken" in source.answer
    assert source.events == received, "output of another run was sent behind what the client had"
