"""Safety packs at every door: what a client receives of an output or an input that a pack finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from services.adapters.memory.store import MemoryStore
from services.core.audit import PENDING, AuditEntry
from services.core.errors import Unavailable
from services.core.generation import Usage
from services.core.records import load
from services.ports.idempotency import RecordLimits
from services.rpc.status import from_rpc_error
from services.runtime.audit import AuditRecorder
from services.runtime.clock import SystemClock
from tests.support.keyed_faces import AUTH, Faces, keyed_faces
from tests.support.keyed_gateways import Answer, Gateway
from tests.support.metered import charged
from tests.support.safety import classifier, pack_of, phrases

WORDS = ["I ", "make ", "a ", "bo", "mb ", "now ", "and ", "then "]
SAFE = "I make a "
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
BLOCKED = phrases("block", "bomb", window_tokens=2)


@pytest_asyncio.fixture
async def faces(redis_url: str) -> AsyncIterator[Faces]:
    limits = RecordLimits(body_s=30.0, tombstone_s=30.0)
    async with keyed_faces(redis_url, responses=limits) as found:
        found.fleet.text_of = lambda position, _: WORDS[position % len(WORDS)]
        found.fleet.packs.pack = pack_of(**BLOCKED)
        yield found


def generation(**values: Any) -> pb.Generation:
    return pb.Generation(**{"model": "m", "prompt": "hello", "max_output_tokens": 40, **values})


def events_of(body: bytes) -> list[Any]:
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_chat(faces: Faces) -> None:
    status, _, body = await faces.post(0, "/v1/chat/completions", CHAT)
    choice = json.loads(body)["choices"][0]
    assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "content_filter", SAFE)
    usage = json.loads(body)["usage"]
    assert 5 <= usage["completion_tokens"] < 40, "what was made is charged, and it ended at once"
    _, _, body = await faces.post(0, "/v1/chat/completions", {**CHAT, "stream": True})
    chunks = events_of(body)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == SAFE
    assert chunks[-1]["choices"][0]["finish_reason"] == "content_filter"
    assert faces.fleet.engine_tokens < 40
    await faces.gateways[0].at_rest()
    assert not [one for one in faces.gateways[0].workers.started if one.live]


async def test_completions_with_several_prompts_and_log_probabilities(faces: Faces) -> None:
    body = {"model": "m", "prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1}
    _, _, answer = await faces.post(0, "/v1/completions", body)
    assert [one["finish_reason"] for one in json.loads(answer)["choices"]] == ["length", "length"]
    body["max_tokens"] = 12
    _, _, answer = await faces.post(0, "/v1/completions", body)
    for choice in json.loads(answer)["choices"]:
        assert (choice["finish_reason"], choice["text"]) == ("content_filter", SAFE)
        assert choice["logprobs"]["tokens"] == ["I ", "make ", "a "]


async def test_responses(faces: Faces) -> None:
    body = {"model": "m", "input": "hi", "max_output_tokens": 40}
    _, _, answer = await faces.post(0, "/v1/responses", body)
    made = json.loads(answer)
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
    text, refusal = made["output"]
    assert (text["status"], text["content"][0]["text"]) == ("incomplete", SAFE)
    assert refusal["content"][0]["type"] == "refusal"
    _, _, streamed = await faces.post(0, "/v1/responses", {**body, "stream": True})
    events = events_of(streamed)
    assert [event["sequence_number"] for event in events] == sorted(
        event["sequence_number"] for event in events
    )
    deltas = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    assert deltas == SAFE
    assert "".join(one["delta"] for one in events if one["type"] == "response.refusal.delta")
    assert events[-1]["type"] == "response.incomplete"
    _, _, again = await faces.ask(1, "GET", f"/v1/responses/{made['id']}?stream=true")
    replayed = events_of(again)
    assert [one["type"] for one in replayed[:2]] == ["response.created", "response.in_progress"]
    assert replayed[-1]["response"] == made
    following = {"model": "m", "input": "and?", "previous_response_id": made["id"], "max_output_tokens": 3}
    status, _, _ = await faces.post(0, "/v1/responses", following)
    assert status == 200, "a conversation goes on after a refusal"


async def test_background_responses(faces: Faces) -> None:
    body = {"model": "m", "input": "hi", "max_output_tokens": 40, "background": True}
    _, _, answer = await faces.post(0, "/v1/responses", body)
    made = json.loads(answer)
    async with asyncio.timeout(10.0):
        while made["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            _, _, answer = await faces.ask(1, "GET", f"/v1/responses/{made['id']}")
            made = json.loads(answer)
    assert (made["status"], made["output"][0]["content"][0]["text"]) == ("incomplete", SAFE)


async def test_messages(faces: Faces) -> None:
    body = {"model": "m", "max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}
    _, _, answer = await faces.post(0, "/v1/messages", body)
    made = json.loads(answer)
    assert (made["stop_reason"], made["content"][0]["text"]) == ("refusal", SAFE)
    _, _, streamed = await faces.post(0, "/v1/messages", {**body, "stream": True})
    stops = [one["delta"]["stop_reason"] for one in events_of(streamed) if one["type"] == "message_delta"]
    assert stops == ["refusal"]


async def test_grpc(faces: Faces) -> None:
    stub = faces.stubs[0]
    whole = await stub.Complete(pb.CompleteRequest(generation=generation(choices=2)), metadata=AUTH)
    assert [choice.text for choice in whole.choices] == [SAFE, SAFE]
    reasons = [one.finish_reason for one in whole.finished.choices]
    assert reasons == [common_pb2.FINISH_REASON_FILTERED] * 2
    start = pb.SessionStart(stream_id=1, generation=generation(), initial_credit_tokens=1)

    async def messages() -> AsyncIterator[pb.SessionRequest]:
        yield pb.SessionRequest(start=start)
        while not ends:
            await asyncio.sleep(0.01)
            yield pb.SessionRequest(credit=pb.SessionCredit(stream_ids=[1], tokens=[1]))

    text, ends = "", list[int]()
    async with asyncio.timeout(10.0):
        async for message in stub.Session(messages(), metadata=AUTH):
            text += "".join(message.tokens.texts)
            ends += [choice.finish_reason for end in message.finished for choice in end.finished.choices]
    assert (text, ends) == (SAFE, [common_pb2.FINISH_REASON_FILTERED])


@pytest.mark.parametrize("clean", [True, False])
async def test_a_key_replays_the_released_output_alone(faces: Faces, clean: bool) -> None:
    if clean:
        faces.fleet.packs.pack = pack_of(window_tokens=4)
    left, right = faces.gateways
    first = await left.ask("k", max_output_tokens=12)
    made = faces.fleet.engine_tokens
    again = await right.ask("k", max_output_tokens=12)
    assert again.same_as(first)
    assert faces.fleet.engine_tokens == made
    assert first.text[0] == ("".join(WORDS + WORDS[:4]) if clean else SAFE)
    assert first.finished is not None
    assert await charged(left.limiter, faces.fleet.tenant) == first.finished.usage


async def greedy(gateway: Gateway) -> Answer:
    answer = await gateway.ask(
        "", sampling=common_pb2.Sampling(temperature=0.0), cache=True, max_output_tokens=12, logprobs=1
    )
    await gateway.at_rest()
    await asyncio.sleep(0.05)
    return answer


async def test_a_cached_answer_has_released_output_alone_and_serves_under_the_same_packs(
    faces: Faces,
) -> None:
    first = await greedy(faces.gateways[0])
    again = await greedy(faces.gateways[1])
    assert again.accepted is not None
    assert again.accepted.cached
    assert (again.text, again.ids, again.logprobs) == (first.text, first.ids, first.logprobs)
    assert again.text[0] == SAFE
    faces.fleet.packs.digest = "sha256:next"
    other = await greedy(faces.gateways[1])
    assert other.accepted is not None
    assert not other.accepted.cached


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "a B\u043emb"}]},
        {"messages": [{"role": "user", "content": "hi", "name": "bomb"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "a bomb"}}]},
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": "b\\u006fmb"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "done"},
            ]
        },
    ],
    ids=["message", "name", "tool", "arguments"],
)
async def test_an_input_that_is_blocked_is_refused_before_any_device(
    faces: Faces, change: dict[str, Any]
) -> None:
    status, _, body = await faces.post(0, "/v1/chat/completions", {**CHAT, **change})
    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (400, "content_filter", "invalid_request_error")
    assert "found" in error["message"]
    assert faces.fleet.engine_tokens == 0
    await faces.gateways[0].at_rest()
    assert await charged(faces.gateways[0].limiter, faces.fleet.tenant) == Usage(0, 0)


async def test_grpc_refuses_inputs_with_the_category(faces: Faces) -> None:
    faces.fleet.packs.pack = pack_of(**phrases("block", "7 8 9"))
    for values in ({"prompt": "say 7 8 9"}, {"token_ids": pb.TokenIds(ids=[1, 7, 8, 9])}):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await faces.stubs[0].Complete(
                pb.CompleteRequest(generation=pb.Generation(model="m", **values)),
                metadata=AUTH,
            )
        error = from_rpc_error(refused.value)
        assert (refused.value.code(), error.reason) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "CONTENT_FILTERED",
        )
        assert error.metadata["category"] == "found"


async def test_an_input_is_redacted_before_it_is_read(faces: Faces) -> None:
    faces.fleet.packs.pack = pack_of(**phrases("redact", "secret"))
    answer = await faces.gateways[0].ask("", prompt="my secret is", max_output_tokens=2)
    assert answer.accepted is not None, answer.error
    assert answer.accepted.prompt_tokens == len("my [redacted] is")


async def test_a_classifier_judges_inputs_and_its_absence_refuses_them(faces: Faces) -> None:
    faces.fleet.packs.pack = pack_of(**classifier())
    answer = await faces.gateways[0].ask("", prompt="a bad thing", max_output_tokens=2)
    assert answer.error is not None
    assert (answer.error.reason, answer.error.metadata["category"]) == ("CONTENT_FILTERED", "judged")
    assert faces.fleet.classifiers.asked == ["a bad thing"]
    assert faces.fleet.classifiers.settled >= 1


async def test_a_pack_that_cannot_be_read_refuses_requests(faces: Faces) -> None:
    faces.fleet.packs.refusal = Unavailable("the pack is not there", retry_after_s=1.0)
    status, headers, _ = await faces.post(0, "/v1/chat/completions", CHAT)
    assert (status, headers["retry-after"]) == (503, "1")
    assert faces.fleet.engine_tokens == 0


async def test_each_intervention_is_in_the_audit_log_without_its_text(redis_url: str) -> None:
    store = MemoryStore(SystemClock())
    recorder = AuditRecorder(store, SystemClock(), source="gateway", process="src-1")
    async with keyed_faces(redis_url, audit=recorder) as faces:
        faces.fleet.text_of = lambda position, _: WORDS[position % len(WORDS)]
        faces.fleet.packs.pack = pack_of(**BLOCKED)
        for _ in range(2):
            await faces.post(0, "/v1/chat/completions", CHAT)
        turns = [{"role": "user", "content": "a bomb"}]
        await faces.post(0, "/v1/chat/completions", {**CHAT, "messages": turns})
    await recorder.flush()
    entries = [load(entry.value, AuditEntry) for entry in (await store.list(PENDING)).entries]
    assert [(one.method, one.outcome, one.count) for one in entries] == [
        ("SafetyPack/Intervene", "CONTENT_FILTERED", 1)
    ] * 3
    digest = sha256(b"bomb").hexdigest()
    assert entries[0].resource == f"found/pack/output/0/9/{digest}"
    assert entries[2].resource == f"found/pack/input/0/2/{digest}"
    assert {one.actor.tenant for one in entries} == {faces.fleet.tenant}
    assert len({one.request_id for one in entries}) == 3
    assert "bomb" not in str(entries)
