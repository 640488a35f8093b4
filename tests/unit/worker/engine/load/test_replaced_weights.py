"""Weights that are replaced between two steps compute, bit by bit, what a fresh load of them does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.core.generation import OutputLimits, Prompt, Sampling
from services.core.prefix import prefix_chain
from services.worker.engine.core import Engine, WeightsLost
from services.worker.engine.load.loading import load
from services.worker.engine.load.memory_meter import own_bytes
from services.worker.engine_protocol import (
    EngineConfig,
    EngineMessage,
    ReplaceWeights,
    Submit,
    WeightsRefused,
    WeightsReplaced,
)
from tests.support.engine_oracle import load_engine

PROMPT: Final = [token % 90 for token in range(7, 150)]
TOKENS: Final = 12
OPTIONS: Final = {"max_model_len": 256, "kv_blocks": 64, "token_budget": 64}
ROOT: Final = 1 << 40


class Sent:
    """Implements ``StepLink``: keeps what the engine sends by itself."""

    def __init__(self) -> None:
        self.messages: list[EngineMessage] = []
        self.on_message: Callable[[], None] = lambda: None

    def receive(self) -> None: ...

    def send(self, message: EngineMessage) -> None:
        self.messages.append(message)
        self.on_message()


def loaded(folder: Path, **options: Any) -> tuple[Engine, Sent]:
    config = EngineConfig("", str(folder), threads=1)
    engine, _ = load(msgspec.structs.replace(config, **(OPTIONS | options)), lambda _phase, _ratio: None)
    sent = Sent()
    engine.connect(sent)
    return engine, sent


def submit(handle: int, *, temperature: float = 0.0) -> Submit:
    sampling = Sampling(seed=handle, temperature=temperature, logprobs=2)
    prompt = Prompt(PROMPT, prefix_chain(ROOT, PROMPT), ROOT)
    limits = OutputLimits(TOKENS, ignore_eos=True)
    return Submit(handle, prompt, sampling, limits, credit_limit=TOKENS)


def run(engine: Engine, *submits: Submit) -> tuple[list[Any], int]:
    """Return tokens with log-probabilities by sequence, and how many tokens of KV were found."""
    outputs: dict[int, list[Any]] = {each.handle: [] for each in submits}
    cached = 0
    for each in submits:
        engine.apply(each)
    while engine.has_work:
        stepped = engine.step()
        cached += sum(stepped.cached.values())
        for handle, token in zip(stepped.handles, stepped.tokens, strict=True):
            outputs[handle].append((token, stepped.logprobs[handle].pop(0)))
    return list(outputs.values()), cached


@pytest.fixture(scope="module")
def folders(save_model: Callable[..., Any]) -> tuple[Path, Path]:
    """Two checkpoints that differ in the values of their weights alone."""
    old, new = (save_model("Llama", seed=seed, max_position_embeddings=512)[1] for seed in (3, 4))
    return old, new


@pytest.mark.parametrize("options", [{}, {"speculation": "prompt_lookup"}, {"operators": "torch"}])
def test_replaced_weights_compute_what_a_fresh_load_does(
    folders: tuple[Path, Path], options: dict[str, Any]
) -> None:
    old, new = folders
    engine, sent = loaded(old, **options)
    before, _ = run(engine, submit(1), submit(2, temperature=1.0))
    here = before
    for turn, folder in enumerate((new, old, new), start=1):
        engine.apply(ReplaceWeights(str(folder)))
        assert isinstance(sent.messages[-1], WeightsReplaced)
        fresh = load_engine(folder, OPTIONS | options)
        here, found = run(engine, submit(10 * turn), submit(10 * turn + 1, temperature=1.0))
        there, expected = run(fresh, submit(10 * turn), submit(10 * turn + 1, temperature=1.0))
        assert here == there
        assert found == expected, "KV of the weights before was used"
        engine.check_integrity()
    assert here[0] != before[0]


def test_the_cached_prefixes_are_reported_as_removed(folders: tuple[Path, Path]) -> None:
    old, new = folders
    engine, sent = loaded(old)
    added: set[int] = set()
    engine.apply(submit(1))
    while engine.has_work:
        added |= set(engine.step().prefix_added)
    assert added
    engine.apply(ReplaceWeights(str(new)))
    assert set(sent.messages[-2].prefix_removed) == added  # type: ignore[attr-defined]


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(
    folders: tuple[Path, Path], save_model: Callable[..., Any], tmp_path: Path
) -> None:
    old, new = folders
    engine, sent = loaded(old)
    before, _ = run(engine, submit(1))
    shapes = shutil.copytree(new, tmp_path / "shapes")
    tensors = load_file(shapes / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name][:-1].copy()}, shapes / "model.safetensors")
    config = shutil.copytree(new, tmp_path / "config")
    fields = json.loads((config / "config.json").read_text())
    (config / "config.json").write_text(json.dumps({**fields, "rms_norm_eps": 0.5}))
    cut = shutil.copytree(new, tmp_path / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for folder in (shapes, config, cut, tmp_path):
        engine.apply(ReplaceWeights(str(folder)))
        refused = sent.messages[-1]
        assert isinstance(refused, WeightsRefused)
        assert refused.message
        assert not refused.changed
    assert run(engine, submit(2))[0][0][0][0] == before[0][0][0]
    assert [token for token, _ in run(engine, submit(3))[0][0]] == [token for token, _ in before[0]]


def test_weights_are_not_replaced_under_a_sequence(folders: tuple[Path, Path]) -> None:
    old, new = folders
    engine, sent = loaded(old)
    engine.apply(submit(1))
    engine.step()
    engine.apply(ReplaceWeights(str(new)))
    refused = sent.messages[-1]
    assert isinstance(refused, WeightsRefused)
    assert "1 sequences run" in refused.message


def test_a_value_that_is_not_finite_ends_the_process(folders: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = folders
    damaged = shutil.copytree(new, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name][0, 0] = np.nan
    save_file(tensors, damaged / "model.safetensors")
    engine, sent = loaded(old)
    with pytest.raises(WeightsLost):
        engine.apply(ReplaceWeights(str(damaged)))
    refused = sent.messages[-1]
    assert isinstance(refused, WeightsRefused)
    assert (refused.reason, refused.changed) == ("bad_checkpoint", True)
    assert name in refused.message


def test_memory_never_has_two_copies(save_model: Callable[..., Any]) -> None:
    """What the process has while it reads the new weights stays below one copy more."""
    sizes = {
        "max_position_embeddings": 512,
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
    }
    old, new = (save_model("Llama", seed=seed, **sizes)[1] for seed in (3, 4))
    engine, sent = loaded(old)
    weights = sum(tensor.nbytes for tensor in load_file(old / "model.safetensors").values())
    before, peaks = own_bytes(), [0]
    sent.on_message = lambda: peaks.append(own_bytes())
    engine.apply(ReplaceWeights(str(new)))
    assert isinstance(sent.messages[-1], WeightsReplaced)
    assert weights > 60 * 2**20
    assert len(peaks) > 12, "it was looked at for each layer"
    assert max(peaks) - before < weights // 4
