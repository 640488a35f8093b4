"""The Responses API over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from services.core.errors import NoWorkerAvailable, TokenRateExceeded
from services.gateway.events import Event, Tokens
from tests.integration.openai.face import Answer, Call, Face, accepted, failing, finished, silent
from tests.integration.openai.test_messages import calling
from tests.support.waiting import until

BODY = {"model": "m", "input": "hi"}
PATH = "/v1/responses"


def events_of(answer: Answer) -> list[Any]:
    found = []
    for block in answer.body.decode().split("\n\n")[:-1]:
        lines = block.split("\n")
        event = json.loads(lines[-1].removeprefix("data: "))
        assert lines[-2] == f"event: {event['type']}"
        found.append(event)
    return found


async def create(face: Face, **fields: Any) -> Any:
    found = await face.ask("POST", PATH, {**BODY, **fields})
    assert found.status == 200, found.body
    return found.json


async def test_a_response_is_stored_listed_and_deleted(face: Face) -> None:
    made = await create(face, metadata={"a": "b"})
    assert made["output"][0]["content"][0]["text"] == "Hello"
    assert (made["status"], made["store"], made["metadata"]) == ("completed", True, {"a": "b"})
    path = f"{PATH}/{made['id']}"
    assert (await face.ask("GET", path)).json == made
    items = (await face.ask("GET", f"{path}/input_items")).json
    assert [item["content"][0]["text"] for item in items["data"]] == ["hi"]
    assert (await face.ask("DELETE", path)).json["deleted"] is True
    for method in ("GET", "DELETE"):
        assert (await face.ask(method, path)).status == 404


async def test_what_is_not_to_be_stored_is_not(face: Face) -> None:
    made = await create(face, store=False)
    assert made["store"] is False
    assert (await face.ask("GET", f"{PATH}/{made['id']}")).status == 404


async def test_a_stream_has_the_response_of_its_last_event(face: Face) -> None:
    face.service.script = calling
    streamed = events_of(await face.ask("POST", PATH, {**BODY, "stream": True}))
    assert [event["type"] for event in (streamed[0], streamed[1], streamed[-1])] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    last = streamed[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    assert (await face.ask("GET", f"{PATH}/{last['id']}")).json == last
    arguments = [e["delta"] for e in streamed if e["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(arguments)) == {"a": 1}


async def test_what_precedes_the_output_is_counted_before_it(face: Face) -> None:
    streamed = events_of(await face.ask("POST", PATH, {**BODY, "stream": True}))
    numbers = [event["sequence_number"] for event in streamed]
    assert numbers[:2] == [0, 1]
    assert numbers == sorted(set(numbers))


async def test_a_conversation_goes_on_from_what_is_stored(face: Face) -> None:
    face.service.script = calling
    first = await create(face, instructions="Be brief.")
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    second = await create(face, previous_response_id=first["id"], input=[output])
    assert second["previous_response_id"] == first["id"]
    turns = face.service.calls[-1].generation.chat.messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    assert (turns[1].content, turns[1].reasoning_content) == ("I add.", "Look it up.")
    assert turns[1].tool_calls[0].id == turns[2].tool_call_id == call["call_id"]
    await create(face, previous_response_id=second["id"])
    assert len(face.service.calls[-1].generation.chat.messages) == 5
    await face.ask("DELETE", f"{PATH}/{first['id']}")
    gone = await face.ask("POST", PATH, {**BODY, "previous_response_id": second["id"]})
    assert (gone.status, gone.error["param"]) == (404, "previous_response_id")
    assert first["id"] in gone.error["message"]


async def test_a_conversation_is_bounded_in_bytes(face: Face) -> None:
    large = (await create(face, input="x" * 15_000))["id"]
    large = (await create(face, input="x" * 15_000, previous_response_id=large))["id"]
    made = len(face.service.calls)
    wide = await face.ask("POST", PATH, {**BODY, "previous_response_id": large})
    assert (wide.status, wide.error["param"]) == (400, "previous_response_id")
    assert len(face.service.calls) == made, "refused before it runs"


@pytest.mark.parametrize("response_id", ["resp_req_0", "x" * 5000, "%00", "..%2f..", "resp_req_%f0%9f%98%80"])
async def test_unknown_ids_are_not_found(face: Face, response_id: str) -> None:
    path = f"{PATH}/{response_id}"
    for method, asked in (("GET", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")):
        found = await face.ask(method, asked)
        assert found.status == 404, asked
    found = await face.ask("POST", PATH, {**BODY, "previous_response_id": response_id[:4000]})
    assert (found.status, found.error["param"]) == (404, "previous_response_id")


async def test_items_are_listed_in_pages(face: Face) -> None:
    made = await create(face, input=[{"role": "user", "content": f"{n}"} for n in range(5)])
    path, after, texts = f"{PATH}/{made['id']}/input_items", "", []
    while True:
        page = (await face.ask("GET", f"{path}?limit=2&order=asc{after}")).json
        texts += [item["content"][0]["text"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert texts == ["0", "1", "2", "3", "4"]
    newest = (await face.ask("GET", f"{path}?limit=1")).json
    assert newest["data"][0]["content"][0]["text"] == "4"
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing", "color=red"):
        assert (await face.ask("GET", f"{path}?{query}")).status == 400, query


async def test_a_stored_response_streams_from_any_number(face: Face) -> None:
    made = await create(face)
    path = f"{PATH}/{made['id']}?stream=true"
    whole = events_of(await face.ask("GET", path))
    assert whole[-1]["response"] == made
    numbers = [event["sequence_number"] for event in whole]
    rest = events_of(await face.ask("GET", f"{path}&starting_after={numbers[3]}"))
    assert rest == whole[4:]
    header = (("last-event-id", str(numbers[3])),)
    assert events_of(await face.ask("GET", path, headers=header)) == whole[4:]
    for query in ("&starting_after=-1", "&starting_after=x", "&starting_after=" + "9" * 30):
        assert (await face.ask("GET", path + query)).status == 400
    assert (await face.ask("GET", f"{PATH}/{made['id']}?starting_after=1")).status == 400


async def test_a_failure_within_a_stream_is_its_last_event(face: Face) -> None:
    face.service.script = failing(NoWorkerAvailable("none", retry_after_s=1.0), after=2)
    last = events_of(await face.ask("POST", PATH, {**BODY, "stream": True}))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "no_worker_available"
    face.service.script = failing(NoWorkerAvailable("none", retry_after_s=1.0), after=1)
    assert (await face.ask("POST", PATH, {**BODY, "stream": True})).status == 503


async def test_a_refused_background_response_leaves_nothing(face: Face) -> None:
    face.service.script = failing(TokenRateExceeded("no room", retry_after_s=7.0), after=0)
    found = await face.ask("POST", PATH, {**BODY, "background": True})
    assert (found.status, found.headers["retry-after"]) == (429, "7")
    request_id = found.headers["x-request-id"]
    assert (await face.ask("GET", f"{PATH}/resp_{request_id}")).status == 404


async def test_a_bug_in_the_background_is_an_incident_and_leaves_nothing(face: Face) -> None:
    face.service.script = failing(RuntimeError("the secret of a bug"), after=0)
    found = await face.ask("POST", PATH, {**BODY, "background": True})
    assert (found.status, found.error["code"]) == (500, "internal")
    request_id = found.headers["x-request-id"]
    assert (await face.ask("GET", f"{PATH}/resp_{request_id}")).status == 404


async def test_a_background_response_takes_no_timeout(face: Face) -> None:
    timeout = (("x-request-timeout-s", "5"),)
    found = await face.ask("POST", PATH, {**BODY, "background": True}, headers=timeout)
    assert (found.status, found.error["param"]) == (400, "x-request-timeout-s")
    assert (await face.ask("POST", PATH, BODY, headers=timeout)).status == 200


async def test_a_cancelled_response_stays_cancelled(face: Face) -> None:
    face.service.script = silent
    made = await create(face, background=True)
    assert (made["status"], made["background"]) == ("queued", True)
    path = f"{PATH}/{made['id']}"
    assert (await face.ask("GET", path)).json["status"] == "in_progress"
    assert (await face.ask("POST", f"{path}/cancel")).json["status"] == "cancelled"
    await asyncio.wait_for(face.service.closed.wait(), 30)
    runs = len(face.service.calls)
    for method, asked in (("GET", path), ("POST", f"{path}/cancel")):
        assert (await face.ask(method, asked)).json["status"] == "cancelled"
    assert events_of(await face.ask("GET", f"{path}?stream=true"))[-1]["type"] == "response.cancelled"
    assert len(face.service.calls) == runs, "it does not run again"
    going_on = await face.ask("POST", PATH, {**BODY, "previous_response_id": made["id"]})
    assert going_on.status == 400


async def test_deleting_ends_a_run(face: Face) -> None:
    face.service.script = silent
    made = await create(face, background=True)
    await face.ask("DELETE", f"{PATH}/{made['id']}")
    await asyncio.wait_for(face.service.closed.wait(), 30)
    assert (await face.ask("GET", f"{PATH}/{made['id']}")).status == 404


async def test_only_the_background_can_be_cancelled(face: Face) -> None:
    made = await create(face)
    found = await face.ask("POST", f"{PATH}/{made['id']}/cancel")
    assert (found.status, found.error["param"]) == (400, "response_id")


async def test_a_run_outlives_its_client(face: Face) -> None:
    face.service.script = silent
    _, writer = await face.send(PATH, {**BODY, "background": True, "stream": True})
    await face.service.until_running(2)
    writer.close()
    await until(lambda: face.service.running == 1)
    await asyncio.sleep(0.1)
    assert face.service.running == 1, "the run's own"


async def test_a_reader_behind_the_end_of_the_run_receives_all_of_it(face: Face) -> None:
    """The stored end is observed once a second: it cuts a stream only if it is a cancellation."""

    async def script(call: Call) -> AsyncGenerator[Event, None]:
        is_driver = call is face.service.calls[0]
        yield accepted(call)
        yield Tokens(0, 0, [1], "Hel")
        await asyncio.sleep(0.1 if is_driver else 1.5)
        yield Tokens(0, 1, [2], "lo")
        yield finished(call)

    face.service.script = script
    found = events_of(await face.ask("POST", PATH, {**BODY, "background": True, "stream": True}))
    assert "".join(event.get("delta", "") for event in found) == "Hello"
    assert found[-1]["type"] == "response.completed"
