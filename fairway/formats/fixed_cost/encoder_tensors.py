"""Names and shapes of an encoder's tensors, by family, as transformers writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fairway.formats.fixed_cost.encoder_config import EncoderConfig
from fairway.formats.weights import Shape, TensorLayout

# Buffers that older checkpoints carry.
BUFFERS: Final = re.compile(r"(.+\.)?embeddings\.(position_ids|token_type_ids)")


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's parts, below ``layer``, which ends with the layer's number."""

    layer: str
    qkv: tuple[str, str, str]
    attended: str
    attended_norm: str
    inner: str
    outer: str
    outer_norm: str


BERT_LAYER: Final = LayerNames(
    "encoder.layer.",
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
DISTILBERT_LAYER: Final = LayerNames(
    "transformer.layer.",
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)


@dataclass(frozen=True, slots=True)
class SequenceHead:
    """A layer on the first token, its activation, and the layer that returns the logits."""

    dense: str
    activation: str
    output: str


def prefix_of(config: EncoderConfig) -> str:
    """Return what the encoder's names begin with: nothing where there is no head."""
    return "" if config.head == "embedding" else config.family.prefix


def layer_names(config: EncoderConfig) -> LayerNames:
    return DISTILBERT_LAYER if config.family.model_type == "distilbert" else BERT_LAYER


def sequence_head(config: EncoderConfig) -> SequenceHead:
    """Return the names of the head for a sequence."""
    match config.family.model_type:
        case "bert":
            return SequenceHead(f"{prefix_of(config)}pooler.dense", "tanh", "classifier")
        case "distilbert":
            return SequenceHead("pre_classifier", "relu", "classifier")
        case _:
            return SequenceHead("classifier.dense", "tanh", "classifier.out_proj")


def encoder_layout(config: EncoderConfig) -> TensorLayout:
    """Return the layout of the checkpoint."""
    hidden, prefix = config.hidden_size, prefix_of(config)
    embeddings = f"{prefix}embeddings."
    shapes: dict[str, Shape] = {
        f"{embeddings}word_embeddings.weight": (config.vocab_size, hidden),
        f"{embeddings}position_embeddings.weight": (config.position_rows, hidden),
        **_norm(f"{embeddings}LayerNorm", hidden),
    }
    if config.type_rows:
        shapes[f"{embeddings}token_type_embeddings.weight"] = (config.type_rows, hidden)
    for index in range(config.layers):
        shapes |= _layer(config, f"{prefix}{layer_names(config).layer}{index}.")
    optional: dict[str, Shape] = {}
    if config.head == "sequence":
        head = sequence_head(config)
        shapes |= _linear(head.dense, hidden, hidden) | _linear(head.output, config.labels, hidden)
    elif config.head == "tokens":
        shapes |= _linear("classifier", config.labels, hidden)
    if config.family.model_type != "distilbert":
        pooler = _linear(f"{prefix}pooler.dense", hidden, hidden)
        optional = {name: shape for name, shape in pooler.items() if name not in shapes}
    return TensorLayout(shapes, optional, ignored=BUFFERS)


def _layer(config: EncoderConfig, prefix: str) -> dict[str, Shape]:
    hidden, inner, names = config.hidden_size, config.intermediate_size, layer_names(config)
    shapes = {
        **_linear(names.attended, hidden, hidden),
        **_norm(names.attended_norm, hidden),
        **_linear(names.inner, inner, hidden),
        **_linear(names.outer, hidden, inner),
        **_norm(names.outer_norm, hidden),
    }
    for name in names.qkv:
        shapes |= _linear(name, hidden, hidden)
    return {prefix + name: shape for name, shape in shapes.items()}


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
