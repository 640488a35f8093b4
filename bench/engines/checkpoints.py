"""The checkpoints of the engine's benchmark: two shapes with random weights, made where they are missing.

Weights are drawn as the initialisation of transformers draws them, normal with a deviation of 0.02 and norms
of one, from a generator with a fixed seed: every machine that makes them makes the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from bench.engines.load import VOCABULARY
from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import EMBEDDING, HEAD, SINGLE, Shape, expected_shapes

DEVIATION: Final = 0.02
SEED: Final = 0
CYCLE: Final = 16

Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama56m": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen100m": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}


def checkpoint(name: str, folder: Path) -> Path:
    """Return the folder of the checkpoint below ``folder``; it is made if it is not there."""
    there = folder / name
    if not _is_made(there):
        _write(there, MODELS[name], random_tensors(expected_shapes(parse_config(MODELS[name]))))
    return there


def cycling_checkpoint(name: str, folder: Path) -> Path:
    """Return the folder of a checkpoint of that shape whose next token is ``next_token`` of the last one.

    Its layers compute as much as those of any other and add nothing, and its head finds the embedding. What
    text it goes on with, and whether that repeats, is then up to the prompt.
    """
    there = folder / f"{name}-cycling"
    if not _is_made(there):
        fields = {**MODELS[name], "tie_word_embeddings": False}
        tensors = random_tensors(expected_shapes(parse_config(fields)))
        for tensor in tensors:
            if tensor.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[tensor][:] = 0.0
        tensors[HEAD][[next_token(token) for token in range(VOCABULARY)]] = tensors[EMBEDDING]
        _write(there, fields, tensors)
    return there


def next_token(token: int) -> int:
    """Below half of the vocabulary a token's successors come round after ``CYCLE``; the others do not."""
    half = VOCABULARY // 2
    if token < half:
        return token - token % CYCLE + (token + 1) % CYCLE
    return half + (token + 1 - half) % half


def random_tensors(shapes: Mapping[str, Shape]) -> Tensors:
    """Return float32 tensors of these shapes: ones for a norm, else drawn in the order of the names."""
    rng = np.random.default_rng(SEED)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensors[name] = np.ones(shape, dtype=np.float32)
        else:
            tensors[name] = rng.standard_normal(shape, dtype=np.float32) * np.float32(DEVIATION)
    return tensors


def _is_made(there: Path) -> bool:
    return (there / "config.json").exists()


def _write(there: Path, fields: Mapping[str, Any], tensors: Tensors) -> None:
    there.mkdir(parents=True, exist_ok=True)
    save_file(tensors, there / SINGLE, metadata={"format": "pt"})
    (there / "config.json").write_text(json.dumps(dict(fields), indent=1))  # last: it marks completion
