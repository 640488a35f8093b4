"""Requests of fixed-cost models with an idempotency key, on gateways that share their records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from services.core.errors import (
    DeadlineExceeded,
    Draining,
    IdempotencyConflict,
    InternalError,
    InvalidInput,
    ModelNotFound,
    ResultExpired,
    StreamBroken,
)
from services.core.fixed_cost.rows import RowEnd
from services.core.records import KEYS, ApiKey, KeyRole, Meta
from services.gateway.rows.service import Embeddings, Inferred, Scores
from services.ports.idempotency import RecordLimits
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter
from tests.support.rows_gateway import CLOCK, KEY_HASH, RowsGateway, digest_of, rows_gateway
from tests.support.waiting import until

MAX_BYTES = 64 * 1024


@asynccontextmanager
async def two_gateways(
    folders: dict[str, Path], lease_s: float
) -> AsyncIterator[tuple[RowsGateway, RowsGateway]]:
    """Yield gateways that share records and quotas. Nothing is held afterwards."""
    limiter = MemoryLimiter(CLOCK)
    records = MemoryIdempotency(CLOCK, limiter, RecordLimits(lease_s=lease_s, max_record_bytes=MAX_BYTES))
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(
                rows_gateway(folders, limiter=limiter, records=records, owner=owner)
            )
            for owner in ("g0", "g1")
        ]
        yield found[0], found[1]
        await until(lambda: not any(gateway.service.busy for gateway in found))
        assert await limiter.concurrency("acme") == 0


@pytest.fixture
async def pair(folders: dict[str, Path]) -> AsyncIterator[tuple[RowsGateway, RowsGateway]]:
    async with two_gateways(folders, lease_s=60.0) as found:
        yield found


async def embed(gateway: RowsGateway, *texts: str, key: str = "k", **fields: Any) -> Embeddings:
    timeout_s = fields.pop("timeout_s", None)
    request = pb.EmbedRequest(**{"model": "embed", "inputs": texts, "idempotency_key": key, **fields})
    return await gateway.rows.embed(
        gateway.principal, request, received=gateway.received(), timeout_s=timeout_s
    )


def charged(*gateways: RowsGateway) -> dict[str, int]:
    """The tokens that the ledger counts: of several reports of a request the largest."""
    found: dict[str, int] = {}
    for event in (event for gateway in gateways for event in gateway.reported):
        found[event.request_id] = max(found.get(event.request_id, 0), event.usage.prompt_tokens)
    return found


async def test_a_key_of_a_deployment_may_use_its_alias(folders: dict[str, Path]) -> None:
    async with rows_gateway(folders, aliases={"org/Embed": "embed"}) as gateway:
        limited = ApiKey(Meta("alpha"), KeyRole.TENANT, KEY_HASH, tenant="acme", models=("embed",))
        gateway.keys.put(KEYS + "alpha", limited)
        first = await embed(gateway, "the fox", model="org/Embed")
        again = await embed(gateway, "the fox", model="org/Embed")
        assert (first.answer.replayed, again.answer.replayed) == (False, True)
        with pytest.raises(ModelNotFound):
            await embed(gateway, "the fox", model="org/Other", key="k2")
        await until(lambda: not gateway.service.busy)


async def test_a_repeat_on_any_gateway_receives_the_same_answer_charged_once(
    pair: tuple[RowsGateway, RowsGateway],
) -> None:
    left, right = pair
    first = await embed(left, "the fox", "dog")
    for gateway in pair:
        again = await embed(gateway, "the fox", "dog")
        np.testing.assert_array_equal(again.vectors, first.vectors)
        assert (first.answer.replayed, again.answer.replayed) == (False, True)
        for name in ("request_id", "model", "version_digest", "tokens", "usage"):
            assert getattr(again.answer, name) == getattr(first.answer, name)
    assert len(left.runner.requests) == 1
    assert not right.runner.requests
    assert charged(left, right) == {first.answer.request_id: 7}
    assert first.answer.usage.device_s == 0.5


async def test_scores_and_tensors_are_repeated_too(pair: tuple[RowsGateway, RowsGateway]) -> None:
    async def rerank(gateway: RowsGateway) -> Scores:
        request = pb.RerankRequest(model="rerank", query="fox", documents=["dog", "the"], idempotency_key="r")
        return await gateway.rows.rerank(gateway.principal, request, received=gateway.received())

    async def infer(gateway: RowsGateway) -> Inferred:
        data = np.arange(8, dtype=np.float32).tobytes()
        tensor = common_pb2.Tensor(name="input", datatype="FP32", shape=[2, 4], data=data)
        request = pb.InferRequest(model="mlp", inputs=[tensor], idempotency_key="i")
        return await gateway.rows.infer(gateway.principal, request, received=gateway.received())

    left, right = pair
    assert (await rerank(left)).scores == (await rerank(right)).scores
    assert (await infer(left)).outputs == (await infer(right)).outputs
    assert not right.runner.requests


async def test_another_body_is_a_conflict_whatever_the_call(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, right = pair
    await embed(left, "the fox", timeout={"seconds": 9})
    await embed(right, "the fox", timeout={"seconds": 8})  # no part of the body
    for gateway in pair:
        others: tuple[dict[str, Any], ...]
        others = ({"inputs": ["fox"]}, {"dimensions": 24}, {"model": "cut"}, {"user": "u"})
        for other in others:
            with pytest.raises(IdempotencyConflict):
                await embed(gateway, "the fox", **other)
    generation = pb.Generation(model="embed", prompt="the fox", idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        await right.service.complete(right.principal, generation, received=right.received())
    assert len(left.runner.requests) == 1


async def test_duplicates_join_the_one_run(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, right = pair
    left.runner.gate.clear()
    calls = [asyncio.create_task(embed(left, "dog"))]
    await until(lambda: left.runner.running == 1)
    calls += [asyncio.create_task(embed(gateway, "dog")) for gateway in (left, right, right)]
    await asyncio.sleep(0.1)
    left.runner.gate.set()
    answers = await asyncio.gather(*calls)
    assert [found.answer.replayed for found in answers] == [False, True, True, True]
    assert len({found.answer.request_id for found in answers}) == 1
    assert (len(left.runner.requests), len(right.runner.requests)) == (1, 0)
    assert list(charged(left, right).values()) == [3]


async def test_a_retry_runs_what_a_lost_gateway_left_under_the_same_id(folders: dict[str, Path]) -> None:
    async with two_gateways(folders, lease_s=0.2) as (left, right):
        await _taken_over(left, right)


async def _taken_over(left: RowsGateway, right: RowsGateway) -> None:
    left.runner.gate.clear()
    lost = asyncio.create_task(embed(left, "dog"))
    await until(lambda: left.runner.running == 1)
    found = await embed(right, "dog")  # nobody renews the lease of the left
    assert not found.answer.replayed
    assert found.answer.request_id == left.runner.requests[0].request_id
    assert len(right.runner.requests) == 1
    left.runner.gate.set()
    late = await lost  # it finds itself replaced
    np.testing.assert_array_equal(late.vectors, found.vectors)
    assert charged(left, right) == {found.answer.request_id: 3}
    assert not left.reported, "its settlement does not count"
    assert (await embed(left, "dog")).answer.replayed


async def test_a_permanent_error_is_the_answer_of_the_key_and_a_passing_one_is_not(
    pair: tuple[RowsGateway, RowsGateway],
) -> None:
    left, right = pair
    for gateway in pair:
        gateway.runner.ends = {1: RowEnd(error=InvalidInput("bad row", field="x"))}
        with pytest.raises(InvalidInput, match="bad row"):
            await embed(gateway, "the fox", "dog")
    assert not right.runner.requests
    assert list(charged(left, right).values()) == [4]
    for gateway, error in ((left, StreamBroken("lost twice")), (right, None)):
        gateway.runner.ends = {} if error is None else {1: RowEnd(error=error)}
        call = embed(gateway, "the fox", "dog", key="passing")
        if error is not None:
            with pytest.raises(StreamBroken):
                await call
        else:
            assert not (await call).answer.replayed
    assert sorted(charged(left, right).values()) == [4, 7]


async def test_a_request_that_was_refused_leaves_the_key_free(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, _ = pair
    for bad, error in (({"model": "none"}, ModelNotFound), ({"dimensions": 99}, InvalidInput)):
        with pytest.raises(error):
            await embed(left, "dog", **bad)
    assert not (await embed(left, "dog")).answer.replayed


async def test_an_answer_too_large_for_a_record_is_not_stored(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, right = pair
    texts = ["dog"] * (MAX_BYTES // (24 * 4) + 1)
    assert len((await embed(left, *texts)).vectors) == len(texts)
    for gateway in pair:
        with pytest.raises(ResultExpired, match="will not run again"):
            await embed(gateway, *texts)
    assert list(charged(left, right).values()) == [3 * len(texts)]


async def test_a_client_with_more_time_runs_it_again(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, _ = pair
    left.runner.gate.clear()
    hurried = asyncio.create_task(embed(left, "dog", timeout_s=1.0))
    await until(lambda: left.runner.running == 1)
    patient = asyncio.create_task(embed(left, "dog", timeout_s=30.0))
    with pytest.raises(DeadlineExceeded):
        await hurried
    await until(lambda: len(left.runner.requests) == 2)
    left.runner.gate.set()
    assert not (await patient).answer.replayed
    assert list(charged(left).values()) == [3]


async def test_a_client_that_leaves_does_not_end_the_run(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, right = pair
    left.runner.gate.clear()
    gone = asyncio.create_task(embed(left, "dog"))
    await until(lambda: left.runner.running == 1)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    left.runner.gate.set()
    assert (await embed(right, "dog")).answer.replayed
    assert not right.runner.requests


async def test_a_bug_ends_in_an_incident_and_the_key_runs_again(
    pair: tuple[RowsGateway, RowsGateway],
) -> None:
    left, right = pair
    left.runner.raises = [ZeroDivisionError("secret")]
    with pytest.raises(InternalError) as failed:
        await embed(left, "dog")
    assert failed.value.metadata["incident"] == "inc_1"
    assert "secret" not in failed.value.message
    assert not (await embed(right, "dog")).answer.replayed


async def test_a_drain_releases_the_key(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, right = pair
    left.runner.gate.clear()
    call = asyncio.create_task(embed(left, "dog"))
    await until(lambda: left.runner.running == 1)
    left.service.reject_new()
    left.service.cancel_all(Draining("over", retry_after_s=1.0))
    with pytest.raises(Draining):
        await call
    assert not (await embed(right, "dog")).answer.replayed


async def test_a_caller_without_the_model_receives_nothing(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, _ = pair
    await embed(left, "dog")
    key = ApiKey(Meta("alpha"), KeyRole.TENANT, KEY_HASH, tenant="acme", models=("mlp",))
    left.keys.put(KEYS + "alpha", key)
    with pytest.raises(ModelNotFound):
        await embed(left, "dog")


async def test_a_new_version_does_not_change_a_stored_answer(pair: tuple[RowsGateway, RowsGateway]) -> None:
    left, right = pair
    await embed(left, "dog")
    for gateway in pair:
        gateway.deploy("embed", "cut")
    found = await embed(right, "dog")
    assert (found.answer.replayed, found.answer.version_digest) == (True, digest_of("embed"))
