"""Shapes of the measured models, as the configurations of Hugging Face checkpoints, and random weights.

The weights are made on the device: no checkpoint, no download, no disk.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from fairway.formats.decoder_config import ModelConfig, parse_config
from fairway.formats.weights import expected_shapes
from services.worker.engine.execute.model import Weights, load_weights
from services.worker.engine.execute.operators import Operators
from services.worker.engine.load import torch_loading
from services.worker.engine.load.weights import Checkpoint
from services.worker.engine_protocol import EngineConfig

SPREAD: Final = 0.02  # standard deviation, as transformers initialises
_LLAMA3: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}

SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "1b": {
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_LLAMA3,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class RandomTensors:
    """Answers as an open checkpoint does. A tensor is a function of its name and of the device."""

    model: ModelConfig
    device: torch.device

    def tensor(self, name: str, *, dtype: torch.dtype, owned: bool = True) -> torch.Tensor:
        """Return the tensor, on the device and owned. Norms are ones, all else is normal."""
        shape = expected_shapes(self.model)[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, dtype=dtype, device=self.device, generator=generator).mul_(SPREAD)


def random_weights(
    fields: Mapping[str, Any], config: EngineConfig, operators: Operators | None = None
) -> tuple[ModelConfig, Weights]:
    """Return the model and its weights, taken in by the loader that takes in checkpoints.

    ``operators`` are by default those that the engine takes on the configured device.
    """
    model, device = parse_config(fields), torch.device(config.device)
    with torch.inference_mode():
        weights = load_weights(
            model,
            cast(Checkpoint, RandomTensors(model, device)),
            dtype=torch_loading.DTYPES[config.dtype],
            device=device,
            operators=operators or torch_loading.operators_of(model, config, device),
            progress=lambda ratio: None,
        )
    return model, weights


def transformers_model(fields: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' model with the same weights."""
    import transformers

    model = parse_config(fields)
    plain = {key: value for key, value in fields.items() if key not in ("architectures", "model_type")}
    settings = transformers.LlamaConfig(**plain)
    with torch.device("meta"):
        empty: Any = transformers.LlamaForCausalLM(settings)
    made = empty.to(dtype).to_empty(device=device).eval()
    tensors = RandomTensors(model, device)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(tensors.tensor(name, dtype=dtype))
    made.model.rotary_emb = type(made.model.rotary_emb)(settings).to(device)  # its buffers were empty
    if model.tied:
        made.tie_weights()
    return made
