"""A request with an idempotency key over WebSockets: its events and ids are those of SSE, on any gateway."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.test_idempotency_resume import FORMS, EventSource
from tests.support.keyed_faces import Faces, keyed_faces
from tests.support.keyed_gateways import token
from tests.support.metered import charged
from tests.support.socket_client import opened, received, request, until_over

CUTS = 12  # of each form


class SocketSource(EventSource):
    """Receives the same over WebSockets; `ids` are those of its events."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        super().__init__(path, body)
        self.ids: list[str] = []

    async def read(self, url: str, most: int | None = None) -> None:
        headers = {"idempotency_key": self.key}
        if self.last_id:
            headers["last_event_id"] = self.last_id
        async with opened(url, "key") as socket:
            await socket.send(request("a", self.body, path=self.path, **headers))
            seen = 0
            while most is None or seen < most:
                message = await received(socket)
                if message["type"] == "started":
                    self.status = 200
                elif message["type"] == "event":
                    data = message["data"]
                    self.events.append(data.encode() if isinstance(data, str) else json.dumps(data).encode())
                    self.last_id = message["event_id"]
                    self.ids.append(self.last_id)
                    seen += 1
                else:
                    self.status = message.get("status", 200)
                    assert message.get("complete", True)
                    return
            socket.transport.abort()


@pytest_asyncio.fixture
async def faces(redis_url: str) -> AsyncIterator[Faces]:
    async with keyed_faces(redis_url) as found:
        yield found


async def ids_over_http(faces: Faces, source: EventSource) -> list[tuple[str, Any]]:
    status, _, answer = await faces.post(1, source.path, source.body, source.key)
    assert status == 200
    found = []
    for frame in answer.decode().split("\n\n")[:-1]:
        fields = dict(line.partition(": ")[::2] for line in frame.split("\n"))
        data = fields["data"]
        found.append((fields["id"], json.loads(data) if data.startswith("{") else data))
    return found


@pytest.mark.parametrize("form", FORMS)
async def test_cut_sockets_are_whole(faces: Faces, form: str) -> None:
    """Each request is cut one to four times and continued by a drawn protocol at a drawn gateway."""
    path, body = FORMS[form]
    whole = SocketSource(path, body)
    await whole.read(faces.urls[0])
    expected = whole.joined()
    assert expected["done"] == 1
    once = (await charged(faces.gateways[0].limiter, faces.fleet.tenant)).output_tokens
    rng = Random(form)
    for number in range(CUTS):
        faces.fleet.step_s = rng.choice([0.0005, 0.002])
        source = SocketSource(path, body)
        for _ in range(rng.randint(1, 4)):
            read = SocketSource.read if rng.random() < 0.7 else EventSource.read
            await read(source, rng.choice(faces.urls), rng.randint(1, max(1, len(whole.events) // 2)))
        await source.read(rng.choice(faces.urls))
        assert source.status == 200
        again = SocketSource(path, body)
        again.key = source.key
        await again.read(rng.choice(faces.urls))
        assert source.joined() == again.joined(), number
        assert "seed" not in body or source.joined() == expected, number
    for gateway in faces.gateways:
        await gateway.at_rest()
    total = (await charged(faces.gateways[0].limiter, faces.fleet.tenant)).output_tokens
    assert total == once * (CUTS + 1)


async def test_a_replay_over_http_has_the_ids_of_the_socket(faces: Faces) -> None:
    """A stream and its replay differ in how tokens are put together; two replays do not."""
    path, body = FORMS["chat n=2 usage"]
    source = SocketSource(path, body)
    await source.read(faces.urls[0])
    await faces.gateways[0].at_rest()
    again = SocketSource(path, source.body)
    again.key = source.key
    await again.read(faces.urls[0])
    events = [json.loads(each) if each.startswith(b"{") else each.decode() for each in again.events]
    assert list(zip(again.ids, events, strict=True)) == await ids_over_http(faces, source)
    assert len(again.ids) > 6


async def test_a_request_of_a_dead_gateway_continues_on_another(faces: Faces) -> None:
    path, body = FORMS["chat"]
    source = SocketSource(path, body)
    faces.fleet.step_s = 0.01
    await source.read(faces.urls[0], 11)
    await faces.gateways[0].supervisor.close()
    await asyncio.sleep(1.1)  # the lease
    await source.read(faces.urls[1])
    assert source.joined()[0]["text"] == "".join(f"{token(7, 0, position)} " for position in range(24))
    await faces.gateways[1].at_rest()
    assert (await charged(faces.gateways[1].limiter, faces.fleet.tenant)).output_tokens == 24


@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
async def test_a_cancel_withdraws_and_a_broken_socket_does_not(faces: Faces, form: str) -> None:
    path, body = {
        "chat": FORMS["chat"],
        "responses": ("/v1/responses", {"model": "m", "input": "hi", "stream": True, "store": False}),
        "messages": FORMS["messages"],
    }[form]
    faces.fleet.hold_at = 4
    for cancels in (True, False):
        workers = faces.gateways[0].workers
        begun = len(workers.started)
        async with opened(faces.urls[0], "key") as socket:
            await socket.send(request("a", body, path=path, idempotency_key=uuid.uuid4().hex))
            while (message := await received(socket))["type"] != "event" or "delta" not in str(message):
                pass
            (running,) = workers.started[begun:]
            if cancels:
                await socket.send(json.dumps({"type": "cancel", "id": "a"}))
                assert (await until_over(socket, "a"))[-1]["complete"] is False
                await faces.gateways[0].at_rest()
            else:
                socket.transport.abort()
                await asyncio.sleep(0.3)
            assert running.live is not cancels
    faces.fleet.hold.set()
    await faces.gateways[0].at_rest()


async def test_ids_of_another_request_are_refused(faces: Faces) -> None:
    path, body = FORMS["chat"]
    source = SocketSource(path, body)
    await source.read(faces.urls[0], 3)
    async with opened(faces.urls[1], "key") as socket:
        for key, event_id in ((source.key, "x"), ("another", source.last_id)):
            headers = {"idempotency_key": key, "last_event_id": event_id}
            await socket.send(request("a", body, path=path, **headers))
            (answer,) = await until_over(socket, "a")
            assert (answer["status"], answer["data"]["error"]["param"]) == (400, "last-event-id")
