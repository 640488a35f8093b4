"""Converts the ``config.json`` of a text encoder to its shape, or rejects it with the field and its value.

Families: BERT (MiniLM, BGE, E5 among them), RoBERTa, XLM-RoBERTa and DistilBERT. Heads: an embedding, logits
of a sequence, logits of each token. A sequence model with one label is a reranker: it returns a score, which
is the logit or its sigmoid, by the fields that sentence-transformers and vLLM read.
Defaults are those of the transformers configuration of each family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from fairway.formats.config_fields import UnsupportedModel, number, positive_int, require_inert
from fairway.formats.decoder_config import MAX_LAYERS
from fairway.formats.weights import Shape, TensorLayout

Head = Literal["embedding", "sequence", "tokens"]
Pooling = Literal["mean", "cls"]
Score = Literal["sigmoid", "logit"]

ACTIVATIONS: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
MAX_LABELS: Final = 1 << 16
DEFAULT_LABELS: Final = 2
MAX_LABEL_CHARS: Final = 256
MAX_CUTS: Final = 64
# How a classifier's probabilities are made of its logits, by ``problem_type``, as in vLLM.
PROBABILITIES: Final[Mapping[str | None, Literal["softmax", "sigmoid", "logit"]]] = {
    None: "softmax",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "logit",
}

# How a reranker's score is made of its logit, by the module that its configuration names.
SCORES: Final[Mapping[str, Score]] = {
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.Identity": "logit",
    "torch.nn.modules.linear.Identity": "logit",
}

# Fields that change the computation of these families. Any other value is rejected.
INERT_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "quantization_config": (None,),
    "auto_map": (None,),
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "chunk_size_feed_forward": (None, 0),
    "pruned_heads": (None, {}),
    "embedding_size": (None,),
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Properties of a family: how its fields are named, and what it embeds."""

    model_type: str
    prefix: str  # prefix of the encoder's tensors below a head
    names: Mapping[str, str]  # names of the fields that BERT calls otherwise
    has_token_types: bool = True
    # Positions count from the padding id on, and tokens of that id have none.
    positions_after_padding: bool = False
    norm_eps: float = 1e-12
    padding_id: int = 0


_DISTILBERT_NAMES: Final = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
FAMILIES: Final[Mapping[str, EncoderFamily]] = {
    "Bert": EncoderFamily("bert", "bert.", {}),
    "Roberta": EncoderFamily("roberta", "roberta.", {}, positions_after_padding=True, padding_id=1),
    "XLMRoberta": EncoderFamily("xlm-roberta", "roberta.", {}, positions_after_padding=True, padding_id=1),
    "DistilBert": EncoderFamily("distilbert", "distilbert.", _DISTILBERT_NAMES, has_token_types=False),
}
_HEADS: Final[Mapping[str, Head]] = {
    "Model": "embedding",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "tokens",
}
ARCHITECTURES: Final[Mapping[str, tuple[EncoderFamily, Head]]] = {
    name + ending: (family, head) for name, family in FAMILIES.items() for ending, head in _HEADS.items()
}


@dataclass(frozen=True, slots=True)
class Classes:
    """What the logits of a classifier stand for. ``probabilities``: how they are made of the logits."""

    names: tuple[str, ...] = ()
    probabilities: Literal["softmax", "sigmoid", "logit"] = "softmax"


