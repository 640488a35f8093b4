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
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 24}
TEXT = {"model": "m", "prompt": "hello", "stream": True, "max_tokens": 24}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat n=2 usage": (
        "/v1/chat/completions",
        {**CHAT, "n": 2, "stream_options": {"include_usage": True}, "temperature": 1.0},
    ),
    "chat logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    "completions logprobs": ("/v1/completions", {**TEXT, "logprobs": 1, "temperature": 0}),
    "prompts n=2": ("/v1/completions", {**TEXT, "prompt": ["one", "three"], "n": 2, "max_tokens": 9}),
}


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
        """Return per choice its text and entries, and how often each frame came."""
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


@pytest_asyncio.fixture
async def faces(redis_url: str) -> AsyncIterator[Faces]:
    async with keyed_faces(redis_url) as found:
        yield found


@pytest.mark.parametrize("form", FORMS)
async def test_cut_streams_are_whole(faces: Faces, form: str) -> None:
    """Each is cut one to four times, while it runs and after it ended, and goes on at a drawn gateway."""
    path, body = FORMS[form]
    body = {**body, "seed": 7}
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
        assert source.joined() == expected, number
    assert resumed_late


async def test_an_answer_that_was_received_whole_has_nothing_left(faces: Faces) -> None:
    source = EventSource(*FORMS["chat"])
    await source.read(faces.urls[0])
    count = len(source.events)
    await source.read(faces.urls[1])
    assert (source.status, len(source.events)) == (200, count)


async def test_without_a_key_events_have_no_ids(faces: Faces) -> None:
    source = EventSource(*FORMS["chat"], key="")
    await source.read(faces.urls[0])
    assert source.events[-1] == b"[DONE]"
    assert source.last_id == ""


async def test_an_id_that_is_not_of_the_request_is_refused_by_name(faces: Faces) -> None:
    path, body = FORMS["chat"]
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
        (source.key, mine, {**body, "n": 2}),
    ):
        other = EventSource(path, asked, key, event_id)
        await other.read(faces.urls[1])
        assert other.status == 400, event_id
        assert json.loads(other.answer)["error"]["param"] == "last-event-id"
    assert faces.fleet.engine_tokens <= computed + 24
    other = EventSource(path, {**body, "max_tokens": 23}, source.key, mine)
    await other.read(faces.urls[1])
    assert other.status == 409


async def test_a_key_that_is_free_again_is_not_continued(faces: Faces, redis_url: str) -> None:
    """Its record is gone, so what the client has is of another request; the new one ends at once."""
    source = EventSource(*FORMS["chat"])
    await source.read(faces.urls[0])
    await faces.gateways[0].at_rest()
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        names = [name async for name in client.scan_iter(match=f"fw:{{{faces.fleet.tenant}}}:idem*")]
        await client.delete(*names)
    faces.fleet.hold_at = 2
    await source.read(faces.urls[1])
    assert source.status == 400
    assert json.loads(source.answer)["error"]["param"] == "last-event-id"
    await faces.gateways[1].at_rest(2.0)


@pytest.mark.parametrize("diverge", [False, True])
async def test_a_client_is_ahead_of_the_record_of_a_dead_gateway(faces: Faces, diverge: bool) -> None:
    path, body = FORMS["chat"]
    source = EventSource(path, {**body, "seed": 7})
    faces.fleet.step_s = 0.01
    await source.read(faces.urls[0], 11)
    await faces.gateways[0].supervisor.close()
    text = "".join(f"{token(7, 0, position)} " for position in range(24))
    faces.fleet.diverge = diverge
    await asyncio.sleep(1.1)  # the lease
    await source.read(faces.urls[1])
    if not diverge:
        assert source.joined()[0]["text"] == text
        return
    # Nothing was sent on this connection yet, so the answer is an error and no stream with one.
    assert source.status == 503
    assert json.loads(source.answer)["error"]["code"] == "stream_broken"
    received = [json.loads(event) for event in source.events[:-1]]
    sent = "".join(choice["delta"].get("content", "") for each in received for choice in each["choices"])
    assert text.startswith(sent), "output of another run was sent behind what the client had"
