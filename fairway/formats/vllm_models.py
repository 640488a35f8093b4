"""What vLLM serves of the checkpoints that Fairway's own engine refuses: proved families and formats.

``docs/architecture/engines.md`` has how each is proved, and with which precision. Anything else is refused by
name: a model with wrong answers is worse than one that does not load.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from fairway.formats import safetensors
from fairway.formats.config_fields import UnsupportedModel, object_in, positive_int
from fairway.formats.decoder_config import FAMILIES, MAX_LAYERS, parse_config
from fairway.formats.fixed_cost.config import FixedCostConfig
from fairway.formats.fixed_cost.encoder_config import EncoderConfig
from fairway.formats.rope_config import context_of
from fairway.formats.weights import DTYPES, INDEX, SINGLE, BadWeights, Read, named, read_tensors

# Families that are equal to transformers, with weights of a number format that is not quantised.
PROVED: Final[Mapping[str, str]] = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "Glm4ForCausalLM": "glm4",
}
# Families of Fairway's engine whose quantised weights vLLM serves.
QUANTISED: Final = ("LlamaForCausalLM",)
POOLED: Final = ("bert", "roberta", "xlm-roberta")  # model types of encoders that vLLM pools
_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # what its attention on CPUs has
REFUSED: Final[Mapping[str, str]] = {
    "DeepseekV2ForCausalLM": "its latent attention is not exact in vLLM",
    "DeepseekV3ForCausalLM": "its latent attention is not exact in vLLM",
    "Qwen3NextForCausalLM": "its linear attention is not exact in vLLM",
    "MambaForCausalLM": "vLLM's scheduler moves its state, and Fairway's plans the batches",
    "Mamba2ForCausalLM": "vLLM's scheduler moves its state, and Fairway's plans the batches",
    "JambaForCausalLM": "vLLM's scheduler moves its state, and Fairway's plans the batches",
}
_UNPROVED: Final = "quantization_config: {} with quantised weights is not proved with vLLM"
_MAX_EXPERTS: Final = 4096
# The sizes that a mixture of experts has besides.
_EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {
    "Qwen3MoeForCausalLM": ("num_experts",),
    "MixtralForCausalLM": ("num_local_experts",),
    "GptOssForCausalLM": ("num_local_experts",),
}
_SIZES: Final = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Sizes that a family may lack, with the most of each.
_OPTIONAL: Final[Mapping[str, int]] = {
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "sliding_window": 1 << 31,
    "num_experts": _MAX_EXPERTS,
    "num_local_experts": _MAX_EXPERTS,
    "num_experts_per_tok": _MAX_EXPERTS,
    "moe_intermediate_size": 1 << 31,
}
_LAYER: Final = re.compile(r"model\.layers\.(\d{1,9})\.")
_EMBEDDING: Final = "model.embed_tokens.weight"
_PACKED: Final = frozenset({"I8", "U8", "I32", "I64", "BOOL"})  # dtypes that quantised weights have besides


def require_vllm_config(fields: Mapping[str, Any]) -> int:
    """Return the vocabulary's size of a configuration that vLLM serves.

    Raises UnsupportedModel, BadWeights with the reason why it does not.
    """
    architecture = _architecture(fields)
    if fields.get("auto_map") is not None:
        raise BadWeights(
            "auto_map names program code, which no engine runs: remove the field if the model is of the "
            f"family {architecture} as it is"
        )
    if fields.get("kv_lora_rank") is not None:
        raise BadWeights("kv_lora_rank: latent attention is not exact in vLLM")
    if architecture in FAMILIES:
        plain = {name: value for name, value in fields.items() if name != "quantization_config"}
        _require_quantised(architecture, fields.get("quantization_config"))
        return parse_config(plain).vocab_size
    if fields.get("quantization_config") is not None:
        raise BadWeights(_UNPROVED.format(architecture))
    if fields.get("model_type", PROVED[architecture]) != PROVED[architecture]:
        raise UnsupportedModel("model_type", fields["model_type"])
    for name in (*_SIZES, *_EXPERTS.get(architecture, ())):
        positive_int(fields, name)
    positive_int(fields, "num_hidden_layers", most=MAX_LAYERS)
    for name, most in _OPTIONAL.items():
        if fields.get(name) is not None:
            positive_int(fields, name, most=most)
    heads, kv_heads = fields["num_attention_heads"], fields.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        raise UnsupportedModel("num_key_value_heads", kv_heads)
    context_of(fields)
    return positive_int(fields, "vocab_size")


def encoder_problem(config: FixedCostConfig) -> str:
    """Return why vLLM does not serve a fixed-cost model, or an empty text.

    Families are equal to transformers in each head; Fairway's batcher serves what vLLM does.
    """
    if not isinstance(config, EncoderConfig):
        return "vLLM serves text encoders alone, not images and tensors"
    if config.family.model_type not in POOLED:
        return f"model_type: vLLM has no {config.family.model_type}, only {', '.join(POOLED)}"
    if (size := config.hidden_size // config.heads) not in _HEAD_SIZES:
        return f"hidden_size: vLLM has no attention with heads of {size}, only of {_HEAD_SIZES}"
    if config.type_rows > 2:
        return f"type_vocab_size: vLLM has token types 0 and 1, the model {config.type_rows}"
    return ""


def require_vllm_tensors(fields: Mapping[str, Any], names: Collection[str], read: Read) -> None:
    """Return if the tensor files are whole: what the index names, the embedding, and something of each layer.

    Raises BadWeights, UnsupportedModel.
    """
    files, headers = read_tensors("", names, read)
    if SINGLE not in names:
        listed = object_in(INDEX, read)["weight_map"]
        wrong = {name for name, file in listed.items() if files.get(name) != file}
        if wrong or listed.keys() != files.keys():
            raise BadWeights(f"{INDEX} and the tensor files differ: {named(wrong or files.keys() - listed)}")
    embedding = headers.get(_EMBEDDING)
    shape = (fields["vocab_size"], fields["hidden_size"])
    if embedding is None or embedding.shape != shape:
        found = "missing" if embedding is None else f"of shape {embedding.shape}"
        raise BadWeights(f"{_EMBEDDING} is {found}, the configuration says {shape}")
    layers = {int(match[1]) for name in headers if (match := _LAYER.match(name))}
    if layers != set(range(fields["num_hidden_layers"])):
        raise BadWeights(
            f"the tensors are of {len(layers)} layers up to {max(layers, default=-1)}, the configuration "
            f"says {fields['num_hidden_layers']}"
        )
    if _experts(fields) and not any(".experts." in name for name in headers):
        raise BadWeights(f"no tensor is of an expert, the configuration says {_experts(fields)}")
    _require_dtypes(headers, DTYPES if fields.get("quantization_config") is None else DTYPES | _PACKED)


def _experts(fields: Mapping[str, Any]) -> int:
    return int(fields.get("num_experts") or fields.get("num_local_experts") or 0)


def _require_dtypes(headers: Mapping[str, safetensors.TensorHeader], allowed: frozenset[str]) -> None:
    for name, tensor in headers.items():
        if tensor.dtype not in allowed:
            raise BadWeights(f"{name} has dtype {tensor.dtype}, not one of {', '.join(sorted(allowed))}")


def _architecture(fields: Mapping[str, Any]) -> str:
    found = fields.get("architectures")
    (name,) = found if isinstance(found, list) and len(found) == 1 else (None,)
    if not isinstance(name, str) or name not in {*PROVED, *FAMILIES, *REFUSED}:
        raise UnsupportedModel("architectures", found)
    if name in REFUSED:
        raise BadWeights(f"architectures: {name} is refused: {REFUSED[name]}")
    return name


def _require_quantised(architecture: str, config: object) -> None:
    """Return if the weights are not quantised, or in a format that is proved."""
    if config is None:
        return
    if not isinstance(config, dict):
        raise UnsupportedModel("quantization_config", type(config).__name__)
    if architecture not in QUANTISED:
        raise BadWeights(_UNPROVED.format(architecture))
    method = config.get("quant_method")
    if method in ("gptq", "awq"):
        if config.get("bits", config.get("w_bit")) != 4:
            raise BadWeights(f"quantization_config: {method} of other than 4 bits is not proved with vLLM")
    elif method != "compressed-tensors" or not _is_w8a8(config.get("config_groups")):
        raise BadWeights(
            "quantization_config: proved with vLLM are gptq and awq of 4 bits, and compressed-tensors of "
            "integers of 8 bits (W8A8)"
        )


def _is_w8a8(groups: object) -> bool:
    if not isinstance(groups, dict) or not groups:
        return False
    parts = [
        group.get(part) if isinstance(group, dict) else None
        for group in groups.values()
        for part in ("weights", "input_activations")
    ]
    return all(
        isinstance(part, dict) and part.get("num_bits") == 8 and part.get("type") == "int" for part in parts
    )
