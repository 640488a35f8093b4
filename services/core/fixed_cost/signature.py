"""The signature of a fixed-cost model: what it computes, and the tensors of a row, as its files declare."""

from __future__ import annotations

from dataclasses import dataclass

from fairway.formats.fixed_cost.config import FixedCostConfig
from fairway.formats.fixed_cost.encoder_config import NO_CLASSES, Classes, EncoderConfig, Score
from fairway.formats.fixed_cost.image_config import MAX_TILES, VitConfig
from fairway.formats.fixed_cost.mlp_config import MlpConfig
from fairway.formats.fixed_cost.pooling import LastToken
from services.core.fixed_cost.tensors import ANY, Operation, TensorSpec


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
