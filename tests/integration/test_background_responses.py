"""Responses in the background on two gateways: seen, streamed, cancelled and taken over by either."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fairway.v1 import inference_pb2 as pb
from services.core import errors
from tests.support.keyed_faces import AUTH, Faces, keyed_faces
from tests.support.keyed_gateways import token
from tests.support.waiting import until

PATH = "/v1/responses"
BODY = {"model": "m", "input": "hi", "max_output_tokens": 12, "background": True}
TIMEOUT_S = 60


@pytest_asyncio.fixture
async def faces(redis_url: str) -> AsyncIterator[Faces]:
    async with keyed_faces(redis_url) as found:
        yield found


async def create(faces: Faces, *keys: str, gateway: int = 0, **fields: Any) -> Any:
    status, _, body = await faces.post(gateway, PATH, {**BODY, **fields}, *keys)
    assert status == 200, body
    return json.loads(body)


async def get(faces: Faces, gateway: int, response_id: str) -> Any:
    status, _, body = await faces.ask(gateway, "GET", f"{PATH}/{response_id}")
    assert status == 200, body
    return json.loads(body)


async def ended(faces: Faces, gateway: int, response_id: str) -> Any:
    """Poll as clients do."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            found = await get(faces, gateway, response_id)
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.05)


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def whole_text(seed: int) -> str:
    return "".join(f"{token(seed, 0, position)} " for position in range(12))


async def recorded(faces: Faces) -> None:
    """Return once the record of the first gateway's run has its output so far."""
    (owned,) = faces.gateways[0].keyed.owned()
    await until(lambda: owned._quiet.is_set() and not owned.due(0.0))


async def lose(faces: Faces, gateway: int) -> None:
    """End a gateway without a word to the stores, and wait until its leases are over."""
    lost = faces.gateways[gateway]
    keys = [ownership.hold.key for ownership in lost.keyed.owned()]
    await lost.supervisor.close()
    async with asyncio.timeout(TIMEOUT_S):
        for key in keys:
            while (await faces.gateways[1 - gateway].store.read(key, 0, watch=False)).state == "running":
                await asyncio.sleep(0.05)


async def test_every_gateway_has_the_answer_of_one_run(faces: Faces) -> None:
    made = await create(faces, seed=3)
    first, second = await asyncio.gather(ended(faces, 0, made["id"]), ended(faces, 1, made["id"]))
    assert first == second
    assert (first["status"], text_of(first)) == ("incomplete", whole_text(3))
    assert faces.fleet.engine_tokens == 12


async def test_a_lost_gateways_run_is_continued_by_its_reader(faces: Faces) -> None:
    faces.fleet.hold_at = 5
    made = await create(faces, seed=3)
    await until(lambda: faces.fleet.engine_tokens == 5)
    await recorded(faces)
    await lose(faces, 0)
    faces.fleet.hold.set()
    found = await ended(faces, 1, made["id"])
    assert text_of(found) == whole_text(3)
    assert 12 <= faces.fleet.engine_tokens <= 14, "continued, not run again"
    assert len(faces.gateways[1].workers.started) == 1
    assert faces.gateways[1].workers.started[0].spec.produced_ids


async def test_a_stream_of_a_lost_gateway_goes_on_at_another(faces: Faces) -> None:
    faces.fleet.hold_at = 5
    made = await create(faces, seed=3)
    await until(lambda: faces.fleet.engine_tokens == 5)
    await recorded(faces)
    await lose(faces, 0)
    faces.fleet.hold.set()
    _, _, whole = await faces.ask(1, "GET", f"{PATH}/{made['id']}?stream=true")
    _, _, rest = await faces.ask(1, "GET", f"{PATH}/{made['id']}?stream=true&starting_after=9")
    deltas = "".join(_deltas(whole))
    assert deltas == whole_text(3)
    # Four events precede the text, so that the number 9 is its sixth character.
    assert "".join(_deltas(rest)) == deltas[6:]


async def test_what_ended_before_it_was_stored_is_stored_by_its_reader(faces: Faces) -> None:
    """The run ends under its key for a client's stream, and nothing stores its answer."""
    faces.fleet.hold_at = 5
    streamed = asyncio.create_task(faces.post(0, PATH, {**BODY, "stream": True, "seed": 3}))
    await until(lambda: faces.fleet.engine_tokens == 5)
    (driver,) = (task for task in asyncio.all_tasks() if task.get_name().startswith("response resp_"))
    response_id = driver.get_name().removeprefix("response ")
    driver.cancel()
    faces.fleet.hold.set()
    _, _, whole = await streamed
    found = await ended(faces, 1, response_id)
    assert text_of(found) == "".join(_deltas(whole)) == whole_text(3)
    assert faces.fleet.engine_tokens == 12, "never twice"


