"""The Python client's calls for fixed-cost models, against a gateway over a real socket."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairway.client import Client, InvalidRequest, NotFound, RowOptions, Tensor
from tests.support import picture_files
from tests.support.row_versions import (
    classifier_version,
    embedding_version,
    mlp_version,
    picture_version,
    reranker_version,
)
from tests.support.rows_gateway import API_KEY, RowsGateway, digest_of, rows_gateway, served


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("versions")
    return {
        "embed": embedding_version(root / "embed"),
        "rerank": reranker_version(root / "rerank"),
        "emotion": classifier_version(root / "emotion"),
        "animals": picture_version(root / "animals"),
        "mlp": mlp_version(root / "mlp"),
    }


@pytest.fixture
async def gateway(folders: dict[str, Path]) -> AsyncIterator[RowsGateway]:
    async with rows_gateway(folders) as found:
        yield found


@pytest.fixture
async def client(gateway: RowsGateway) -> AsyncIterator[Client]:
    async with (
        served(gateway) as sockets,
        Client(f"127.0.0.1:{sockets.grpc_port}", api_key=API_KEY) as found,
    ):
        yield found


async def test_embed_takes_a_text_texts_or_token_ids(client: Client) -> None:
    found = await client.embed("embed", ["the fox", "dog"])
    assert found.accepted.model == "embed"
    assert found.accepted.version_digest == digest_of("embed")
    assert (found.accepted.usage.prompt_tokens, found.accepted.usage.device_s) == (7, 0.5)
    assert (await client.embed("embed", "the fox")).vectors == found.vectors[:1]
    assert (await client.embed("embed", [[2, 4, 7, 3], [2, 11, 3]])).vectors == found.vectors
    mixed: Any = ["the fox", [2, 3]]
    with pytest.raises(TypeError, match="texts, or lists"):
        await client.embed("embed", mixed)


async def test_classify_returns_the_label_and_all_probabilities(client: Client) -> None:
    found = await client.classify("emotion", ["the fox", "dog"], RowOptions(truncate_tokens=0))
    assert found.accepted.usage.prompt_tokens == 7
    for result in found.results:
        best = max(range(3), key=result.probabilities.__getitem__)
        assert result.label == ("anger", "joy", "fear \u00e9")[best]
        assert sum(result.probabilities) == pytest.approx(1.0)
    (one,) = (await client.classify("emotion", "the fox")).results
    assert one == found.results[0]


async def test_classify_takes_files_of_pictures(client: Client) -> None:
    files = [picture_files.picture(random.Random(seed), 30, 20, kind="JPEG") for seed in range(2)]
    found = await client.classify("animals", files)
    assert [result.label in ("cat", "dog") for result in found.results] == [True, True]
    assert found.results[0] != found.results[1]
    assert (await client.classify("animals", files[0])).results == found.results[:1]
    with pytest.raises(InvalidRequest, match=r"images\[1\]: the picture cannot be read"):
        await client.classify("animals", [files[0], b"GIF89a"])


async def test_rerank_returns_the_best_first(client: Client) -> None:
    found = await client.rerank("rerank", "the fox", ["dog", "over", "lazy dog"])
    scores = [result.score for result in found.results]
    assert scores == sorted(scores, reverse=True)
    best = await client.rerank("rerank", "the fox", ["dog", "over", "lazy dog"], top_n=1)
    assert best.results == found.results[:1]


async def test_infer_takes_arrays_and_returns_tensors(client: Client, gateway: RowsGateway) -> None:
    batch = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = await client.infer("mlp", {"input": batch})
    output = found.outputs["output"]
    assert (output.datatype, output.shape) == ("FP32", (2, 3))
    again = await client.infer("mlp", {"input": Tensor("FP32", (2, 4), batch.tobytes())}, outputs=["output"])
    assert again.outputs == found.outputs
    transposed = await client.infer("mlp", {"input": np.ascontiguousarray(batch.T).T})
    np.testing.assert_array_equal(np.asarray(transposed.outputs["output"].view), np.asarray(output.view))
    with pytest.raises(TypeError, match="no data type"):
        await client.infer("mlp", {"input": np.array(["a"])})
    with pytest.raises(ValueError, match="for texts"):
        await client.infer("mlp", {"input": batch}, RowOptions(truncate_tokens=1))


async def test_options_and_errors_pass(client: Client, gateway: RowsGateway) -> None:
    await client.embed("embed", "fox " * 99, RowOptions(truncate_tokens=0, user="u"))
    assert gateway.reported[0].user == "u"
    with pytest.raises(InvalidRequest, match="at most 40"):
        await client.embed("embed", "fox " * 99)
    with pytest.raises(NotFound):
        await client.embed("none", "fox")
