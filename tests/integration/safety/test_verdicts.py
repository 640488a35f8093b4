"""Verdicts of classifiers as rows: the tenant's turn and charge, inputs of rows, and what is no verdict."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.v1 import inference_pb2 as pb
from services.core.errors import PoisonedInput, Unavailable
from services.core.fixed_cost.rows import RawTensor, RowEnd, RowsRequest
from services.core.generation import NO_USAGE
from services.core.records import Meta, Priority, Tenant
from services.core.rollouts.routes import SHADOW_TENANT
from services.core.safety import UNAVAILABLE
from services.gateway.policy.claims import Payer
from services.gateway.safety.requests import Asker, RequestSafety
from services.rpc.status import from_rpc_error
from tests.support.rows_fixtures import folders
from tests.support.rows_gateway import AUTH, CLOCK, RowsGateway, rows_gateway, served
from tests.support.safety import pack_of, terms_of
from tests.support.waiting import until

__all__ = ["folders"]

GUARD = {"model": "emotion", "labels": {"anger": "mood"}, "threshold": 0.0, "every_tokens": 8}
PACK = {"categories": {"mood": {"action": "block"}}, "classifiers": [GUARD], "window_tokens": 8}


@pytest.fixture
async def gateway(folders: dict[str, Path]) -> AsyncIterator[RowsGateway]:
    async with rows_gateway(folders) as found:
        yield found


def safety_of(gateway: RowsGateway, **changes: Any) -> RequestSafety:
    tenant = gateway.identity.still_valid(gateway.principal)
    key = gateway.identity.tenant_and_key(gateway.principal)[1]
    asker = Asker(
        "req_1", gateway.principal, Payer(tenant, key), Priority.INTERACTIVE, "s", CLOCK.monotonic_s() + 60
    )
    assert gateway.ports.safety is not None
    return gateway.ports.safety.open(terms_of(pack_of(**(PACK | changes))), asker)


async def judged(safety: RequestSafety, text: str) -> tuple[str, ...]:
    (rule,) = safety.models("output")
    return await safety.judge(rule, text, "output")


class Watched:
    """A runner that keeps what was asked and answers as a test sets."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.asked: list[RowsRequest] = []
        self.answer: Any = None

    async def run(self, request: RowsRequest) -> tuple[RowEnd, ...]:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return (self.answer,) * len(request.rows)
        found: tuple[RowEnd, ...] = await self.inner.run(request)
        return found


def watched(gateway: RowsGateway) -> Watched:
    assert gateway.ports.safety is not None
    classifiers: Any = gateway.ports.safety.classifiers
    runner = classifiers._runner = Watched(gateway.runner)
    return runner


async def test_a_verdict_is_a_row_of_the_tenant_and_is_charged(gateway: RowsGateway) -> None:
    runner, safety = watched(gateway), safety_of(gateway)
    assert await judged(safety, "the cat is fine") == ("mood",)
    (asked,) = runner.asked
    assert (asked.tenant_id, asked.model, asked.priority) == ("acme", "emotion", Priority.INTERACTIVE)
    await judged(safety, "the dog")
    safety.end(NO_USAGE)
    await until(lambda: bool(gateway.reported))
    (event,) = gateway.reported
    assert (event.tenant, event.model) == ("acme", "emotion")
    assert event.usage.prompt_tokens == sum(row[0].shape[0] for one in runner.asked for row in one.rows)
    assert event.list_micros > 0
    assert {one.request_id for one in runner.asked} == {event.request_id}, "workers report the same request"


async def test_no_tenant_is_charged_for_a_pack_that_only_compares(gateway: RowsGateway) -> None:
    runner, desk = watched(gateway), gateway.ports.safety
    assert desk is not None
    asker = safety_of(gateway)._asker
    opened = desk.open(terms_of(pack_of(**PACK), shadow=pack_of(**PACK)), asker)
    assert opened.shadow is not None
    assert await judged(opened.shadow, "the dog") == ("mood",)
    assert [one.tenant_id for one in runner.asked] == [SHADOW_TENANT], "its workers report use of that tenant"
    opened.end(NO_USAGE)
    await asyncio.sleep(0.05)
    assert not gateway.reported


async def test_a_long_text_is_judged_in_parts_to_its_end(gateway: RowsGateway) -> None:
    runner, safety = watched(gateway), safety_of(gateway)
    text = " ".join(["cat"] * 300)
    assert await judged(safety, text) == ("mood",)
    rows = [row[0].shape[0] for one in runner.asked for row in one.rows]
    assert len(rows) > 1
    assert sum(rows) >= 300


