"""Engines of the benchmark, in this process: the bundled model, and a small one with a large vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import expected_shapes
from services.core.generation import Constraint, OutputLimits, Prompt, Sampling
from services.worker.engine.core import Engine
from services.worker.engine.load.loading import load
from services.worker.engine_protocol import EngineConfig, Submit

BUNDLED: Final = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"
VOCABULARY: Final = 131_072
UNLIMITED: Final = 1 << 20


@dataclass(slots=True)
class Outputs:
    """What came of the sequences, by handle."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def engine_of(folder: Path, **options: Any) -> Engine:
    """Return a loaded engine on one thread of the CPU."""
    fields: dict[str, Any] = {"threads": 1, "prefix_cache": False, "token_budget": 512} | options
    return load(EngineConfig("", str(folder), **fields), lambda phase, ratio: None)[0]


def submit(
    handle: int,
    prompt: list[int],
    *,
    max_tokens: int,
    constraint: Constraint | None = None,
    produced_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    temperature: float = 1.0,
) -> Submit:
    sampling = Sampling(seed=handle, temperature=temperature, constraint=constraint)
    limits = OutputLimits(max_tokens, ignore_eos=ignore_eos)
    return Submit(handle, Prompt(prompt), sampling, limits, UNLIMITED, produced_ids=list(produced_ids))


def run(engine: Engine, submits: Iterable[Submit]) -> Outputs:
    """Run until nothing is left to do."""
    found = Outputs()
    for each in submits:
        engine.apply(each)
    while engine.has_work:
        stepped = engine.step()
        for handle, token in zip(stepped.handles, stepped.tokens, strict=True):
            found.tokens.setdefault(handle, []).append(token)
        found.finished |= stepped.finished
        found.errors |= stepped.errors
    return found


def write_large(folder: Path) -> None:
    """Write a random model with 131,072 tokens: the bundled tokenizer's and words that it does not have."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((BUNDLED / "config.json").read_text())
    config |= {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "torch_dtype": "float32"}
    config["max_position_embeddings"] = 1 << 13  # streams run on while others come
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    state = json.loads((BUNDLED / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = state["model"]["vocab"]
    known = [text for text in vocabulary if text.isalpha() and text.isascii() and len(text) > 1]
    for first, second in product(known, known):
        if len(vocabulary) == VOCABULARY:
            break
        vocabulary.setdefault(first + second, len(vocabulary))
    (folder / "tokenizer.json").write_text(json.dumps(state))
    torch.manual_seed(0)
    shapes = expected_shapes(parse_config(config))
    weights = {name: torch.randn(shape) * 0.05 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
