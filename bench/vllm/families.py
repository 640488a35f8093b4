"""Tiny checkpoints with random weights of families that vLLM serves, and what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import transformers
from safetensors.torch import save_file

from bench.vllm.promises import Expected, prompts

VOCABULARY: Final = 4096
TOKENS: Final = 16
PROMPTS: Final = 4
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "intermediate_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    # With a smaller range the outputs of some families repeat one token, which shows little.
    "initializer_range": 0.1,
}
_WINDOWS: Final = {"head_dim": 64, "sliding_window": 32}
_ROUTED: Final = {"num_experts_per_tok": 2, "head_dim": 64}
# Classes of transformers, and fields.
FAMILIES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _WINDOWS | {"query_pre_attn_scalar": 64}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _WINDOWS | {"query_pre_attn_scalar": 64, "num_hidden_layers": 6},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _ROUTED | {"moe_intermediate_size": 128, "num_experts": 8, "norm_topk_prob": True},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _ROUTED | {"num_local_experts": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _ROUTED | {"num_local_experts": 4, "sliding_window": 32, "intermediate_size": 256},
    ),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 1 / 64,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", {"head_dim": 64, "attention_bias": True}),
    # On a processor with AMX vLLM's kernel for eight bits refuses float32.
    "llama_int8": ("LlamaForCausalLM", "LlamaConfig", {"head_dim": 64, "tie_word_embeddings": False}),
}
INT8: Final = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def made(name: str, folder: Path) -> Path:
    """Return the folder of the family's checkpoint and its expected outputs; it is made where missing."""
    there = folder / f"family-{name}"
    if (there / "expected.json").exists():
        return there
    model_class, config_class, fields = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**_COMMON | fields)
    model = getattr(transformers, model_class)(config).eval().float()
    quantised = _quantise(model) if name == "llama_int8" else {}
    model.save_pretrained(there)
    if quantised:
        kept = {key: value for key, value in model.state_dict().items() if key not in quantised}
        tensors = {key: value.contiguous() for key, value in (kept | quantised).items()}
        save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
        saved = json.loads((there / "config.json").read_text())
        (there / "config.json").write_text(json.dumps(saved | {"quantization_config": INT8}))
    given = prompts(VOCABULARY, PROMPTS)
    expected = Expected(given, [_continued(model, prompt) for prompt in given])
    (there / "expected.json").write_bytes(msgspec.json.encode(expected))
    return there


def _continued(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def _quantise(model: Any) -> dict[str, torch.Tensor]:
    """Round the linear weights to eight bits in place, and what they are given; return the weights."""

    def rounded_input(_: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = given[0].abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return ((given[0] / scale).round() * scale,)

    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            scale = module.weight.data.abs().amax(1, keepdim=True) / 127
            rounded = (module.weight.data / scale).round().clamp(-128, 127)
            module.weight.data = rounded * scale
            module.register_forward_pre_hook(rounded_input)
            tensors[f"{name}.weight"] = rounded.to(torch.int8)
            tensors[f"{name}.weight_scale"] = scale
    return tensors
