"""A fixed-cost model in a whole installation: published, deployed on two workers, and called."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fairway.v1 import common_pb2, inference_pb2
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Padded
from tests.support.row_versions import mlp_version
from tests.support.stack import Stack, fairway, kill, metadata

MODEL = "mlp"
Values = NDArray[np.float32]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack.started(tmp_path_factory.mktemp("rows") / "state", workers=2, replicas=1) as running:
        yield running


@pytest.fixture(scope="module")
def folder(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model's files, once it is deployed on both workers."""
    found = mlp_version(tmp_path_factory.mktemp("mlp") / "model")
    state = ("--state-dir", str(stack.state))
    fairway("models", "publish", str(found), "--name", MODEL, *state)
    fairway("deployments", "create", MODEL, "--replicas", "2", "--wait", *state)
    return found


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


async def test_rows_are_computed_by_the_workers_and_outlive_the_leader(stack: Stack, folder: Path) -> None:
    values = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    found = await infer(stack, values)
    assert np.allclose(found, expected(folder, values), atol=1e-5)
    answers = await asyncio.gather(*(infer(stack, values[row : row + 1]) for row in range(40)))
    assert np.allclose(np.concatenate(answers), found, atol=1e-5)
    (scheduler, *_) = stack.pids("services scheduler")
    kill(scheduler)
    again = await asyncio.gather(*(infer(stack, values[row : row + 1]) for row in range(40)))
    assert np.allclose(np.concatenate(again), found, atol=1e-5)
