"""Idempotency keys as the clients of each face send them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest
import pytest_asyncio
import redis.asyncio
from structlog.testing import capture_logs

from fairway.v1 import inference_pb2 as pb
from services.core import errors
from services.core.outputs.forms import named_form
from services.core.records import Degrade
from services.rpc.status import from_rpc_error
from tests.support.keyed_faces import Faces, keyed_faces

AUTH = (("authorization", "Bearer key"),)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
TEXTS = {"model": "m", "prompt": ["one", "three"], "max_tokens": 6}


@pytest_asyncio.fixture
async def faces(redis_url: str) -> AsyncIterator[Faces]:
    async with keyed_faces(redis_url) as found:
        yield found


def generation(key: str, **values: Any) -> pb.Generation:
    return pb.Generation(
        **{"model": "m", "prompt": "hello", "max_output_tokens": 12, "idempotency_key": key, **values}
    )


async def test_accepted_says_that_it_was_before(faces: Faces) -> None:
    left, right = faces.stubs
    request = pb.CompleteRequest(generation=generation("k", choices=2))
    first = await left.Complete(request, metadata=AUTH)
    again = await right.Complete(request, metadata=AUTH)
    assert (first.accepted.replayed, again.accepted.replayed) == (False, True)
    again.accepted.replayed = False
    assert again == first
    assert faces.fleet.engine_tokens == 24


@pytest.mark.parametrize("parts", [True, False])
async def test_output_comes_in_parts_where_the_client_asks_for_it(faces: Faces, parts: bool) -> None:
    """Not where the first client of the key did."""
    faces.fleet.form = named_form("hermes")
    stub = faces.stubs[1]
    await faces.stubs[0].Complete(
        pb.CompleteRequest(generation=generation("k", parts=not parts)), metadata=AUTH
    )
    asked = generation("k", parts=parts)
    answer = await stub.Complete(pb.CompleteRequest(generation=asked), metadata=AUTH)
    assert answer.accepted.replayed
    assert [choice.HasField("answer") for choice in answer.choices] == [parts]
    assert answer.choices[0].answer.content.strip() == (answer.choices[0].text.strip() if parts else "")
    session = stub.Session(
        iter([pb.SessionRequest(start=pb.SessionStart(stream_id=1, generation=asked))]), metadata=AUTH
    )
    messages = [message async for message in session]
    content = "".join(
        part.content for message in messages for entry in message.tokens.parts for part in entry.parts
    )
    content += "".join(
        part.content
        for message in messages
        for end in message.finished
        for choice in end.finished.choices
        for part in choice.parts
    )
    assert content == answer.choices[0].answer.content


async def test_a_conflict_is_not_to_be_sent_again(faces: Faces) -> None:
    left, _ = faces.stubs
    await left.Complete(pb.CompleteRequest(generation=generation("k")), metadata=AUTH)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await left.Complete(pb.CompleteRequest(generation=generation("k", prompt="hi")), metadata=AUTH)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert isinstance(from_rpc_error(caught.value), errors.IdempotencyConflict)


async def test_generations_of_a_session_have_keys(faces: Faces) -> None:
    ends: list[Any] = []
    for stub in faces.stubs:
        call = stub.Session(metadata=AUTH)
        for number in range(3):  # two with one key, one with another
            start = pb.SessionStart(
                stream_id=number, generation=generation(f"k{number // 2}"), initial_credit_tokens=64
            )
            await call.write(pb.SessionRequest(start=start))
        await call.done_writing()
        accepted, finished = {}, {}
        async for message in call:
            accepted.update({each.stream_id: each.accepted.request_id for each in message.accepted})
            finished.update({each.stream_id: each.finished.usage.output_tokens for each in message.finished})
        assert finished == {0: 12, 1: 12, 2: 12}
        assert accepted[0] == accepted[1] != accepted[2]
        ends.append(accepted)
    assert ends[0] == ends[1]
    assert faces.fleet.engine_tokens == 24


async def test_a_session_that_withdraws_ends_what_it_alone_follows(faces: Faces) -> None:
    faces.fleet.hold_at = 4
    call = faces.stubs[0].Session(metadata=AUTH)
    await call.write(pb.SessionRequest(start=pb.SessionStart(stream_id=1, generation=generation("k"))))
    async with asyncio.timeout(60):
        while faces.fleet.engine_tokens < 4:
            await asyncio.sleep(0.01)
        await call.write(pb.SessionRequest(cancel=pb.SessionCancel(stream_ids=[1])))
        reasons: list[str] = []
        while not reasons:
            message: Any = await call.read()
            reasons = [each.error.reason for each in message.finished]
    assert reasons == ["CANCELLED"]
    await faces.gateways[0].at_rest()
    assert not faces.gateways[0].workers.started[0].live
    call.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replay_says_that_the_answer_was_degraded(faces: Faces, stream: bool) -> None:
    fleet = faces.fleet
    fleet.degrade, fleet.pressure = Degrade(max_output_tokens=5), {fleet.digest: 0.8}
    body = {**CHAT, "stream": stream}
    answers = []
    for gateway in (0, 0, 1):
        status, headers, answer = await faces.post(gateway, "/v1/chat/completions", body, "k")
        assert (status, headers["x-fairway-degraded"]) == (200, "output_capped; original=12; applied=5")
        answers.append(answer)
        fleet.pressure = {}
    assert b'"degraded":[{"kind":"output_capped","original":"12","applied":"5"}]' in answers[0]
    if not stream:
        assert answers[0] == answers[1] == answers[2]
    first = await faces.stubs[1].Complete(pb.CompleteRequest(generation=generation("new")), metadata=AUTH)
    assert not first.accepted.degradations


async def test_a_whole_answer_is_replayed_to_the_byte(faces: Faces) -> None:
    status, headers, first = await faces.post(0, "/v1/chat/completions", CHAT, "k")
    assert (status, headers.get("idempotent-replayed")) == (200, None)
    for gateway in (0, 1):
        status, headers, again = await faces.post(gateway, "/v1/chat/completions", CHAT, "k")
        assert (status, headers["idempotent-replayed"]) == (200, "true")
        assert again == first
    assert faces.fleet.engine_tokens == 12


async def test_a_stream_is_replayed_also_where_it_was_a_whole_answer(faces: Faces) -> None:
    _, _, whole = await faces.post(0, "/v1/chat/completions", CHAT, "k")
    status, headers, stream = await faces.post(1, "/v1/chat/completions", {**CHAT, "stream": True}, "k")
    assert (status, headers["idempotent-replayed"]) == (200, "true")
    events = [json.loads(line[6:]) for line in stream.decode().split("\n") if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content", "") for each in events for choice in each["choices"])
    assert text == json.loads(whole)["choices"][0]["message"]["content"]
    assert {each["id"] for each in events} == {json.loads(whole)["id"]}
    assert stream.endswith(b"data: [DONE]\n\n")


async def test_prompts_of_one_request_are_replayed_together(faces: Faces) -> None:
    _, _, first = await faces.post(0, "/v1/completions", TEXTS, "k")
    status, headers, again = await faces.post(1, "/v1/completions", TEXTS, "k")
    assert (status, headers["idempotent-replayed"]) == (200, "true")
    assert json.loads(again)["choices"] == json.loads(first)["choices"]
    assert json.loads(again)["id"] == json.loads(first)["id"]
    assert faces.fleet.engine_tokens == 12
    for other in ("one", ["one"], ["one", "two"], ["one", "three", "four"]):
        status, headers, _ = await faces.post(0, "/v1/completions", {**TEXTS, "prompt": other}, "k")
        assert (status, headers["x-should-retry"]) == (409, "false"), other


@pytest.mark.parametrize("key", ["", "k" * 129, "a b", "\u00fc"])
async def test_a_key_that_is_none_is_refused(faces: Faces, key: str) -> None:
    status, _, body = await faces.post(0, "/v1/chat/completions", CHAT, key)
    assert status == 400
    assert json.loads(body)["error"]["param"] == "idempotency-key"


async def test_nothing_of_a_request_is_readable_in_the_store(faces: Faces, redis_url: str) -> None:
    """Prompt, output, the client's key and plain hashes, of a request that runs and of one that ended."""
    secret_prompt, key, tenant = "zzprompt of annzz", "order-of-ann", faces.fleet.tenant
    values = {
        "prompt": secret_prompt,
        "choices": 2,
        "logprobs": 1,
        "stop": ["zzstopzz"],
        "model": "zzmodelzz",
    }
    request = generation(key, **values)
    answer = await faces.stubs[0].Complete(pb.CompleteRequest(generation=request), metadata=AUTH)
    faces.fleet.hold_at = 6
    running = asyncio.ensure_future(
        faces.stubs[0].Complete(pb.CompleteRequest(generation=generation("b" + key, **values)), metadata=AUTH)
    )
    while faces.fleet.engine_tokens < 24 + 12:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # written behind
    plain = request.SerializeToString(deterministic=True)
    needles = [secret_prompt.encode(), key.encode(), b"zzstopzz", b"zzmodelzz", faces.fleet.digest.encode()]
    needles += [hashlib.sha256(plain).hexdigest()[:32].encode()]
    needles += [hashlib.sha256(f"fairway key v1\0000\0{key}".encode()).hexdigest()[:32].encode()]
    for choice in answer.choices:
        needles += [choice.text[at : at + 12].encode() for at in range(40)]
        needles += [msgspec.msgpack.encode(list(choice.ids[at : at + 3])) for at in range(9)]
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        names = [name async for name in client.scan_iter(match=f"*{tenant}*")]
        logs = [name for name in names if name.endswith(b":log")]
        assert len(logs) == 2
        stored = [*names]
        for name in logs:
            stored += await client.lrange(name, 0, -1)  # a dump is compressed
        stored += [await client.dump(name) for name in names]
    assert sum(map(len, stored)) > 2000
    assert [needle for needle in needles if any(needle in each for each in stored)] == []
    faces.fleet.hold.set()
    await running


