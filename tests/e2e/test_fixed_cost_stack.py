"""A fixed-cost model in a whole installation: published, deployed on two workers, and called."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from fairway.v1 import common_pb2, inference_pb2
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Padded
from tests.support.fixed_cost import save_last_token
from tests.support.row_versions import mlp_version
from tests.support.stack import ROOT, Stack, at_rest, fairway, kill, metadata

MODEL = "mlp"
Values = NDArray[np.float32]


@contextlib.asynccontextmanager
async def deployed(stack: Stack, folder: Path, name: str, *, replicas: int) -> AsyncIterator[None]:
    """Publish and serve the folder's model; leave the workers as they were."""
    state = ("--state-dir", str(stack.state))
    fairway("models", "publish", str(folder), "--name", name, *state)
    fairway("deployments", "create", name, "--replicas", str(replicas), "--wait", *state)
    try:
        yield
    finally:
        fairway("deployments", "delete", name, "--yes", *state)
        await stack.wait_workers(at_rest, timeout_s=60)
        stack.wait_ready()


async def infer(stack: Stack, values: Values) -> Values:
    tensor = common_pb2.Tensor(name="input", datatype="FP32", shape=values.shape, data=values.tobytes())
    async with stack.inference() as stub:
        answer = await stub.Infer(
            inference_pb2.InferRequest(model=MODEL, inputs=[tensor]),
            metadata=metadata(stack.api_key),
            timeout=60,
        )
    (output,) = answer.outputs
    return np.frombuffer(output.data, np.float32).reshape(tuple(output.shape))


def expected(folder: Path, values: Values) -> Values:
    model = load_model(folder)
    found = model.run(Padded([{"input": row} for row in values], 0))
    return np.stack([outputs[model.facts.outputs[0].name] for outputs in found])


async def test_rows_are_computed_by_the_workers_and_outlive_the_leader(stack: Stack, tmp_path: Path) -> None:
    folder = mlp_version(tmp_path / "model")
    values = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    async with deployed(stack, folder, MODEL, replicas=2):
        found = await infer(stack, values)
        assert np.allclose(found, expected(folder, values), atol=1e-5)
        answers = await asyncio.gather(*(infer(stack, values[row : row + 1]) for row in range(40)))
        assert np.allclose(np.concatenate(answers), found, atol=1e-5)
        (scheduler, *_) = stack.pids("services scheduler")
        kill(scheduler)
        again = await asyncio.gather(*(infer(stack, values[row : row + 1]) for row in range(40)))
        assert np.allclose(np.concatenate(again), found, atol=1e-5)


async def test_a_decoder_embeds_texts_by_its_last_token(stack: Stack, tmp_path: Path) -> None:
    """Published with the modules that declare it; equal to transformers to 1e-5, and it still generates."""
    folder = tmp_path / "embedder"
    shutil.copytree(ROOT / "models/tiny/checkpoint", folder)
    save_last_token(folder)
    texts = ["The order of Ann", "two", "a longer text about an order " * 12]
    async with deployed(stack, folder, "embedder", replicas=1), stack.inference() as stub:
        request = inference_pb2.EmbedRequest(model="embedder", inputs=texts, idempotency_key="once")
        answers = [await stub.Embed(request, metadata=metadata(stack.api_key), timeout=120) for _ in range(2)]
        generation = inference_pb2.Generation(model="embedder", prompt="The", max_output_tokens=2)
        generated = await stub.Complete(
            inference_pb2.CompleteRequest(generation=generation),
            metadata=metadata(stack.api_key),
            timeout=120,
        )
    assert generated.finished.usage.output_tokens
    first, again = answers
    assert (first.replayed, again.replayed) == (False, True)
    assert [each.values for each in again.embeddings] == [each.values for each in first.embeddings]
    assert first.usage.output_tokens == 0
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, found in zip(texts, first.embeddings, strict=True):
        ids = tokenizer.encode(text).ids
        assert found.prompt_tokens == len(ids)
        with torch.inference_mode():
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(found.values, hidden / np.linalg.norm(hidden), atol=1e-5)
