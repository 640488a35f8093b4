"""Embeddings, rerank and score over HTTP, in the shapes of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from services.core.records import Meta, Tenant
from tests.integration.rows.http import ask
from tests.support.rows_gateway import RowsGateway, served
from tests.support.waiting import until


async def test_embeddings_as_floats_and_in_base64(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        body: dict[str, Any] = {"model": "embed", "input": ["the fox", "dog"], "user": "u"}
        plain = await ask(sockets.http_port, "POST", "/v1/embeddings", body)
        assert plain.status == 200
        assert plain.json["object"] == "list"
        assert plain.json["model"] == "embed"
        assert plain.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
        data = plain.json["data"]
        assert [(entry["object"], entry["index"]) for entry in data] == [("embedding", 0), ("embedding", 1)]
        packed = await ask(sockets.http_port, "POST", "/v1/embeddings", body | {"encoding_format": "base64"})
        for entry, other in zip(data, packed.json["data"], strict=True):
            values = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
            np.testing.assert_array_equal(np.array(entry["embedding"], np.float32), values)


async def test_an_input_is_a_text_texts_ids_or_lists_of_ids(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:

        async def first(value: Any) -> Any:
            found = await ask(sockets.http_port, "POST", "/v1/embeddings", {"model": "embed", "input": value})
            assert found.status == 200, found.body
            return found.json["data"][0]["embedding"]

        expected = await first("the fox")
        assert await first(["the fox", "dog"]) == expected
        assert await first([2, 4, 7, 3]) == expected
        assert await first([[2, 4, 7, 3], [2, 3]]) == expected


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_rerank(gateway: RowsGateway, path: str) -> None:
    documents = ["dog", {"text": "over"}, "lazy dog"]
    body = {"model": "rerank", "query": "the fox", "documents": documents}
    async with served(gateway) as sockets:
        found = (await ask(sockets.http_port, "POST", path, body)).json
        assert found["id"].startswith("rerank-")
        scores = [result["relevance_score"] for result in found["results"]]
        assert scores == sorted(scores, reverse=True)
        assert sorted(result["index"] for result in found["results"]) == [0, 1, 2]
        texts = ["dog", "over", "lazy dog"]
        assert all(result["document"] == {"text": texts[result["index"]]} for result in found["results"])
        short = body | {"top_n": 1, "return_documents": False}
        (best,) = (await ask(sockets.http_port, "POST", path, short)).json["results"]
        assert best == {key: found["results"][0][key] for key in ("index", "relevance_score")}


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_score(gateway: RowsGateway, path: str) -> None:
    async with served(gateway) as sockets:
        body = {"model": "rerank", "text_1": "the fox", "text_2": ["dog", "over"]}
        found = (await ask(sockets.http_port, "POST", path, body)).json
        assert found["object"] == "list"
        assert [(entry["object"], entry["index"]) for entry in found["data"]] == [("score", 0), ("score", 1)]
        assert all(0 < entry["score"] < 1 for entry in found["data"])
        other = {"model": "rerank", "queries": ["the fox"] * 2, "documents": ["dog", "over"]}
        again = (await ask(sockets.http_port, "POST", path, other)).json
        assert again["data"] == found["data"]
        assert found["usage"]["prompt_tokens"] == 2 * 6


@pytest.mark.parametrize(
    ("path", "change", "status", "code", "param"),
    [
        ("/v1/embeddings", {"model": "none"}, 404, "model_not_found", "model"),
        ("/v1/embeddings", {"model": "rerank"}, 400, "unsupported_feature", "model"),
        ("/v1/embeddings", {"input": []}, 400, "invalid_input", "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, 400, "invalid_input", "input"),
        ("/v1/embeddings", {"input": [-1]}, 400, "invalid_input", "input"),
        ("/v1/embeddings", {"input": [53]}, 400, "invalid_input", "input[0]"),
        ("/v1/embeddings", {"input": [[]]}, 400, "invalid_input", "input[0]"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "invalid_input", "input"),
        ("/v1/embeddings", {"input": ["fox " * 99]}, 400, "context_length_exceeded", "input[0]"),
        ("/v1/embeddings", {"dimensions": 8}, 400, "unsupported_feature", "dimensions"),
        ("/v1/embeddings", {"dimensions": 0}, 400, "invalid_input", "dimensions"),
        ("/v1/embeddings", {"dimensions": 10**9}, 400, "invalid_input", "dimensions"),
        ("/v1/embeddings", {"encoding_format": "hex"}, 400, "invalid_input", "encoding_format"),
        ("/v1/embeddings", {"truncate_prompt_tokens": 0}, 400, "invalid_input", "truncate_prompt_tokens"),
        ("/v1/embeddings", {"truncate_prompt_tokens": 1}, 400, "invalid_input", "truncate_prompt_tokens"),
        (
            "/v1/embeddings",
            {"truncate_prompt_tokens": 10**12},
            400,
            "invalid_input",
            "truncate_prompt_tokens",
        ),
        ("/v1/embeddings", {"add_special_tokens": False}, 400, "unsupported_feature", "add_special_tokens"),
        ("/v1/embeddings", {"unheard_of": 1}, 400, "invalid_input", "unheard_of"),
        ("/v1/rerank", {"documents": []}, 400, "invalid_input", "documents"),
        ("/v1/rerank", {"query": ""}, 400, "invalid_input", "query"),
        ("/v1/rerank", {"model": "embed"}, 400, "unsupported_feature", "model"),
        ("/v1/rerank", {"max_tokens_per_doc": 10}, 400, "unsupported_feature", "max_tokens_per_doc"),
        ("/v1/rerank", {"documents": ["fox " * 99]}, 400, "context_length_exceeded", "documents[0]"),
        ("/v1/score", {"text_1": ["a", "b", "c"]}, 400, "invalid_input", "text_1"),
        ("/v1/score", {"text_2": None}, 400, "invalid_input", "text_2"),
        ("/v1/score", {"queries": "a"}, 400, "invalid_input", "text_1"),
    ],
)
async def test_bad_input_is_refused_by_name(
    gateway: RowsGateway, path: str, change: dict[str, Any], status: int, code: str, param: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"model": "embed", "input": "dog"},
        "/v1/rerank": {"model": "rerank", "query": "fox", "documents": ["dog"]},
        "/v1/score": {"model": "rerank", "text_1": "fox", "text_2": ["dog", "fox"]},
    }
    async with served(gateway) as sockets:
        found = await ask(sockets.http_port, "POST", path, bodies[path] | change)
        assert (found.status, found.error["code"], found.error["param"]) == (status, code, param), found.body
        assert param.split("[")[0] in found.error["message"]
    assert not gateway.runner.requests


async def test_headers_apply_and_rates_are_returned(gateway: RowsGateway) -> None:
    gateway.put_tenant(Tenant(Meta("acme"), requests_per_minute=2))
    body = {"model": "embed", "input": "dog"}
    async with served(gateway) as sockets:

        async def send(**headers: str) -> Any:
            return await ask(sockets.http_port, "POST", "/v1/embeddings", body, **headers)

        found = await send()
        assert found.headers["x-ratelimit-limit-requests"] == "2"
        assert (await send(x_model_version="sha256:0")).error["code"] == "version_gone"
        gateway.runner.gate.clear()
        late = await send(x_request_timeout_s="0.05")
        assert (late.status, late.error["type"]) == (504, "timeout_error")
        gateway.runner.gate.set()
        limited = await send()
        assert (limited.status, limited.error["code"]) == (429, "rate_limit_exceeded")
        assert "retry-after" in limited.headers


async def test_a_client_that_disconnects_withdraws_its_rows(gateway: RowsGateway) -> None:
    gateway.runner.gate.clear()
    async with served(gateway) as sockets:
        call = asyncio.create_task(
            ask(sockets.http_port, "POST", "/v1/embeddings", {"model": "embed", "input": "dog"})
        )
        while not gateway.runner.running:
            await asyncio.sleep(0.005)
        call.cancel()
        await until(lambda: not gateway.runner.running and not gateway.service.running)


async def test_the_list_of_models_has_fixed_cost_models(gateway: RowsGateway) -> None:
    async with served(gateway) as sockets:
        found = await ask(sockets.http_port, "GET", "/v1/models")
        assert [entry["id"] for entry in found.json["data"]] == [
            "animals",
            "cut",
            "embed",
            "emotion",
            "mlp",
            "rerank",
            "topics",
        ]
