"""Converts a Hugging Face ``config.json`` to the decoder's shape, or rejects it with the field and its value.

A configuration that may be computed incorrectly is rejected: a model with wrong answers is worse than one
that does not load. Defaults are those of the transformers configuration of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel, flag, number, positive_int, require_inert
from fairway.formats.rope_config import RopeConfig, parse_rope

MAX_LAYERS: Final = 1024  # bounds the description, which is built before any weight is read
QWEN3_HEAD_DIM: Final = 128
MISTRAL_WINDOW: Final = 4096
QWEN_WINDOW_LAYERS: Final = 28

# Fields of other families that change the computation. Any other value is rejected.
INERT_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "quantization_config": (None,),
    "auto_map": (None,),
    "hidden_act": ("silu", "swish"),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "no_rope_layers": (None, []),
    "attention_chunk_size": (None,),
    "is_encoder_decoder": (None, False),
}


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of an architecture: biases of its linear layers, and normalisation of q and k."""

    model_type: str
    qk_norm: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qkv_bias: bool = False


FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family("llama", reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family("mistral"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, reads_attention_bias=True),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The decoder's shape."""

    architecture: str  # name of the transformers class
    vocab_size: int  # rows of the embedding
    hidden_size: int  # width of the residual stream
    # Width of the MLP.
    intermediate_size: int
    layers: int  # decoder layers
    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int  # width of a head
    norm_eps: float  # epsilon of RMSNorm
    # The output embedding is the input embedding.
    tied: bool
    qkv_bias: bool  # whether the attention's input projections have biases
    # Whether the attention's output projection has a bias.
    output_bias: bool
    mlp_bias: bool  # whether the MLP's projections have biases
    # q and k are normalised.
    qk_norm: bool
    rope: RopeConfig  # rotary embedding
    # How many positions each layer attends to; None: all.
    windows: tuple[int | None, ...]
    max_position_embeddings: int  # the config's number, unscaled

    @property
    def max_context(self) -> int:
        """The longest context for which positions are defined."""
        return self.rope.max_context

    @property
    def attention_half_tokens(self) -> int:
        """The position at which attention takes as many multiplications as the rest of the layers.

        Layers with a sliding window attend to a constant number of positions.
        """
        attended = 2 * self.heads * self.head_dim * self.windows.count(None)
        return max(1, self._layer_parameters // attended if attended else self._layer_parameters)

    @property
    def flops_per_token(self) -> int:
        """Two operations for each parameter of the layers and the output embedding, without attention's.

        Source: Chowdhery et al., PaLM, 2022, appendix B, forward pass.
        """
        return 2 * (self._layer_parameters + self.hidden_size * self.vocab_size)

    @property
    def _layer_parameters(self) -> int:
        projections = self.hidden_size * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (projections + 3 * self.hidden_size * self.intermediate_size)


def parse_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model's shape. Raises UnsupportedModel with the first field that cannot be served."""
    architecture, family = _family(fields)
    require_inert(fields, INERT_VALUES)
    hidden_size = positive_int(fields, "hidden_size")
    layers = positive_int(fields, "num_hidden_layers", most=MAX_LAYERS)
    heads = positive_int(fields, "num_attention_heads")
    kv_heads = _kv_heads(fields, family, heads)
    head_dim = _head_dim(fields, family, hidden_size, heads)
    max_positions = positive_int(fields, "max_position_embeddings")
    attention_bias = family.reads_attention_bias and flag(fields, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=positive_int(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(fields, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=number(fields, "rms_norm_eps", default=1e-6, above=0.0),
        tied=flag(fields, "tie_word_embeddings"),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and flag(fields, "mlp_bias"),
        qk_norm=family.qk_norm,
        rope=parse_rope(fields, head_dim=head_dim, max_positions=max_positions),
        windows=_windows(fields, family, layers),
        max_position_embeddings=max_positions,
    )


def _family(fields: Mapping[str, Any]) -> tuple[str, Family]:
    architectures = fields.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if len(names) != 1 or names[0] not in FAMILIES:
        raise UnsupportedModel("architectures", architectures)
    family = FAMILIES[names[0]]
    if fields.get("model_type", family.model_type) != family.model_type:
        raise UnsupportedModel("model_type", fields["model_type"])
    return names[0], family


def _kv_heads(fields: Mapping[str, Any], family: Family, heads: int) -> int:
    if fields.get("num_key_value_heads") is None and (
        family.model_type == "llama" or "num_key_value_heads" in fields
    ):
        return heads
    kv_heads = positive_int(fields, "num_key_value_heads")
    if heads % kv_heads:
        raise UnsupportedModel("num_key_value_heads", kv_heads)
    return kv_heads


def _head_dim(fields: Mapping[str, Any], family: Family, hidden_size: int, heads: int) -> int:
    if fields.get("head_dim") is not None:
        head_dim = positive_int(fields, "head_dim")
    elif family.model_type == "qwen3":
        head_dim = QWEN3_HEAD_DIM
    elif hidden_size % heads:
        raise UnsupportedModel("hidden_size", hidden_size)
    else:
        head_dim = hidden_size // heads
    if head_dim % 2:  # rotary embedding pairs the halves of a head
        raise UnsupportedModel("head_dim", head_dim)
    return head_dim


def _windows(fields: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window by the rules of its family."""
    layer_types = fields.get("layer_types")
    if family.model_type == "llama":
        sliding = None
        # transformers caches only the window, but attends to the whole prompt.
        if fields.get("sliding_window") is not None:
            raise UnsupportedModel("sliding_window", fields["sliding_window"])
    elif family.model_type == "mistral":
        sliding = _window(fields, MISTRAL_WINDOW)
    else:
        sliding = _window(fields, None) if flag(fields, "use_sliding_window") else None
    if layer_types is None:
        full = 0
        if family.model_type in ("qwen2", "qwen3"):
            value = fields.get("max_window_layers", QWEN_WINDOW_LAYERS)
            if type(value) is not int or value < 0:
                raise UnsupportedModel("max_window_layers", value)
            full = min(value, layers)
        return (None,) * full + (sliding,) * (layers - full)
    return _typed_windows(layer_types, family, layers, sliding)


def _typed_windows(
    layer_types: object, family: Family, layers: int, sliding: int | None
) -> tuple[int | None, ...]:
    kinds = {"full_attention": None, "sliding_attention": sliding}
    if not isinstance(layer_types, list) or len(layer_types) != layers:
        raise UnsupportedModel("layer_types", layer_types)
    for kind in layer_types:
        if not isinstance(kind, str) or kind not in kinds:
            raise UnsupportedModel("layer_types", kind)
        if kind == "sliding_attention" and sliding is None:
            raise UnsupportedModel("layer_types", kind)
    windows = tuple(kinds[kind] for kind in layer_types)
    if family.model_type == "mistral" and windows != (sliding,) * layers:
        raise UnsupportedModel("layer_types", layer_types)  # this family has one window for all layers
    return windows


def _window(fields: Mapping[str, Any], default: int | None) -> int | None:
    if "sliding_window" not in fields and default is not None:
        return default
    return None if fields.get("sliding_window") is None else positive_int(fields, "sliding_window")
