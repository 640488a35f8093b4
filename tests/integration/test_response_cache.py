"""Cached answers: only where everything permits it, never of another tenant, marked and charged."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from services.core.generation import Usage
from services.gateway.events import BATCH_FACE
from services.gateway.requests.egress import TICK_S
from services.gateway.response_cache import CollectedAnswer
from services.ports.idempotency import RecordLimits
from tests.support.keyed_faces import AUTH, Faces, keyed_faces
from tests.support.keyed_gateways import Answer, Gateway
from tests.support.metered import charged
from tests.support.waiting import until

GREEDY: dict[str, Any] = {"sampling": common_pb2.Sampling(temperature=0.0), "cache": True}
SECONDS = 2.0
LIMITS = RecordLimits(body_s=60.0, tombstone_s=60.0)


@pytest_asyncio.fixture
async def faces(redis_url: str) -> AsyncIterator[Faces]:
    async with keyed_faces(redis_url, responses=LIMITS) as found:
        yield found


async def ask(gateway: Gateway, **values: Any) -> Answer:
    """Send it without a key, and wait until its answer is kept."""
    answer = await gateway.ask("", **{**GREEDY, **values})
    assert answer.error is None
    await gateway.at_rest()
    await asyncio.sleep(0.05)
    return answer


def cached(answer: Answer) -> bool:
    assert answer.accepted is not None
    return answer.accepted.cached


async def test_an_equal_request_receives_the_answer_on_any_gateway(faces: Faces) -> None:
    left, right = faces.gateways
    first = await ask(left, logprobs=1)
    for gateway in (left, right):
        again = await ask(gateway, logprobs=1)
        assert cached(again)
        assert (again.ids, again.text, again.logprobs) == (first.ids, first.text, first.logprobs)
        assert again.request_id != first.request_id
        assert first.finished is not None
        assert again.finished is not None
        assert again.finished.choices == first.finished.choices
        assert again.finished.usage == Usage(5, 20, 5)
    assert not cached(first)
    assert faces.fleet.engine_tokens == 20
    assert await charged(left.limiter, faces.fleet.tenant) == Usage(15, 60, 10)


async def test_nothing_is_answered_of_a_version_that_may_be_withdrawn(faces: Faces) -> None:
    left, _ = faces.gateways
    await ask(left)
    faces.fleet.is_current = False
    assert not cached(await ask(left))
    faces.fleet.is_current = True
    assert cached(await ask(left))


async def test_no_tenant_receives_an_answer_of_another(faces: Faces) -> None:
    left, _ = faces.gateways
    await ask(left)
    assert not cached(await ask(left, tenant="other-" + faces.fleet.tenant))


@pytest.mark.parametrize(
    "change",
    [
        {"cache": False},
        {"sampling": common_pb2.Sampling(temperature=0.5)},
        {"choices": 2},
        {"prompt": "hello!"},
        {"max_output_tokens": 19},
        {"logprobs": 1},
        {"model": "n"},
    ],
)
async def test_a_request_that_differs_or_does_not_permit_it_runs(
    faces: Faces, change: dict[str, Any]
) -> None:
    left, _ = faces.gateways
    await ask(left)
    assert not cached(await ask(left, **change))


@pytest.mark.parametrize(
    "change",
    [{"cache": False}, {"sampling": common_pb2.Sampling(temperature=0.5, seed=1)}, {"choices": 2}],
)
async def test_what_must_not_be_cached_is_not_kept(faces: Faces, change: dict[str, Any]) -> None:
    for _ in range(2):
        assert not cached(await ask(faces.gateways[0], **change))


async def test_another_version_runs(faces: Faces) -> None:
    left, _ = faces.gateways
    await ask(left)
    faces.fleet.digest = "sha256:two"
    assert not cached(await ask(left))


async def test_a_request_with_a_key_neither_fills_nor_uses_the_cache(faces: Faces) -> None:
    left, _ = faces.gateways
    for key in ("k", ""):
        assert not cached(await left.ask(key, **GREEDY))
    await ask(left)
    assert not cached(await left.ask("l", **GREEDY))


async def test_an_answer_serves_for_its_time_only(redis_url: str) -> None:
    limits = RecordLimits(body_s=SECONDS, tombstone_s=SECONDS)
    async with keyed_faces(redis_url, responses=limits) as faces:
        left, _ = faces.gateways
        for is_first in (True, False):
            began_s = time.monotonic()
            assert not cached(await ask(left))
            assert cached(await ask(left)) or time.monotonic() - began_s >= SECONDS
            if is_first:
                await asyncio.sleep(SECONDS)


async def test_bytes_of_a_tenant_are_bounded(redis_url: str) -> None:
    limits = RecordLimits(body_s=60, tombstone_s=60, max_tenant_bytes=3000)
    async with keyed_faces(redis_url, responses=limits) as faces:
        left, _ = faces.gateways
        for number in range(20):
            await ask(left, prompt="x" * (number + 1))
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            names = [name async for name in client.scan_iter(match=f"*{faces.fleet.tenant}/cache*:log")]
            sizes = [len(chunk) for name in names for chunk in await client.lrange(name, 0, -1)]
        assert 1000 < sum(sizes) <= 3000
        assert cached(await ask(left, prompt="x" * 20))
        assert not cached(await ask(left, prompt="x"))


async def test_nothing_of_an_answer_is_readable_in_the_store(faces: Faces, redis_url: str) -> None:
    answer = await ask(faces.gateways[0])
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        names = [name async for name in client.scan_iter(match=f"*{faces.fleet.tenant}/cache*")]
        (logs,) = [name for name in names if name.endswith(b":log")]
        stored = [*names, *await client.lrange(logs, 0, -1), *[await client.dump(name) for name in names]]
        assert all([0 < await client.pttl(name) <= 120_000 for name in names])
    assert not any(answer.text[0][at : at + 12].encode() in each for at in range(40) for each in stored)


async def test_a_changed_entry_is_not_an_answer(faces: Faces, redis_url: str) -> None:
    left, _ = faces.gateways
    await ask(left)
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        (name,) = [name async for name in client.scan_iter(match=f"*{faces.fleet.tenant}/cache*:log")]
        chunk: Any = await client.lindex(name, 0)
        changed: Any = bytes([*chunk[:-1], chunk[-1] ^ 1])
        await client.lset(name, 0, changed)
    assert not cached(await ask(left))


async def test_a_hit_is_marked_on_every_face(faces: Faces) -> None:
    body = {"model": "m", "prompt": "hello", "max_tokens": 6, "temperature": 0, "cache": True}
    answers = []
    for stream in (False, False, True):
        status, headers, answer = await faces.post(0, "/v1/completions", {**body, "stream": stream})
        assert status == 200
        answers.append((headers.get("x-fairway-cache"), answer))
        await until(lambda: not faces.gateways[0].service.busy)
        await asyncio.sleep(0.05)
    assert [mark for mark, _ in answers] == [None, "hit", "hit"]
    assert json.loads(answers[0][1])["choices"] == json.loads(answers[1][1])["choices"]
    usage = json.loads(answers[1][1])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"]}
    generation = pb.Generation(model="m", prompt="hello", max_output_tokens=6, **GREEDY)
    found = await faces.stubs[1].Complete(pb.CompleteRequest(generation=generation), metadata=AUTH)
    assert found.accepted.cached
    assert faces.fleet.engine_tokens == 6


async def test_without_the_installations_setting_nothing_is_kept(redis_url: str) -> None:
    async with keyed_faces(redis_url) as faces:
        for _ in range(2):
            assert not cached(await ask(faces.gateways[0]))


async def test_a_client_with_a_window_of_its_own_receives_no_cached_answer(faces: Faces) -> None:
    await ask(faces.gateways[0])
    call = faces.stubs[0].Session(metadata=AUTH)
    generation = pb.Generation(model="m", prompt="hello", max_output_tokens=20, **GREEDY)
    for number, credit in enumerate((64, 0)):
        start = pb.SessionStart(stream_id=number, generation=generation, initial_credit_tokens=credit)
        await call.write(pb.SessionRequest(start=start))
    await call.done_writing()
    found = {}
    async for message in call:
        found.update({each.stream_id: each.accepted.cached for each in message.accepted})
    assert found == {0: False, 1: True}


def test_a_long_answer_is_not_collected() -> None:
    class Sink:
        tokens = 0

        def on_tokens(self, choice: int, offset: int, ids: Any, text: str, logprobs: Any) -> None:
            self.tokens += len(ids)

    sink: Any = Sink()
    collected = CollectedAnswer(sink)
    finished: Any = None
    collected.on_tokens(0, 0, [1] * 32_768, "", ())
    assert collected.answer(finished) is not None
    collected.on_tokens(0, 32_768, [1], "", ())
    assert collected.answer(finished) is None
    assert sink.tokens == 32_769


async def test_answers_that_nothing_runs_for_count_as_output_that_left(faces: Faces) -> None:
    gateway = faces.gateways[0]
    await ask(gateway)
    keyed = await gateway.ask("key", **GREEDY)
    faces.fleet.egress_tokens_per_second = 1
    first = await ask(gateway)  # of 20 tokens: the bucket has none for a while
    assert cached(first)
    line = await gateway.ask("", face=BATCH_FACE, **GREEDY)
    assert line.finished is not None, "the line of a batch is written to a file, and does not wait"
    second = asyncio.create_task(ask(gateway))
    await asyncio.sleep(0.3)
    assert not second.done()
    faces.fleet.egress_tokens_per_second = 0
    assert cached(await second)
    await until(lambda: not gateway.counted("fairway_gateway_egress_waiting"))
    await asyncio.sleep(2 * TICK_S)  # without a rate the debt is forgotten
    faces.fleet.egress_tokens_per_second = 1
    replay = await gateway.ask("key", **GREEDY)
    assert replay.accepted is not None
    assert replay.accepted.replayed
    assert replay.ids == keyed.ids
    third = asyncio.create_task(ask(gateway))
    await asyncio.sleep(0.3)
    assert not third.done(), "a replay is charged"
    faces.fleet.egress_tokens_per_second = 0
    await third
