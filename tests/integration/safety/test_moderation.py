"""Texts judged by a safety pack over gRPC and HTTP, and requests that obey one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.client import Client, FairwayError
from fairway.v1 import inference_pb2 as pb
from services.core.records import KEYS, Meta, Tenant
from tests.integration.rows.http import ask
from tests.support.rows_fixtures import folders
from tests.support.rows_gateway import API_KEY, AUTH, RowsGateway, Sockets, digest_of, rows_gateway, served
from tests.support.waiting import until

__all__ = ["folders"]

POLICY = {
    "categories": {"bad": {"action": "block"}, "mail": {"action": "redact"}, "mood": {"action": "flag"}},
    "lists": [
        {"category": "bad", "phrases": ["kaboom"]},
        {"category": "bad", "phrases": ["zap"], "scopes": ["output"]},
    ],
    "personal_data": [{"category": "mail", "kinds": ["email"]}],
}
# The labels of the classifier of these tests.
CLASSIFIER = {
    "model": "emotion",
    "labels": {"anger": "mood", "joy": "mood"},
    "threshold": 1.0,
    "every_tokens": 8,
}


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "safety_policy.json").write_text(json.dumps(POLICY | changes))
    return folder


@pytest.fixture
async def gateway(folders: dict[str, Path], tmp_path: Path) -> AsyncIterator[RowsGateway]:
    async with rows_gateway(folders) as found:
        found.deploy_pack("strict", write(tmp_path / "strict"))
        found.put_tenant(Tenant(Meta("acme"), safety_pack="strict"))
        yield found


@pytest.fixture
async def sockets(gateway: RowsGateway) -> AsyncIterator[Sockets]:
    async with served(gateway) as found:
        yield found


def flagged(result: pb.Moderation) -> dict[str, float]:
    return {one.name: one.score for one in result.categories if one.flagged}


async def moderated(sockets: Sockets, *texts: str, **fields: Any) -> pb.ModerateResponse:
    request = pb.ModerateRequest(inputs=texts, **fields)
    return await sockets.stub.Moderate(request, metadata=AUTH, timeout=20)


async def test_texts_are_judged_by_the_tenants_pack(sockets: Sockets) -> None:
    found = await moderated(sockets, "all is well", "k a b o o m", "KABOOM to a@b.example", "zap")
    assert (found.pack, found.pack_digest, list(found.skipped)) == ("strict", digest_of("strict"), [])
    assert [one.flagged for one in found.results] == [False, False, True, False]
    assert [flagged(one) for one in found.results] == [{}, {}, {"bad": 1.0, "mail": 1.0}, {}]
    assert [(one.name, one.action) for one in found.results[0].categories] == [
        ("bad", "block"),
        ("mail", "redact"),
        ("mood", "flag"),
    ]
    outputs = await moderated(sockets, "zap", outputs=True)
    assert flagged(outputs.results[0]) == {"bad": 1.0}


async def test_the_shape_is_openais(sockets: Sockets) -> None:
    body = {"input": ["fine", "kaboom"], "model": "omni-moderation-latest"}
    answer = await ask(sockets.http_port, "POST", "/v1/moderations", body)
    assert answer.status == 200, answer.body
    assert answer.json["id"].startswith("modr-")
    assert answer.json["model"] == "strict"
    fine, bad = answer.json["results"]
    assert (fine["flagged"], bad["flagged"]) == (False, True)
    assert bad["categories"] == {"bad": True, "mail": False, "mood": False}
    assert bad["category_scores"] == {"bad": 1.0, "mail": 0.0, "mood": 0.0}
    assert bad["category_applied_input_types"]["bad"] == ["text"]
    one = await ask(sockets.http_port, "POST", "/v1/moderations", {"input": "kaboom", "model": "strict"})
    assert one.json["results"] == [bad]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "kaboom"}]
    joined = await ask(sockets.http_port, "POST", "/v1/moderations", {"input": parts})
    assert joined.json["results"] == [bad]


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"input": []}, 400, "input"),
        ({"input": ["x" * 200_000] * 2}, 400, "input"),
        ({"input": "x" * 300_000}, 400, "input[0]"),
        ({"input": ["x", {"type": "text", "text": "y"}]}, 400, "input"),
        ({"input": [{"type": "image_url", "image_url": {"url": "data:"}}]}, 400, "input[0]"),
        ({"input": "x", "model": "emotion"}, 404, "model"),
        ({"input": "x", "model": "nothing"}, 404, "model"),
        ({}, 400, "input"),
    ],
)
async def test_what_is_no_call_is_refused(sockets: Sockets, body: Any, status: int, field: str) -> None:
    answer = await ask(sockets.http_port, "POST", "/v1/moderations", body)
    assert (answer.status, answer.error["param"]) == (status, field), answer.body


async def test_the_client_and_keys(sockets: Sockets, gateway: RowsGateway) -> None:
    async with Client(f"127.0.0.1:{sockets.grpc_port}", api_key=API_KEY) as client:
        found = await client.moderate(["kaboom"], pack="strict")
        assert (found.pack, found.results[0].flagged) == ("strict", True)
        assert found.results[0].categories[0].action == "block"
        key = gateway.keys.view[KEYS + "alpha"].record
        gateway.keys.put(KEYS + "alpha", replace(key, models=("emotion",)))
        assert (await client.moderate(["kaboom"])).results[0].flagged, "the tenant's own is for every key"
        gateway.deploy_pack("other", gateway.by_digest[digest_of("strict")])
        with pytest.raises(FairwayError) as refused:
            await client.moderate(["kaboom"], pack="other")
        assert refused.value.reason == "MODEL_NOT_FOUND"
    unknown = await ask(sockets.http_port, "POST", "/v1/moderations", {"input": "x"}, key=None)
    assert unknown.status == 401
    gateway.put_tenant(Tenant(Meta("acme")))
    with pytest.raises(grpc.aio.AioRpcError, match="has no safety pack: name one"):
        await moderated(sockets, "x")


async def test_a_classifier_is_asked_and_charged_to_the_tenant(
    gateway: RowsGateway, sockets: Sockets, tmp_path: Path
) -> None:
    texts = ["the fox", "dog"]
    answer = await ask(sockets.http_port, "POST", "/v1/classify", {"model": "emotion", "input": texts})
    probabilities = [max(entry["probs"][:2]) for entry in answer.json["data"]]
    between = sum(probabilities) / 2
    both = {**CLASSIFIER, "threshold": between, "scopes": ["input"]}
    gateway.deploy_pack("moody", write(tmp_path / "moody", classifiers=[both]))
    before = len(gateway.reported)
    found = await moderated(sockets, *texts, pack="moody")
    scores = [one.categories[2].score for one in found.results]
    assert scores == pytest.approx(probabilities)
    assert [one.flagged for one in found.results] == [score >= between for score in scores]
    await until(lambda: [one.model for one in gateway.reported[before:]] == ["emotion"])
    topics = {**both, "model": "topics"}
    gateway.deploy_pack("both", write(tmp_path / "both", classifiers=[both, topics]))
    await moderated(sockets, *texts, pack="both")
    await until(lambda: len(gateway.reported) == before + 3)
    charged = gateway.reported[before + 1 :]
    assert sorted(one.model for one in charged) == ["emotion", "topics"]
    assert len({one.request_id for one in charged}) == 2, "a request id is charged once"
    assert not (await moderated(sockets, *texts, pack="moody", outputs=True)).results[0].categories[2].score


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "gone"}, "gone"),
        ({"labels": {"rage": "mood"}}, "no label 'rage'"),
        ({"model": "mlp"}, "mlp"),
    ],
)
async def test_a_classifier_that_does_not_judge_fails_the_call(
    gateway: RowsGateway, sockets: Sockets, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    broken = CLASSIFIER | changes
    gateway.deploy_pack("broken", write(tmp_path / "broken", classifiers=[broken]))
    with pytest.raises(grpc.aio.AioRpcError, match=problem):
        await moderated(sockets, "all is well", pack="broken")


async def test_what_judges_generations_alone_is_named(
    gateway: RowsGateway, sockets: Sockets, tmp_path: Path
) -> None:
    probe = {"category": "mood", "threshold": 0.5}
    gateway.deploy_pack("probed", write(tmp_path / "probed", probe=probe))
    assert list((await moderated(sockets, "x", pack="probed")).skipped) == []
    assert list((await moderated(sockets, "x", pack="probed", outputs=True)).skipped) == ["probe"]


async def test_a_tenant_without_room_is_refused_before_a_model_is_asked(
    gateway: RowsGateway, sockets: Sockets, tmp_path: Path
) -> None:
    gateway.deploy_pack("moody", write(tmp_path / "moody", classifiers=[CLASSIFIER]))
    gateway.put_tenant(Tenant(Meta("acme"), safety_pack="moody", tokens_per_minute=8))
    with pytest.raises(grpc.aio.AioRpcError, match="tokens"):
        await moderated(sockets, "the fox " * 8)
    assert not gateway.reported
    await moderated(sockets, "fox")
    await until(lambda: bool(gateway.reported))


async def test_a_call_ends_at_its_deadline(gateway: RowsGateway, sockets: Sockets, tmp_path: Path) -> None:
    gateway.deploy_pack("moody", write(tmp_path / "moody", classifiers=[CLASSIFIER]))
    gateway.runner.gate.clear()
    body = {"input": "fox", "model": "moody"}
    answer = await ask(sockets.http_port, "POST", "/v1/moderations", body, x_request_timeout_s="0.2")
    assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded"), answer.body
    gateway.runner.gate.set()
