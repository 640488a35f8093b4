"""The ``config.json`` of a GGUF file: the shape of its decoder, or a refusal by the key that is not served.

Every key of the architecture is either read here or must have a value that changes nothing, so that no file
is computed otherwise than it states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fairway.importing.gguf_file import GgufFile

EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
ROPE_DIVISORS: Final = "rope_freqs.weight"
# Llama 3 was trained at this length; its conversions write divisors in place of these numbers.
LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# The names of architectures in ``general.architecture``, and those of transformers.
ARCHITECTURES: Final[Mapping[str, tuple[str, str]]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
MISTRAL: Final = ("MistralForCausalLM", "mistral")  # a llama with a window

_SIZES: Final[Mapping[str, str]] = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
# Keys of an architecture that are read elsewhere in this module.
_READ: Final = frozenset(
    (
        *_SIZES,
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "vocab_size",
    )
)
# Values of other keys with which nothing changes.
_INERT: Final[Mapping[str, tuple[Any, ...]]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "pooling_type": (0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "use_parallel_residual": (False,),
}


@dataclass(frozen=True, slots=True)
class _Keys:
    """The metadata of one architecture, read with a check of each value."""

    file: GgufFile
    architecture: str

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str) -> Any:
        return self.file.metadata.get(self.name(key))

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.file.refusal(self.name(key), f"{_shown(value)} is no size")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.file.refusal(self.name(key), f"{_shown(value)} is no positive number")
        return float(value)


def _shown(value: object) -> str:
    return "it is missing" if value is None else repr(value)[:80]


def config_of(file: GgufFile, rope_divisors: Sequence[float] | None) -> dict[str, Any]:
    """Return the fields of ``config.json`` but those of tokens; ``rope_divisors`` are the file's, if any.

    Raises BadGguf.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise file.refusal(
            "general.architecture",
            f"{_shown(architecture)} is not supported; supported: {served} (also Mistral)",
        )
    _require_whole(file)
    keys = _Keys(file, architecture)
    _require_inert(keys)
    fields: dict[str, Any] = {name: keys.size(key) for key, name in _SIZES.items()}
    heads = fields["num_attention_heads"]
    name, model_type = ARCHITECTURES[architecture]
    window = keys.size("attention.sliding_window") if keys.get("attention.sliding_window") else None
    if window is not None:
        if architecture != "llama":
            raise file.refusal(
                keys.name("attention.sliding_window"),
                f"{window}: the layers with a window are not in the file",
            )
        name, model_type = MISTRAL
        fields["sliding_window"] = window
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise file.refusal(EMBEDDING, "the embedding is missing, or not rows of numbers")
    fields |= {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": keys.size("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys, fields["hidden_size"], heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "hidden_act": "silu",
        "dtype": "float32",
    }
    if architecture == "llama" and name != MISTRAL[0]:
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    fields["rope_theta"] = keys.number("rope.freq_base", 10000.0)
    if scaling := _scaling(keys, fields, rope_divisors):
        fields["rope_scaling"] = scaling
    return fields


def _require_whole(file: GgufFile) -> None:
    """Return if the file is a whole model. Raises BadGguf."""
    if (parts := file.metadata.get("split.count", 0)) not in (0, 1):
        raise file.refusal("split.count", f"one of {parts} parts; join them with `llama-gguf-split --merge`")
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise file.refusal("general.type", f"{_shown(kind)} is not a model")


def _require_inert(keys: _Keys) -> None:
    prefix = keys.architecture + "."
    for key, value in keys.file.metadata.items():
        own = key.removeprefix(prefix)
        if key.startswith(prefix) and own not in _READ and value not in _INERT.get(own, ()):
            raise keys.file.refusal(key, f"{_shown(value)} is not supported")


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden % heads:
        raise keys.file.refusal(keys.name("attention.head_count"), f"{heads} heads do not divide {hidden}")
    head_dim = keys.size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := keys.size(key, head_dim)) != head_dim:
            raise keys.file.refusal(keys.name(key), f"{found} differs from a head's {head_dim}")
    if head_dim % 2:
        raise keys.file.refusal(keys.name("attention.key_length"), f"a head of {head_dim} has no halves")
    return head_dim


def _scaling(
    keys: _Keys, fields: Mapping[str, Any], divisors: Sequence[float] | None
) -> dict[str, Any] | None:
    """Return how positions are scaled, which keys state, or a tensor of divisors as in Llama 3."""
    kind = keys.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.file.refusal(keys.name("rope.scaling.type"), f"{_shown(kind)} is not supported")
    if divisors is not None:
        if kind not in (None, "none"):
            raise keys.file.refusal(ROPE_DIVISORS, f"the file has them beside a scaling of type {kind}")
        return _llama3(keys.file, fields["head_dim"], fields["rope_theta"], divisors)
    if kind in (None, "none"):
        return None
    found: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        original = keys.size("rope.scaling.original_context_length", fields["max_position_embeddings"])
        found["original_max_position_embeddings"] = original
    return found


def _llama3(file: GgufFile, head_dim: int, theta: float, divisors: Sequence[float]) -> dict[str, Any] | None:
    """Return the scaling of Llama 3 that has these divisors; their last one is its factor."""
    if len(divisors) != head_dim // 2:
        raise file.refusal(ROPE_DIVISORS, f"{len(divisors)} divisors, not the {head_dim // 2} of a head")
    factor = divisors[-1]
    if all(divisor == 1.0 for divisor in divisors):
        return None
    if math.isfinite(factor) and factor > 1:
        expected = [_divisor(factor, 2 * math.pi * theta ** (2 * i / head_dim)) for i in range(head_dim // 2)]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise file.refusal(ROPE_DIVISORS, "the divisors are not those of Llama 3 with any factor")


def _divisor(factor: float, wavelength: float) -> float:
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / wavelength
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