async def test_either_gateway_cancels(faces: Faces) -> None:
    faces.fleet.hold_at = 5
    made = await create(faces)
    await until(lambda: faces.fleet.engine_tokens == 5)
    status, _, body = await faces.ask(1, "POST", f"{PATH}/{made['id']}/cancel")
    assert (status, json.loads(body)["status"]) == (200, "cancelled")
    await faces.gateways[0].at_rest()
    assert not faces.gateways[0].workers.started[0].live
    faces.fleet.hold.set()
    for gateway in (0, 1):
        assert (await get(faces, gateway, made["id"]))["status"] == "cancelled"
    assert faces.fleet.engine_tokens == 5, "it does not run again"


@pytest.mark.parametrize("action", ["cancel", "delete"])
@pytest.mark.parametrize(("reader", "other"), [(0, 0), (0, 1), (1, 0)])
async def test_what_is_streamed_ends_too(faces: Faces, reader: int, other: int, action: str) -> None:
    """Gateway 0 runs it. Its reader keeps it alive no longer than the grace, which is longer than this."""
    faces.fleet.hold_at = 5
    made = await create(faces, seed=3)
    streamed = asyncio.create_task(faces.ask(reader, "GET", f"{PATH}/{made['id']}?stream=true"))
    await until(lambda: faces.fleet.engine_tokens == 5)
    await asyncio.sleep(0.3)  # the reader has the output
    path = f"{PATH}/{made['id']}"
    method, path = ("DELETE", path) if action == "delete" else ("POST", f"{path}/cancel")
    status, _, body = await faces.ask(other, method, path)
    assert status == 200, body
    async with asyncio.timeout(15):
        status, _, events = await streamed
        for gateway in faces.gateways:
            await gateway.at_rest()
    ran = faces.fleet.engine_tokens  # the reader's gateway may take it over until it observes the end
    assert ran < 12
    assert not any(run.live for gateway in faces.gateways for run in gateway.workers.started)
    faces.fleet.hold.set()
    assert status == 200
    assert "".join(_deltas(events)) == whole_text(3)[: len("".join(_deltas(events)))]
    last = events.decode().strip().split("\n\n")[-1]
    assert f"event: response.{'cancelled' if action == 'cancel' else 'failed'}\n" in last
    assert faces.fleet.engine_tokens == ran, "it does not run on"


async def test_a_repeated_key_has_the_same_response(faces: Faces) -> None:
    made = [await create(faces, "k", gateway=gateway, seed=3) for gateway in (0, 1, 0)]
    assert len({each["id"] for each in made}) == 1
    await ended(faces, 1, made[0]["id"])
    assert faces.fleet.engine_tokens == 12
    status, _, body = await faces.post(1, PATH, {**BODY, "seed": 4}, "k")
    assert (status, json.loads(body)["error"]["code"]) == (409, "idempotency_conflict")
    whole = [await create(faces, "w", gateway=gateway, background=False) for gateway in (0, 1)]
    assert whole[0] == whole[1]


async def test_no_client_can_name_the_key_of_a_run(faces: Faces) -> None:
    """Not over gRPC either, whose keys are any bytes: its request has a record of its own."""
    faces.fleet.hold_at = 5
    made = await create(faces)
    await until(lambda: faces.fleet.engine_tokens == 5)
    key = f"response {made['id']}"
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    status, _, _ = await faces.post(0, "/v1/chat/completions", chat, key)
    assert status == 400
    faces.fleet.hold.set()
    generation = pb.Generation(model="m", prompt="other", max_output_tokens=3, idempotency_key=key)
    request = pb.CompleteRequest(generation=generation)
    for gateway in (0, 1):
        answer = await faces.stubs[gateway].Complete(request, metadata=AUTH)
        assert answer.accepted.request_id != made["id"].removeprefix("resp_")
        assert answer.finished.usage.output_tokens == 3
    assert (await ended(faces, 0, made["id"]))["status"] == "incomplete"
    assert faces.fleet.engine_tokens == 12 + 3


async def test_a_run_without_room_is_tried_again(faces: Faces) -> None:
    faces.fleet.place_error = errors.NoWorkerAvailable("no worker", retry_after_s=0.1)
    made = await create(faces, seed=3)
    assert (await get(faces, 1, made["id"]))["status"] == "in_progress"
    await asyncio.sleep(0.3)
    faces.fleet.place_error = None
    assert text_of(await ended(faces, 0, made["id"])) == whole_text(3)
    assert faces.fleet.engine_tokens == 12


async def test_a_run_that_cannot_succeed_fails_by_name_and_once(faces: Faces) -> None:
    faces.fleet.place_error = errors.PoisonedInput("this input ends engines")
    made = await create(faces)
    failed = await ended(faces, 1, made["id"])
    assert failed["status"] == "failed"
    assert failed["error"] == {"code": "poisoned_input", "message": "this input ends engines"}
    faces.fleet.place_error = None
    assert (await get(faces, 0, made["id"])) == failed
    assert faces.fleet.engine_tokens == 0, "it does not run again"


def _deltas(data: bytes) -> list[str]:
    found = []
    for block in data.decode().split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                found.append(json.loads(line[6:]).get("delta", ""))
    return found