def tensor(data: bytes, shape: tuple[int, ...], datatype: str = "FP32") -> RawTensor:
    return RawTensor("logits", datatype, shape, data)


@pytest.mark.parametrize(
    "answer",
    [
        Unavailable("gone"),
        RowEnd(error=PoisonedInput("it ends the process", deaths="1")),
        RowEnd((tensor(bytes(4), (1,)),)),
        RowEnd((tensor(bytes(24), (3,), "FP64"),)),
        RowEnd(()),
        RowEnd((tensor(b"\xff\xff\xff\x7f" * 3, (3,)),)),
    ],
    ids=["gone", "poison", "shape", "type", "nothing", "nan"],
)
async def test_what_is_no_verdict_is_the_policys_choice(gateway: RowsGateway, answer: Any) -> None:
    watched(gateway).answer = answer
    assert await judged(safety_of(gateway), "text") == (UNAVAILABLE,)
    assert await judged(safety_of(gateway, fail="open"), "text") == ()


@pytest.mark.parametrize("rule", [{"model": "nothing"}, {"labels": {"other": "mood"}}, {"model": "minilm"}])
async def test_a_model_that_does_not_fit_gives_no_verdict(gateway: RowsGateway, rule: Any) -> None:
    safety = safety_of(gateway, classifiers=[GUARD | rule])
    assert await judged(safety, "text") == (UNAVAILABLE,)
    assert safety.pack.classifiers[0].model == (GUARD | rule)["model"]
    name = "fairway_gateway_safety_verdicts_missed_total"
    found = [one for one in gateway.metrics.collect() if one.name + "_total" == name]
    assert found[0].samples[0].value == 1


async def test_a_poisoned_text_is_refused_by_the_fleet(gateway: RowsGateway) -> None:
    runner = watched(gateway)
    runner.answer = RowEnd(error=PoisonedInput("it ends the process", deaths="2"))
    safety = safety_of(gateway)
    await judged(safety, "poison")
    assert await judged(safety, "poison") == (UNAVAILABLE,)
    assert len(runner.asked) == 1, "the second was refused before it ran"


@pytest.fixture
async def strict(gateway: RowsGateway, tmp_path: Path) -> RowsGateway:
    folder = tmp_path / "strict"
    folder.mkdir()
    policy = {
        "categories": {"bad": {"action": "block"}, "word": {"action": "redact"}},
        "lists": [{"category": "bad", "phrases": ["fox"]}, {"category": "word", "phrases": ["dog"]}],
    }
    (folder / "safety_policy.json").write_text(json.dumps(policy))
    gateway.deploy_pack("strict", folder)
    gateway.put_tenant(Tenant(Meta("acme"), safety_pack="strict"))
    return gateway


@pytest.mark.parametrize(
    ("call", "request_", "field"),
    [
        ("Embed", pb.EmbedRequest(model="embed", inputs=["the lazy", "quick fox"]), "inputs[1]"),
        ("Embed", pb.EmbedRequest(model="embed", token_ids=[pb.TokenIds(ids=[2, 7, 3])]), "token_ids[0]"),
        ("Embed", pb.EmbedRequest(model="embed", token_ids=[pb.TokenIds(ids=[2, 11, 3])]), "token_ids[0]"),
        ("Rerank", pb.RerankRequest(model="rerank", query="fox", documents=["lazy"]), "query[0]"),
        ("Rerank", pb.RerankRequest(model="rerank", query="lazy", documents=["the fox"]), "documents[0]"),
        ("Score", pb.ScoreRequest(model="rerank", firsts=["fox"], seconds=["lazy"]), "firsts[0]"),
        ("Infer", pb.InferRequest(model="emotion", texts=["lazy", "fox"]), "texts[1]"),
    ],
)
async def test_inputs_of_rows_are_filtered(strict: RowsGateway, call: str, request_: Any, field: str) -> None:
    runner = strict.runner = watched(strict)
    async with served(strict) as sockets:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(sockets.stub, call)(request_, metadata=AUTH, timeout=20)
    error = from_rpc_error(refused.value)
    assert (error.reason, error.metadata["field"]) == ("CONTENT_FILTERED", field)
    assert not runner.asked


async def test_inputs_of_rows_are_redacted(strict: RowsGateway) -> None:
    async with served(strict) as sockets:
        vectors = [
            (
                await sockets.stub.Embed(pb.EmbedRequest(model="embed", inputs=[text]), metadata=AUTH)
            ).embeddings
            for text in ("the dog jumps", "the [redacted] jumps", "the lazy jumps")
        ]
    assert vectors[0] == vectors[1] != vectors[2]
