"""Weights that are replaced between two steps: afterwards the engine computes as one that loaded them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fairway.formats.weights import SINGLE
from services.worker.engine_protocol import Event, ReplaceWeights, WeightsRefused, WeightsReplaced
from tests.contract.engine.conftest import TINY, Engine, StartEngine
from tests.contract.engine.test_engine import PROMPTS


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled version with other values of its weights."""
    folder = tmp_path_factory.mktemp("other") / "version"
    shutil.copytree(TINY, folder)
    tensors = {name: (tensor * 0.9).roll(1, 0) for name, tensor in load_file(TINY / SINGLE).items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def replace(engine: Engine, folder: Path) -> Event:
    engine.send(ReplaceWeights(str(folder)))
    while not isinstance(answer := engine.agent.receive(), WeightsReplaced | WeightsRefused):
        pass
    return answer


def outputs(engine: Engine) -> list[tuple[list[int], list[object]]]:
    handles = [engine.submit(prompt, 12, logprobs=2, seed=place) for place, prompt in enumerate(PROMPTS)]
    return [(output.tokens, list(output.logprobs)) for output in engine.run(*handles)]


def test_replaced_weights_compute_as_loaded_ones(
    start_engine: StartEngine, executor: str, other: Path
) -> None:
    engine = start_engine()
    before = outputs(engine)
    answer = replace(engine, other)
    if executor == "null":
        assert isinstance(answer, WeightsRefused)
        assert outputs(engine) == before
        return
    assert isinstance(answer, WeightsReplaced), answer
    after = outputs(engine)
    assert after == outputs(start_engine(other))
    assert after != before
    assert isinstance(replace(engine, TINY), WeightsReplaced)
    assert outputs(engine) == before


def test_weights_that_cannot_be_read_change_nothing(
    start_engine: StartEngine, other: Path, tmp_path: Path
) -> None:
    shutil.copytree(other, tmp_path / "version")
    weights = tmp_path / "version" / SINGLE
    engine = start_engine()
    before = outputs(engine)
    for size_bytes in (weights.stat().st_size - 1, 1000):
        with weights.open("r+b") as file:
            file.truncate(size_bytes)
        answer = replace(engine, weights.parent)
        assert isinstance(answer, WeightsRefused)
        assert not answer.changed
    assert outputs(engine) == before