@pytest.mark.parametrize("ended", [True, False])
async def test_a_record_that_was_changed_is_never_an_answer(
    faces: Faces, redis_url: str, ended: bool
) -> None:
    faces.fleet.hold_at = None if ended else 6
    request = pb.CompleteRequest(generation=generation("k"))
    first = faces.gateways[0]
    if ended:
        await faces.stubs[0].Complete(request, metadata=AUTH)
    else:
        left = await first.ask("k", prompt="hello", max_output_tokens=12, until=6)
        assert left.error is None
        await asyncio.sleep(0.2)
        await first.supervisor.close()  # its lease lapses
        await asyncio.sleep(1.2)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        (name,) = [name async for name in client.scan_iter(match=f"fw:{{{faces.fleet.tenant}}}:idem:*:log")]
        chunk: Any = await client.lindex(name, 0)
        changed: Any = bytes([*chunk[:-1], chunk[-1] ^ 1])
        await client.lset(name, 0, changed)
    computed = faces.fleet.engine_tokens
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
        await faces.stubs[1].Complete(request, metadata=AUTH)
    assert isinstance(from_rpc_error(caught.value), errors.ResultExpired)
    assert [entry["log_level"] for entry in logs if entry["event"] == "idempotency.record_unreadable"] == [
        "error"
    ]
    assert faces.fleet.engine_tokens == computed


async def test_keys_are_not_in_the_logs_nor_in_the_store(faces: Faces, redis_url: str) -> None:
    with capture_logs() as logs:
        await faces.stubs[0].Complete(
            pb.CompleteRequest(generation=generation("order-of-ann")), metadata=AUTH
        )
    assert "idempotency.claimed" in [entry["event"] for entry in logs]
    assert "order-of-ann" not in repr(logs)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        names = [name async for name in client.scan_iter(match=f"fw:{{{faces.fleet.tenant}}}*")]
        assert names
        assert not any(b"order-of-ann" in name for name in names)
        for name in names:
            assert await client.pttl(name) > 0, name
