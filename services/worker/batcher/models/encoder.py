"""The encoder of the BERT, RoBERTa and DistilBERT families: tokens of many rows to vectors.

Only attention separates the tokens by row, so padded and packed batches differ in it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fairway.formats.fixed_cost.encoder_config import EncoderConfig, layer_names, prefix_of
from services.worker.batcher.models.blocks import (
    ACTIVATIONS,
    Dense,
    Norm,
    TensorSource,
    attention_of,
    linear,
    norm,
)
from services.worker.batcher.models.model import Pause, no_pause
from services.worker.batcher.models.rows import TokenRows


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Dense
    attended: Dense
    attended_norm: Norm
    inner: Dense
    outer: Dense
    outer_norm: Norm


class Encoder:
    """Computes the last hidden state. Holds no state of a batch."""

    def __init__(self, config: EncoderConfig, tensor: TensorSource) -> None:
        embeddings = f"{prefix_of(config)}embeddings."
        self._config = config
        self._words = tensor(f"{embeddings}word_embeddings.weight")
        self._positions = tensor(f"{embeddings}position_embeddings.weight")
        self._types = tensor(f"{embeddings}token_type_embeddings.weight") if config.type_rows else None
        self._norm = norm(tensor, f"{embeddings}LayerNorm", config.norm_eps)
        self._layers = tuple(_layer(config, tensor, index) for index in range(config.layers))
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, rows: TokenRows, pause: Pause = no_pause) -> torch.Tensor:
        """Return [tokens, hidden]; what padding has there means nothing.

        ``pause`` is called before each layer but the first, and before its second half.
        """
        config, attend = self._config, attention_of(rows)
        x = F.embedding(rows.ids, self._words)
        if self._types is not None:
            x = x + F.embedding(rows.types, self._types)
        x = self._norm(x + F.embedding(rows.positions, self._positions))
        head_dim = config.hidden_size // config.heads
        for number, layer in enumerate(self._layers):
            if number:
                pause()
            attended = attend(layer.qkv(x).view(len(x), 3, config.heads, head_dim))
            x = layer.attended_norm(layer.attended(attended) + x)
            pause()
            x = layer.outer_norm(layer.outer(self._activation(layer.inner(x))) + x)
        return x


def _layer(config: EncoderConfig, tensor: TensorSource, index: int) -> EncoderLayer:
    names, eps = layer_names(config), config.norm_eps
    prefix = f"{prefix_of(config)}{names.layer}{index}."
    return EncoderLayer(
        qkv=linear(tensor, *(prefix + name for name in names.qkv)),
        attended=linear(tensor, prefix + names.attended),
        attended_norm=norm(tensor, prefix + names.attended_norm, eps),
        inner=linear(tensor, prefix + names.inner),
        outer=linear(tensor, prefix + names.outer),
        outer_norm=norm(tensor, prefix + names.outer_norm, eps),
    )
