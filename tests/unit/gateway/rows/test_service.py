"""Requests of fixed-cost models: what is computed, refused, charged and released."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairway.v1 import common_pb2
from fairway.v1 import inference_pb2 as pb
from services.adapters.quotas.gateway_limiter import GatewayLimiter
from services.adapters.quotas.hot_tenants import SliceSettings
from services.core.errors import (
    BudgetExceeded,
    ConcurrencyExceeded,
    DeadlineExceeded,
    DeadlineUnmeetable,
    Draining,
    FairwayError,
    InvalidInput,
    ModelNotFound,
    NoWorkerAvailable,
    PermissionDenied,
    PoisonedInput,
    PromptTooLong,
    RequestCancelled,
    RequestRateExceeded,
    StaleRoute,
    StreamBroken,
    TokenRateExceeded,
    UnsupportedFeature,
    VersionGone,
)
from services.core.fixed_cost.rows import RowEnd
from services.core.generation import Usage
from services.core.limits import LimitKind, UsageLimits
from services.core.poison.fingerprint import fingerprint_of_row
from services.core.records import (
    BUDGETS,
    DEPLOYMENTS,
    KEYS,
    WORKERS,
    ApiKey,
    Budget,
    IsolationTier,
    KeyRole,
    LoadedVersion,
    Meta,
    Priority,
    Tenant,
    VersionState,
    Worker,
)
from services.gateway.policy.claims import claims_of
from services.gateway.requests.egress import TICK_S
from services.gateway.requests.quotas import RequestQuotas, settled
from services.gateway.requests.request import MAX_ROUTES
from services.gateway.requests.terms import usage_of
from services.gateway.rows.service import Embeddings, Scores
from services.runtime.fleet_state.indexes import TenantBudgets
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Padded
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock
from tests.support.row_versions import reranker_version, tokenizer
from tests.support.rows_gateway import CLOCK, KEY_HASH, PRICE, SECRET, RowsGateway, digest_of, rows_gateway
from tests.support.waiting import until
from tests.unit.gateway.conftest import View


async def embed(
    gateway: RowsGateway, *texts: str, timeout_s: float | None = None, **fields: Any
) -> Embeddings:
    request = pb.EmbedRequest(**{"model": "embed", "inputs": texts, **fields})
    return await gateway.rows.embed(
        gateway.principal, request, received=gateway.received(), timeout_s=timeout_s
    )


async def rerank(gateway: RowsGateway, query: str, *documents: str, **fields: Any) -> Scores:
    request = pb.RerankRequest(**{"model": "rerank", "query": query, "documents": documents, **fields})
    return await gateway.rows.rerank(gateway.principal, request, received=gateway.received())


def own_vector(folder: Path, text: str) -> Any:
    ids = np.array(tokenizer().encode(text).ids, np.int64)
    return load_model(folder).run(Padded([{"input_ids": ids}], len(ids)))[0]["embedding"]


async def at_rest(gateway: RowsGateway) -> None:
    assert not gateway.service.running
    assert await gateway.limiter.concurrency("acme") == 0


async def test_vectors_are_those_of_the_model_in_the_order_of_the_request(
    gateway: RowsGateway, folders: dict[str, Path]
) -> None:
    texts = ("the quick fox", "dog", "the lazy dog jumps over the fox")
    found = await embed(gateway, *texts)
    for text, vector in zip(texts, found.vectors, strict=True):
        np.testing.assert_allclose(vector, own_vector(folders["embed"], text), atol=1e-6)
    assert found.answer.tokens == (5, 3, 9)
    assert found.answer.usage.prompt_tokens == 17
    assert found.answer.version_digest == digest_of("embed")
    (request,) = gateway.runner.requests
    assert request.priority is Priority.STANDARD
    assert request.route_revision == 42
    await at_rest(gateway)


async def test_token_ids_are_rows_as_they_are(gateway: RowsGateway) -> None:
    by_text = await embed(gateway, "the fox")
    by_ids = await embed(gateway, token_ids=[pb.TokenIds(ids=[2, 4, 7, 3])])
    np.testing.assert_array_equal(by_text.vectors[0], by_ids.vectors[0])


async def test_a_pair_is_scored_with_its_token_types(gateway: RowsGateway, folders: dict[str, Path]) -> None:
    documents = ("the lazy dog", "quick fox", "over")
    found = await rerank(gateway, "the fox", *documents)
    model = load_model(folders["rerank"])
    for score, document in zip(found.scores, documents, strict=True):
        encoded = tokenizer().encode("the fox", document)
        row = {"input_ids": np.array(encoded.ids), "token_type_ids": np.array(encoded.type_ids)}
        logit = float(model.run(Padded([row], len(encoded.ids)))[0]["logits"][0])
        assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-6)
    assert [found.scores[index] for index in found.best_first(0)] == sorted(found.scores, reverse=True)
    assert len(found.best_first(2)) == 2


async def test_scores_are_logits_of_a_version_that_declares_the_identity(tmp_path: Path) -> None:
    declared = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    folder = reranker_version(tmp_path, **declared)
    encoded = tokenizer().encode("the fox", "the lazy dog")
    row = {"input_ids": np.array(encoded.ids), "token_type_ids": np.array(encoded.type_ids)}
    logit = float(load_model(folder).run(Padded([row], len(encoded.ids)))[0]["logits"][0])
    async with rows_gateway({"rerank": folder}) as gateway:
        assert (await rerank(gateway, "the fox", "the lazy dog")).scores == [pytest.approx(logit, abs=1e-6)]
        request = pb.ScoreRequest(model="rerank", firsts=["the fox"], seconds=["the lazy dog"])
        found = await gateway.rows.score(gateway.principal, request, received=gateway.received())
        assert found.scores == [pytest.approx(logit, abs=1e-6)]


async def test_pairs_are_one_first_with_every_second_or_one_each(gateway: RowsGateway) -> None:
    async def score(firsts: list[str], seconds: list[str]) -> list[float]:
        request = pb.ScoreRequest(model="rerank", firsts=firsts, seconds=seconds)
        found = await gateway.rows.score(gateway.principal, request, received=gateway.received())
        return found.scores

    crossed = await score(["the fox"], ["dog", "over"])
    assert crossed == await score(["the fox", "the fox"], ["dog", "over"])
    for firsts, seconds in ((["a", "b"], ["c"]), ([], ["c"]), (["a"], [])):
        with pytest.raises(InvalidInput, match="second texts: send one"):
            await score(firsts, seconds)


async def test_tensors_are_cut_into_rows_and_joined_again(gateway: RowsGateway) -> None:
    batch = np.arange(12, dtype=np.float32).reshape(3, 4)
    batch[1, 2] = np.nan  # is data
    tensor = common_pb2.Tensor(name="input", datatype="FP32", shape=[3, 4], data=batch.tobytes())
    request = pb.InferRequest(model="mlp", inputs=[tensor])
    found = await gateway.rows.infer(gateway.principal, request, received=gateway.received())
    (output,) = found.outputs
    assert (output.name, output.datatype, output.shape) == ("output", "FP32", (3, 3))
    values = np.frombuffer(output.data, np.float32).reshape(3, 3)
    assert np.isnan(values[1]).all()
    whole = gateway.runner.models[digest_of("mlp")].run(Padded([{"input": row} for row in batch]))
    # The rows ran in other batches than the whole, and the last bit of a sum depends on the batch.
    np.testing.assert_allclose(values, [row["output"] for row in whole], rtol=1e-6)
    assert found.answer.usage.prompt_tokens == 3  # a row without tokens counts as one


async def test_a_vector_is_cut_only_where_the_model_declares_it(gateway: RowsGateway) -> None:
    whole = (await embed(gateway, "the fox", model="cut")).vectors[0]
    cut = (await embed(gateway, "the fox", model="cut", dimensions=8)).vectors[0]
    assert cut.shape == (8,)
    assert np.linalg.norm(cut) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    assert (await embed(gateway, "the fox", dimensions=24)).vectors[0].shape == (24,)
    with pytest.raises(UnsupportedFeature, match="does not declare"):
        await embed(gateway, "the fox", dimensions=8)
    with pytest.raises(InvalidInput, match="above the model's 24"):
        await embed(gateway, "the fox", dimensions=25)
    with pytest.raises(InvalidInput, match="one of 8, 16"):
        await embed(gateway, "the fox", model="cut", dimensions=9)


LONG = "the fox " * 30


async def test_a_long_input_is_refused_or_cut_when_asked(gateway: RowsGateway) -> None:
    with pytest.raises(PromptTooLong) as refused:
        await embed(gateway, "dog", LONG)
    assert refused.value.metadata["field"] == "inputs[1]"
    assert refused.value.metadata["prompt_tokens"] == "62"
    cut = await embed(gateway, LONG, truncate_tokens=5)
    assert cut.answer.tokens == (5,)
    np.testing.assert_array_equal(cut.vectors[0], (await embed(gateway, "the fox the")).vectors[0])
    assert (await embed(gateway, LONG, truncate_tokens=0)).answer.tokens == (40,)
    ids = [pb.TokenIds(ids=range(4, 12))] * 2
    assert (await embed(gateway, token_ids=ids, truncate_tokens=3)).answer.tokens == (3, 3)
    with pytest.raises(InvalidInput, match="no room"):
        await embed(gateway, "dog", truncate_tokens=1)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"model": "none"}, ModelNotFound, "none"),
        ({"model": "reranker"}, ModelNotFound, "did you mean 'rerank'"),
        ({"model": "rerank"}, UnsupportedFeature, "the operation of rerank is score"),
        ({"model": "mlp"}, UnsupportedFeature, "the operation of mlp is infer"),
        ({"inputs": []}, InvalidInput, "has no inputs"),
        ({"token_ids": [pb.TokenIds(ids=[1])]}, InvalidInput, "both"),
        ({"inputs": [], "token_ids": [pb.TokenIds()]}, InvalidInput, "has no tokens"),
        ({"inputs": [], "token_ids": [pb.TokenIds(ids=[53])]}, InvalidInput, "vocabulary has 53"),
        ({"inputs": [], "token_ids": [pb.TokenIds(ids=[4] * 41)]}, PromptTooLong, "at most 40"),
        ({"inputs": ["dog"] * 2049}, InvalidInput, "2049"),
        ({"priority": common_pb2.PRIORITY_INTERACTIVE}, PermissionDenied, "above"),
        ({"version": "sha256:" + "0" * 64}, VersionGone, "does not serve"),
    ],
)
async def test_what_cannot_be_computed_is_refused_by_name(
    gateway: RowsGateway, fields: dict[str, Any], kind: type[FairwayError], text: str
) -> None:
    gateway.put_tenant(Tenant(Meta("acme"), max_priority=Priority.STANDARD))
    with pytest.raises(kind, match=text):
        await embed(gateway, **{"inputs": ["dog"], **fields})
    assert not gateway.runner.requests
    await at_rest(gateway)


async def test_limits_apply_and_release_what_they_refuse(gateway: RowsGateway) -> None:
    gateway.put_tenant(Tenant(Meta("acme"), requests_per_minute=2))
    await embed(gateway, "dog")
    await embed(gateway, "dog")
    with pytest.raises(RequestRateExceeded):
        await embed(gateway, "dog")
    await at_rest(gateway)


async def test_token_rates_count_input_tokens(gateway: RowsGateway) -> None:
    gateway.put_tenant(Tenant(Meta("acme"), input_tokens_per_minute=10))
    found = await embed(gateway, "the fox", "dog")  # 4 + 3
    assert found.answer.token_rate is not None
    assert found.answer.token_rate.remaining == 3
    with pytest.raises(TokenRateExceeded):
        await embed(gateway, "the fox")
    await embed(gateway, "dog")
    assert len(gateway.runner.requests) == 2
    await at_rest(gateway)


async def test_concurrency_is_held_while_rows_run(gateway: RowsGateway) -> None:
    gateway.put_tenant(Tenant(Meta("acme"), max_concurrency=1))
    gateway.runner.gate.clear()
    first = asyncio.create_task(embed(gateway, "dog"))
    await until(lambda: gateway.runner.running == 1)
    assert gateway.service.running == 1
    with pytest.raises(ConcurrencyExceeded):
        await embed(gateway, "dog")
    gateway.runner.gate.set()
    await first
    await embed(gateway, "dog")


async def test_a_budget_is_charged_the_input_price(folders: dict[str, Path]) -> None:
    async with rows_gateway(folders) as gateway:
        budgets = View()
        budgets.put(BUDGETS + "b", Budget(Meta("b"), "acme", limit_micros=8))
        object.__setattr__(gateway.ports, "budgets_of", TenantBudgets(budgets).of)
        await embed(gateway, "dog")  # 3 tokens at 2 micros
        with pytest.raises(BudgetExceeded):
            await embed(gateway, "dog")
        spent = await gateway.limiter.spent(
            "acme", [limit for limit in _limits(budgets) if limit.kind is LimitKind.MONTH_MICROS]
        )
        assert [entry.settled_micros for entry in spent] == [6]


def _limits(budgets: View) -> list[Any]:
    return [limit for held in budgets.view.values() for limit in held.record.limits("")]


async def test_use_is_reported_once_with_its_device_time(gateway: RowsGateway) -> None:
    await embed(gateway, "the fox", "dog", user="u")
    (event,) = gateway.reported
    assert event.usage.prompt_tokens == 7
    assert event.usage.output_tokens == 0
    assert event.usage.device_s == 0.5
    assert event.list_micros == 14
    assert (event.tenant, event.key_id, event.user, event.model) == ("acme", "alpha", "u", "embed")


async def test_the_first_error_of_a_row_fails_the_request_and_only_computed_rows_are_charged(
    gateway: RowsGateway,
) -> None:
    gateway.runner.ends = {
        1: RowEnd(error=InvalidInput("bad row", field="x")),
        2: RowEnd(error=Draining("no")),
    }
    with pytest.raises(InvalidInput, match="bad row") as failed:
        await embed(gateway, "the fox", "dog", "dog")
    assert failed.value.metadata["row"] == "1"
    (event,) = gateway.reported
    assert event.usage.prompt_tokens == 4
    await at_rest(gateway)


async def test_a_row_lost_twice_fails_the_request(gateway: RowsGateway) -> None:
    gateway.runner.ends = {0: RowEnd(error=StreamBroken("lost on w1 and on w2"))}
    with pytest.raises(StreamBroken):
        await embed(gateway, "dog")
    assert gateway.reported[0].usage.prompt_tokens == 0


@pytest.mark.parametrize(
    ("deaths", "text"), [(3, "ended the engine .* on 3 tries"), (0, "raised an exception in the model")]
)
async def test_a_poisonous_row_is_quarantined_and_refused_from_then_on(
    gateway: RowsGateway, deaths: int, text: str
) -> None:
    gateway.runner.ends = {1: RowEnd(error=PoisonedInput("it ends the process", deaths=deaths))}
    with pytest.raises(PoisonedInput):
        await embed(gateway, "the fox", "dog")
    row = gateway.runner.requests[0].rows[1]
    entry = gateway.quarantine.find(digest_of("embed"), fingerprint_of_row(row, SECRET))
    assert entry is not None
    assert entry.deaths == deaths
    gateway.runner.ends = {}
    await embed(gateway, "the fox")
    with pytest.raises(PoisonedInput, match=f"{text}.*; it is refused on this"):
        await embed(gateway, "quick", "dog")
    assert len(gateway.runner.requests) == 2
    await at_rest(gateway)


async def test_a_withdrawn_version_is_resolved_again(gateway: RowsGateway) -> None:
    gateway.runner.raises = [StaleRoute("withdrawn")]
    gateway.runner.on_run = lambda _: gateway.deploy("embed", "cut")
    found = await embed(gateway, "dog")
    assert found.answer.version_digest == digest_of("cut")
    assert [request.version_digest for request in gateway.runner.requests] == [
        digest_of("embed"),
        digest_of("cut"),
    ]
    (event,) = gateway.reported
    assert event.version_digest == digest_of("cut")


async def test_a_route_that_stays_stale_ends_the_request(gateway: RowsGateway) -> None:
    gateway.runner.raises = [StaleRoute("withdrawn")] * 100
    with pytest.raises(StaleRoute):
        await embed(gateway, "dog")
    assert len(gateway.runner.requests) == MAX_ROUTES
    await at_rest(gateway)


async def test_the_deadline_ends_a_request_and_is_passed_on(gateway: RowsGateway) -> None:
    gateway.runner.gate.clear()
    began_s = CLOCK.monotonic_s()
    with pytest.raises(DeadlineExceeded):
        await embed(gateway, "dog", timeout_s=1.0)
    assert not gateway.runner.running
    assert began_s + 1.0 <= gateway.runner.requests[0].deadline_s <= CLOCK.monotonic_s()
    await at_rest(gateway)


async def test_rows_have_the_latency_target_of_their_model_and_class(gateway: RowsGateway) -> None:
    def target_s(model: str, priority: Priority) -> float | None:
        return 0.25 if (model, priority) == ("embed", Priority.STANDARD) else None

    object.__setattr__(gateway.ports, "ttft_target_s", target_s)
    await embed(gateway, "dog", timeout_s=7.0)
    await embed(gateway, "dog", priority=common_pb2.PRIORITY_BATCH)
    first, second = gateway.runner.requests
    assert (first.target_s, second.target_s) == (0.25, 0.0)
    assert first.received_s == pytest.approx(first.deadline_s - 7.0)


async def test_a_request_that_cannot_meet_its_deadline_gives_its_quota_back(gateway: RowsGateway) -> None:
    gateway.put_tenant(Tenant(Meta("acme"), max_concurrency=1, input_tokens_per_minute=10))
    gateway.runner.raises = [DeadlineUnmeetable("8000 rows are ahead", retry_after_s=3.0)] * 3
    for _ in range(3):
        with pytest.raises(DeadlineUnmeetable) as refused:
            await embed(gateway, "the fox")
        assert refused.value.retry_after_s == 3.0
    found = await embed(gateway, "the fox")
    assert found.answer.token_rate is not None
    assert found.answer.token_rate.remaining == 6
    await at_rest(gateway)


async def test_a_cancelled_call_withdraws_its_rows(gateway: RowsGateway) -> None:
    gateway.runner.gate.clear()
    call = asyncio.create_task(embed(gateway, "dog"))
    await until(lambda: gateway.runner.running == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not gateway.runner.running
    await at_rest(gateway)


@pytest.mark.parametrize("by_its_task", [False, True])
async def test_a_cancellation_at_any_time_settles_it_once(gateway: RowsGateway, by_its_task: bool) -> None:
    await embed(gateway, "dog")
    reports = set()
    for step in range(40):
        gateway.reported.clear()
        gateway.runner.gate.clear()
        call = asyncio.create_task(embed(gateway, "dog"))
        await asyncio.sleep(step * 0.0005)
        if step == 39:
            await until(lambda: gateway.runner.running == 1)
        running = next(iter(gateway.service._requests), None)
        if by_its_task:
            call.cancel()
        elif running is not None:
            running.cancel()
        gateway.runner.gate.set()
        with contextlib.suppress(asyncio.CancelledError, RequestCancelled):
            await call
        await until(lambda: not gateway.supervisor.running)
        await at_rest(gateway)
        reports.add(len(gateway.reported))
    assert reports == {0, 1}


async def test_a_drain_rejects_new_requests_and_cuts_the_rest(gateway: RowsGateway) -> None:
    gateway.runner.gate.clear()
    call = asyncio.create_task(embed(gateway, "dog"))
    await until(lambda: gateway.runner.running == 1)
    gateway.service.reject_new()
    with pytest.raises(Draining):
        await embed(gateway, "dog")
    assert gateway.service.cancel_all(Draining("over", retry_after_s=1.0)) == 1
    with pytest.raises(Draining, match="over"):
        await call
    await at_rest(gateway)


async def test_no_replica_is_reported_before_anything_is_reserved(gateway: RowsGateway) -> None:
    key = next(key for key in gateway.deployments.view if key.endswith("embed"))
    deployment = gateway.deployments.view[key].record
    gateway.deployments.put(key, replace(deployment, replicas=0))
    with pytest.raises(NoWorkerAvailable, match="0 replicas"):
        await embed(gateway, "dog")


async def test_cancellation_has_its_own_error(gateway: RowsGateway) -> None:
    gateway.runner.gate.clear()
    call = asyncio.create_task(embed(gateway, "dog"))
    await until(lambda: gateway.runner.running == 1)
    next(iter(gateway.service._requests)).cancel()
    with pytest.raises(RequestCancelled):
        await call


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    coroutine.close()
    raise AssertionError("it waits")


async def test_a_hot_tenant_is_admitted_reserved_and_settled_at_once(folders: dict[str, Path]) -> None:
    clock = HandClock()  # how much a slice holds depends on the demand of a second
    limiter = GatewayLimiter(MemoryLimiter(clock), clock, slices=SliceSettings(hot_per_s=3))
    async with rows_gateway(folders, limiter=limiter) as gateway:
        gateway.put_tenant(
            Tenant(Meta("acme"), requests_per_minute=1_000_000, tokens_per_minute=1_000_000_000)
        )
        for _ in range(9):
            await embed(gateway, "the fox")
        quotas = RequestQuotas(gateway.identity, gateway.ports)
        payer = quotas.payer(gateway.principal, "")
        spawned = gateway.supervisor.running
        held = at_once(quotas.reserve("acme", "hot", payer.on_requests))
        at_once(held.claim(claims_of(payer, PRICE, 4), PRICE))
        assert limiter.leased == 1
        event = usage_of(payer, "hot", "embedder", "", PRICE, Usage(4, 0), 0.0)
        at_once(settled(gateway.ports, held.reservation, event))
        assert limiter.leased == 0
        assert gateway.supervisor.running == spawned
        refused = at_once(quotas.reserve("acme", "hot-2", payer.on_requests))
        await refused.undo(InvalidInput("it is refused later"))
        assert limiter.leased == 0, "what it held is given back"


async def test_new_limits_of_a_tenant_and_a_key_apply_to_the_next_request(gateway: RowsGateway) -> None:
    await embed(gateway, "the fox")
    gateway.put_tenant(Tenant(Meta("acme"), requests_per_minute=1))
    await embed(gateway, "the fox")
    with pytest.raises(RequestRateExceeded):
        await embed(gateway, "the fox")
    gateway.put_tenant(Tenant(Meta("acme")))
    await embed(gateway, "the fox")
    key = ApiKey(Meta("alpha"), KeyRole.TENANT, KEY_HASH, "acme", limits=UsageLimits(requests_per_minute=1))
    gateway.keys.put(KEYS + "alpha", key)
    await embed(gateway, "the fox")
    with pytest.raises(RequestRateExceeded):
        await embed(gateway, "the fox")


async def test_a_route_follows_its_deployment_and_its_workers(gateway: RowsGateway) -> None:
    def resolved() -> tuple[str, int]:
        route = gateway.catalog.resolve("mlp")
        return route.version_digest, route.ready_replicas

    assert resolved() == resolved() == (digest_of("mlp"), 1)
    loaded = LoadedVersion("mlp", "mlp", digest_of("mlp"), VersionState.READY)
    gateway.workers.put(WORKERS + "w2", Worker("w2", "w:2", versions=(loaded,)))
    assert resolved() == (digest_of("mlp"), 2)
    gateway.deploy("mlp", "cut")
    assert resolved() == (digest_of("cut"), 1)


async def test_an_answer_of_rows_counts_as_output_that_left(gateway: RowsGateway) -> None:
    texts = ["fox"] * 200
    await embed(gateway, "dog", idempotency_key="one")
    big = await embed(gateway, *texts, idempotency_key="key")
    rate = Tenant(Meta("acme"), egress_tokens_per_second=1)
    for key in ("key", ""):  # a replay, and a run
        gateway.put_tenant(rate)
        found = await embed(gateway, *texts, idempotency_key=key)
        assert len(found.vectors) == len(big.vectors)
        after = asyncio.create_task(embed(gateway, "dog"))
        await asyncio.sleep(0.3)
        assert not after.done(), "its bytes are more tokens than a bucket has"
        gateway.put_tenant(Tenant(Meta("acme")))
        await after
        await asyncio.sleep(2 * TICK_S)  # without a rate the debt is forgotten
    await at_rest(gateway)


@pytest.mark.parametrize("owner", ["acme", ""])
async def test_rows_wait_for_a_node_of_their_tenant_that_they_start(gateway: RowsGateway, owner: str) -> None:
    """What runs on shared nodes cannot serve a dedicated tenant: it is not held for that."""
    gateway.put_tenant(Tenant(Meta("acme"), isolation=IsolationTier.DEDICATED))
    held = gateway.deployments.view[DEPLOYMENTS + "embed"].record
    gateway.deployments.put(DEPLOYMENTS + "embed", replace(held, tenant=owner), 42)
    await embed(gateway, "the fox")
    gateway.sleep("embed")
    await embed(gateway, "the fox")
    serving, sleeping = gateway.runner.requests
    assert serving.node_group == "dedicated/acme"
    assert not serving.isolation_waits
    assert sleeping.isolation_waits == bool(owner)
