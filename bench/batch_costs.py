"""Measure what a batch of a fixed-cost model takes, by width and rows, on random weights.

    python -m bench.batch_costs [--repeats 3] [--write FILE]

One thread, and its processor time, so that other programs on the machine count for little; each figure is
the least of the repetitions. Prints ``RESULT {json}`` last; ``--write`` keeps it for the simulator
(``python -m simulator batching``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

from bench.results import print_result
from fairway.formats.fixed_cost.config import parse_fixed_cost
from fairway.formats.fixed_cost.layouts import layout_of
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.model import FixedCostModel
from services.worker.batcher.models.rows import Batch, Packed, Padded, Row

SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 100)
WIDTHS: Final = (16, 64)
MINILM: Final[dict[str, Any]] = {
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 30522,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
MLP: Final[dict[str, Any]] = {
    "architectures": ["Mlp"],
    "input_size": 256,
    "layers": [
        {"size": 1024, "activation": "relu"},
        {"size": 1024, "activation": "relu"},
        {"size": 16, "activation": "none"},
    ],
}


def write_random(fields: dict[str, Any], folder: Path) -> Path:
    """Write the configuration and random weights of a model; return the folder."""
    (folder / "config.json").write_text(json.dumps(fields))
    layout = layout_of(parse_fixed_cost(["config.json"], lambda name: (folder / name).read_bytes()))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in layout.shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def random_model(fields: dict[str, Any], folder: Path) -> FixedCostModel:
    """Return a model of random weights, loaded from a folder as a published one is."""
    return load_model(write_random(fields, folder))


def least_s(model: FixedCostModel, batch: Batch, repeats: int) -> float:
    """Return the least seconds of a run."""
    found = []
    for _ in range(repeats):
        began_s = time.process_time()
        model.run(batch)
        found.append(time.process_time() - began_s)
    return min(found)


def token_rows(rng: np.random.Generator, lengths: Sequence[int]) -> list[Row]:
    return [{"input_ids": rng.integers(1000, 30000, length)} for length in lengths]


def curve(model: FixedCostModel, widths: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """Return milliseconds by width and rows; width 0 for rows without a length."""
    rng, costs = np.random.default_rng(0), {}
    for width in widths:
        of_width = {}
        for size in SIZES:
            if width:
                rows = token_rows(rng, [width] * size)
            else:
                rows = [{"input": rng.standard_normal(256, dtype=np.float32)} for _ in range(size)]
            of_width[str(size)] = round(least_s(model, Padded(rows, width), repeats) * 1e3, 4)
        costs[str(width)] = of_width
    return costs


def packed_against_padded(model: FixedCostModel, repeats: int) -> dict[str, float]:
    """Return milliseconds of one batch of 64 rows of mixed lengths, padded and packed."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(3.2, 0.7, 64).astype(int), 3, 128).tolist()
    rows = token_rows(rng, lengths)
    padded, packed = (least_s(model, each, repeats) for each in (Padded(rows, max(lengths)), Packed(rows)))
    padding = 1.0 - sum(lengths) / (max(lengths) * len(lengths))
    return {
        "padding_ratio": round(padding, 3),
        "padded_ms": round(padded * 1e3, 2),
        "packed_ms": round(packed * 1e3, 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"threads": 1, "repeats": options.repeats}
    with tempfile.TemporaryDirectory() as mlp, tempfile.TemporaryDirectory() as minilm:
        found["mlp"] = curve(random_model(MLP, Path(mlp)), (0,), 10 * options.repeats)
        encoder = random_model(MINILM, Path(minilm))
        found["minilm"] = curve(encoder, WIDTHS, options.repeats)
        found["mixed"] = packed_against_padded(encoder, options.repeats)
    if options.write is not None:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
    print_result(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
