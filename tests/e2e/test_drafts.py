"""A version with a draft on a whole installation: one worker speculates with it, the other does not at all.

The model is the bundled one with layers behind its own that add nothing, the draft the bundled one: their
tokens are the same, and the draft costs a quarter.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairway.v1 import common_pb2, inference_pb2
from tests.support.metrics import values
from tests.support.stack import ROOT, Stack, metadata

BUNDLED = ROOT / "models" / "tiny" / "checkpoint"
TIMES = 4  # as many layers as the draft
ADDING = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
TOKENS = 48
REQUESTS = 6
HANG_S = 300.0

# An installation of its own is started; the limit only catches what hangs.
pytestmark = pytest.mark.timeout(900)


def write_model(folder: Path) -> Path:
    """Return the folder with a model and its draft."""
    shutil.copytree(BUNDLED, folder)
    (folder / "draft").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(BUNDLED / name, folder / "draft")
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    tensors = load_file(folder / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    for layer in range(layers, TIMES * layers):
        for name, tensor in first.items():
            part = name.removeprefix("model.layers.0.")
            idle = torch.zeros_like(tensor) if part in ADDING else tensor.clone()
            tensors[f"model.layers.{layer}.{part}"] = idle
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": TIMES * layers}))
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    """``worker-0`` has a draft propose, ``worker-1`` computes one token after the other."""
    root = tmp_path_factory.mktemp("drafts")
    settings = {"FAIRWAY_SHEDDING": "false", "FAIRWAY_PREFIX_ROUTING": "false", "FAIRWAY_MAX_SEQUENCES": "4"}
    options = ["--model-dir", str(write_model(root / "drafted"))]
    options += ["--set", "worker-0:FAIRWAY_SPECULATION=draft", "--set", "worker-0:FAIRWAY_MAX_PROPOSALS=4"]
    with Stack.started(root / "state", workers=2, replicas=2, settings=settings, options=options) as running:
        yield running


def counted(stack: Stack, process: str, metric: str) -> float:
    address = stack.endpoints["metrics"][process]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return sum(values(answer.read().decode(), metric).values())


async def tokens_of(stub: Any, stack: Stack, seed: int, temperature: float) -> tuple[int, ...]:
    sampling = common_pb2.Sampling(seed=seed, temperature=temperature)
    generation = inference_pb2.Generation(
        model=stack.model,
        prompt="def fibonacci(n):",
        max_output_tokens=TOKENS,
        ignore_eos=True,
        sampling=sampling,
    )
    request = inference_pb2.CompleteRequest(generation=generation)
    answer = await stub.Complete(request, metadata=metadata(stack.api_key), timeout=HANG_S)
    assert len(answer.choices[0].ids) == TOKENS
    return tuple(answer.choices[0].ids)


async def test_the_tokens_are_the_same_with_and_without_and_proposals_are_accepted(stack: Stack) -> None:
    answers: dict[float, set[tuple[int, ...]]] = {0.0: set(), 0.8: set()}

    async def round_of_requests(stub: Any) -> None:
        for temperature, found in answers.items():
            asked = (tokens_of(stub, stack, 7, temperature) for _ in range(REQUESTS))
            found.update(await asyncio.gather(*asked))

    async with stack.inference() as stub, asyncio.timeout(HANG_S):
        while True:
            await round_of_requests(stub)
            served = [
                await asyncio.to_thread(counted, stack, name, "fairway_worker_tokens_total")
                for name in ("worker-0", "worker-1")
            ]
            accepted = await asyncio.to_thread(
                counted, stack, "worker-0", "fairway_worker_accepted_tokens_total"
            )
            if all(served) and accepted:
                break
    assert [len(found) for found in answers.values()] == [1, 1]
    assert counted(stack, "worker-1", "fairway_worker_proposed_tokens_total") == 0
    proposed = counted(stack, "worker-0", "fairway_worker_proposed_tokens_total")
    assert accepted >= 0.9 * proposed


async def test_the_ledger_has_the_weights_of_both(stack: Stack) -> None:
    weights = {name: worker.versions[0].weight_bytes for name, worker in (await stack.workers()).items()}
    draft = load_file(BUNDLED / "model.safetensors")
    assert weights["worker-0"] - weights["worker-1"] >= 4 * sum(each.numel() for each in draft.values())