NO_CLASSES: Final = Classes()


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder and its head."""

    family: EncoderFamily
    head: Head
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP
    layers: int
    heads: int
    position_rows: int  # rows of the table of positions
    type_rows: int  # rows of the table of token types; 0: there is none
    padding_id: int
    norm_eps: float
    activation: str
    # Labels of a sequence or a token; 0 for an embedding.
    labels: int
    score: Score = "sigmoid"  # how a reranker makes a score of a logit
    classes: Classes = NO_CLASSES  # the labels of a sequence
    # How an embedding is made of the tokens' states.
    pooling: Pooling = "mean"
    normalize: bool = False
    lowercase: bool = False  # texts are lowercased before their tokenizer
    max_tokens: int = 0  # most tokens of a row; special tokens count
    # Whether an embedding may be cut to its first dimensions, and to which numbers; empty: any.
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()

    @property
    def is_reranker(self) -> bool:
        return self.head == "sequence" and self.labels == 1

    @property
    def max_positions(self) -> int:
        """The most tokens for which positions are defined."""
        if self.family.positions_after_padding:
            return self.position_rows - self.padding_id - 1
        return self.position_rows


def parse_encoder(fields: Mapping[str, Any]) -> EncoderConfig:
    """Return the encoder; its pooling is not part of ``config.json``. Raises UnsupportedModel."""
    architecture = fields["architectures"][0]
    family, head = ARCHITECTURES[architecture]
    if fields.get("model_type", family.model_type) != family.model_type:
        raise UnsupportedModel("model_type", fields["model_type"])
    require_inert(fields, INERT_VALUES)
    names = family.names
    hidden_size = positive_int(fields, names.get("hidden_size", "hidden_size"))
    heads = positive_int(fields, names.get("num_attention_heads", "num_attention_heads"))
    if hidden_size % heads:
        raise UnsupportedModel(names.get("hidden_size", "hidden_size"), hidden_size)
    config = EncoderConfig(
        family=family,
        head=head,
        vocab_size=positive_int(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(fields, names.get("intermediate_size", "intermediate_size")),
        layers=positive_int(fields, names.get("num_hidden_layers", "num_hidden_layers"), most=MAX_LAYERS),
        heads=heads,
        position_rows=positive_int(fields, "max_position_embeddings"),
        type_rows=_type_rows(fields) if family.has_token_types else 0,
        padding_id=_padding_id(fields, family),
        norm_eps=number(fields, "layer_norm_eps", default=family.norm_eps, above=0.0),
        activation=activation_of(fields, names.get("hidden_act", "hidden_act")),
        labels=0 if head == "embedding" else labels_of(fields),
    )
    if config.max_positions < 1:
        raise UnsupportedModel("max_position_embeddings", config.position_rows)
    if config.is_reranker:
        config = replace(config, score=score_of(fields))
    elif head == "sequence":
        config = replace(config, classes=classes_of(fields))
    return _with_cuts(config, fields)


def _with_cuts(config: EncoderConfig, fields: Mapping[str, Any]) -> EncoderConfig:
    """Return the encoder with the sizes that its embeddings may be cut to, by the fields that vLLM reads."""
    sizes = fields.get("matryoshka_dimensions")
    if sizes is None:
        return replace(config, is_matryoshka=fields.get("is_matryoshka") is True)
    known = isinstance(sizes, list) and 0 < len(sizes) <= MAX_CUTS
    if not known or not all(type(size) is int and 0 < size <= config.hidden_size for size in sizes):
        raise UnsupportedModel("matryoshka_dimensions", sizes)
    return replace(config, is_matryoshka=True, matryoshka_dimensions=tuple(sorted(set(sizes))))


def labels_of(fields: Mapping[str, Any]) -> int:
    """Return how many labels a head has: ``num_labels``, else the size of ``id2label``, else 2."""
    if fields.get("num_labels") is not None:
        return positive_int(fields, "num_labels", most=MAX_LABELS)
    named = fields.get("id2label")
    if named is None:
        return DEFAULT_LABELS
    if not isinstance(named, dict) or not 0 < len(named) <= MAX_LABELS:
        raise UnsupportedModel("id2label", named)
    return len(named)


def classes_of(fields: Mapping[str, Any]) -> Classes:
    """Return the names of ``id2label`` and the activation of ``problem_type``. Raises UnsupportedModel.

    A configuration without names gets those of transformers.
    """
    count = labels_of(fields)
    named: Any = fields.get("id2label")
    names = tuple(f"LABEL_{index}" for index in range(count))
    if isinstance(named, dict) and named.keys() == {str(index) for index in range(count)}:
        names = tuple(named[str(index)] for index in range(count))
        if any(type(name) is not str or len(name) > MAX_LABEL_CHARS for name in named.values()):
            raise UnsupportedModel("id2label", named)
    problem = fields.get("problem_type")
    if problem not in list(PROBABILITIES):  # it may be no key of a mapping
        raise UnsupportedModel("problem_type", problem)
    return Classes(names, PROBABILITIES[problem])


def score_of(fields: Mapping[str, Any]) -> Score:
    """Return how a reranker's score is made of its logit; a sigmoid where nothing is declared.

    ``sentence_transformers.activation_fn`` comes before the older field, as in sentence-transformers. Raises
    UnsupportedModel.
    """
    name, newer = "sbert_ce_default_activation_function", fields.get("sentence_transformers")
    value = fields.get(name)
    if newer is not None:
        if not isinstance(newer, dict):
            raise UnsupportedModel("sentence_transformers", newer)
        if "activation_fn" in newer:
            name, value = "sentence_transformers.activation_fn", newer["activation_fn"]
    if value is None:
        return "sigmoid"
    if not isinstance(value, str) or value not in SCORES:
        raise UnsupportedModel(name, value)
    return SCORES[value]


def activation_of(fields: Mapping[str, Any], name: str, *, default: str = "gelu") -> str:
    """Return the activation in a field. Raises UnsupportedModel for one that is not computed here."""
    value = fields.get(name, default)
    if value not in ACTIVATIONS:
        raise UnsupportedModel(name, value)
    return str(value)


def _type_rows(fields: Mapping[str, Any]) -> int:
    return positive_int(fields, "type_vocab_size") if "type_vocab_size" in fields else 2


def _padding_id(fields: Mapping[str, Any], family: EncoderFamily) -> int:
    value = fields.get("pad_token_id", family.padding_id)
    if value is None and not family.positions_after_padding:
        return 0  # padding is masked: any id does
    if type(value) is not int or not 0 <= value < positive_int(fields, "vocab_size"):
        raise UnsupportedModel("pad_token_id", value)
    return value


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
