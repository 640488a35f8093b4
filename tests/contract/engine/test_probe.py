"""A probe on an engine process: promised and computed, or absent and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.contract.engine.conftest import TINY, StartEngine

HIDDEN = 256
IDS = [5, 6, 7, 8, 9]


def test_scores_come_with_the_tokens_of_who_asks(
    start_engine: StartEngine, executor: str, tmp_path: Path
) -> None:
    for file in TINY.iterdir():
        (tmp_path / file.name).symlink_to(file)
    drawn = np.random.default_rng(0)
    tensors = {
        "weight": drawn.standard_normal((2, HIDDEN)).astype(np.float32),
        "bias": np.zeros(2, np.float32),
    }
    save_file(tensors, tmp_path / "safety_probe.safetensors", {"categories": json.dumps(["a", "b"])})
    engine = start_engine(tmp_path)
    asks = engine.submit(IDS, 6, probe=True)
    if executor == "vllm":
        assert "probe" not in engine.ready.capabilities
        assert engine.run(asks)[0].error == "this engine has no probe"
        return
    assert "probe" in engine.ready.capabilities
    other = engine.submit(IDS, 6)
    both = engine.run(asks, other)
    assert both[0].tokens == both[1].tokens
    scores = [
        score
        for step in engine.steps
        for handle, score in zip(step.handles, step.probe_scores, strict=False)
        if handle == asks
    ]
    assert len(scores) == 6
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert (len(set(scores)) > 1) == (executor == "torch")
    engine.steps.clear()
    engine.alone(IDS, 6)
    assert not any(step.probe_scores for step in engine.steps), "nobody asks"


def test_an_engine_without_a_probe_refuses_who_asks(start_engine: StartEngine) -> None:
    engine = start_engine()
    assert "probe" not in engine.ready.capabilities
    assert engine.alone(IDS, 6, probe=True).error == "this engine has no probe"
