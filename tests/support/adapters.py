"""LoRA adapters by seed, in PEFT's files, and their bases with the adapter merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fairway.formats.adapter import MODULES, parse_adapter, tensor_name
from fairway.formats.decoder_config import parse_config
from fairway.formats.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fairway.formats.weights import expected_shapes

ALL = tuple(MODULES)


def write_adapter(
    folder: Path, base: Path, *, seed: int, targets: Sequence[str] = ALL, rank: int = 4, **fields: Any
) -> Path:
    """Write an adapter of the checkpoint in ``base`` with random matrices."""
    model = parse_config(json.loads((base / "config.json").read_bytes()))
    shapes, tensors = expected_shapes(model), {}
    generator = torch.Generator().manual_seed(seed)
    for layer in range(model.layers):
        for module in (MODULES[target] for target in targets):
            rows, columns = shapes[f"model.layers.{layer}.{module}.weight"]
            for matrix, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                name = tensor_name(layer, module, matrix)
                tensors[name] = torch.randn(shape, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    config |= {"target_modules": list(targets), "bias": "none"} | fields
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    return folder


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the base with ``W + scale * B A`` in place of each W that the adapter changes."""
    shutil.copytree(base, folder)
    weights = load_file(base / "model.safetensors")
    matrices = load_file(adapter / ADAPTER_WEIGHTS)
    found = parse_adapter(json.loads((adapter / ADAPTER_CONFIG).read_bytes()))
    layers = parse_config(json.loads((base / "config.json").read_bytes())).layers
    for layer in range(layers):
        for module in found.modules:
            a, b = (matrices[tensor_name(layer, module, matrix)].double() for matrix in "AB")
            name = f"model.layers.{layer}.{module}.weight"
            weights[name] = (weights[name].double() + found.scale * (b @ a)).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
