"""The signature of a fixed-cost model: what it computes, and the tensors of a row, as its files declare.

Data types are those of the public inference protocol v2. Shapes are of one row, without the batch dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isqrt, prod
from typing import Final

from fairway.formats.fixed_cost.config import FixedCostConfig, MlpConfig
from fairway.formats.fixed_cost.encoder_config import NO_CLASSES, Classes, EncoderConfig, Score
from fairway.formats.fixed_cost.image_config import MAX_TILES, VitConfig
from fairway.formats.fixed_cost.pooling import LastToken

ANY: Final = -1  # an extent that the model does not fix
TILE: Final = 32  # pixels of a side
TILES: Final = f"tiles of {TILE} x {TILE} pixels"


class Operation(StrEnum):
    """What a forward pass returns of each row."""

    EMBED = "embed"  # a vector
    CLASSIFY = "classify"  # logits of labels
    SCORE = "score"  # one logit: how well a pair of texts matches
    TOKENS = "tokens"  # logits of labels, of each token
    INFER = "infer"  # tensors that the model declares


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a row. ``ANY`` in ``shape``: any extent from 1 on."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    # The first extent is the row's length: rows of different lengths may share a batch.
    has_length: bool = False
    optional: bool = False
    # The row's length is ``tiles_of`` its shape: images of different sizes never share a batch.
    is_image: bool = False

    def shape_of(self, length: int) -> tuple[int, ...]:
        """Return the shape of a row of this length; an image is a square of at most so many tiles."""
        free = TILE * isqrt(length) if self.is_image else length
        return tuple(free if extent == ANY else extent for extent in self.shape)


def tiles_of(shape: Sequence[int]) -> int:
    """Return how many tiles cover an image whose shape ends with height and width."""
    return prod(-(-extent // TILE) for extent in shape[-2:])


@dataclass(frozen=True, slots=True)
class Signature:
    """Whoever sends a row may rely on it; a worker checks each row against it."""

    operation: Operation
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_tokens: int = 0  # longest row in tokens, or largest image in tiles; 0: rows have no length
    vocab_size: int = 0
    # Whether an embedding has length 1; the next two fields state to what sizes it may be cut.
    normalized: bool = False
    may_be_cut: bool = False
    dimensions: tuple[int, ...] = ()  # the only sizes of a cut; empty: any
    lowercase: bool = False  # texts are lowercased before their tokenizer
    score: Score = "sigmoid"  # how a score is made of a logit
    classes: Classes = NO_CLASSES  # the labels of a model that classifies
    # Whether rows are sequences of a decoder that end with their prefill.
    by_prefill: bool = False

    @property
    def has_types(self) -> bool:
        """Whether a row may mark which of its two texts a token belongs to."""
        return any(spec.name == "token_type_ids" for spec in self.inputs)


def signature_of_decoder(hidden_size: int, vocab_size: int, embeds: LastToken) -> Signature:
    """Return the signature of a decoder that embeds."""
    return Signature(
        Operation.EMBED,
        (TensorSpec("input_ids", "INT64", (ANY,), has_length=True),),
        (TensorSpec("embedding", "FP32", (hidden_size,)),),
        max_tokens=embeds.max_tokens,
        vocab_size=vocab_size,
        normalized=embeds.normalize,
        lowercase=embeds.lowercase,
        by_prefill=True,
    )


def signature_of(config: FixedCostConfig) -> Signature:
    """Return the signature of the model that a configuration describes."""
    match config:
        case EncoderConfig():
            return _of_encoder(config)
        case MlpConfig():
            return Signature(
                Operation.INFER,
                (TensorSpec("input", "FP32", (config.input_size,)),),
                (TensorSpec("output", "FP32", (config.layers[-1].size,)),),
            )
    size = config.image_size if isinstance(config, VitConfig) else (ANY, ANY)
    is_free = ANY in size
    return Signature(
        Operation.CLASSIFY,
        (TensorSpec("pixel_values", "FP32", (config.channels, *size), is_image=is_free),),
        (TensorSpec("logits", "FP32", (config.labels,)),),
        max_tokens=MAX_TILES if is_free else 0,
        classes=config.classes,
    )


def _of_encoder(config: EncoderConfig) -> Signature:
    inputs = [TensorSpec("input_ids", "INT64", (ANY,), has_length=True)]
    if config.type_rows:
        inputs.append(TensorSpec("token_type_ids", "INT64", (ANY,), has_length=True, optional=True))
    match config.head:
        case "embedding":
            operation, output = Operation.EMBED, TensorSpec("embedding", "FP32", (config.hidden_size,))
        case "tokens":
            operation = Operation.TOKENS
            output = TensorSpec("logits", "FP32", (ANY, config.labels), has_length=True)
        case _:
            operation = Operation.SCORE if config.is_reranker else Operation.CLASSIFY
            output = TensorSpec("logits", "FP32", (config.labels,))
    return Signature(
        operation,
        tuple(inputs),
        (output,),
        max_tokens=config.max_tokens,
        vocab_size=config.vocab_size,
        normalized=config.normalize,
        may_be_cut=config.is_matryoshka,
        dimensions=config.matryoshka_dimensions,
        lowercase=config.lowercase,
        score=config.score,
        classes=config.classes,
    )
