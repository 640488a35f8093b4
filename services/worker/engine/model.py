"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families; what differs is in ``ModelConfig``.

The rows of a step belong to many sequences, one after the other, without padding. Only attention knows
which row is whose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.worker.engine.attention import Attention
from services.worker.engine.config import ModelConfig
from services.worker.engine.linear import Linear
from services.worker.engine.rope import Rope, rotate
from services.worker.engine.weights import EMBEDDING, HEAD, Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything that is loaded. ``bytes`` counts the parameters, not what packing adds."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear
    bytes: int


class Decoder:
    """Computes logits. Holds no state of any sequence: the attention backend has the KV."""

    def __init__(self, config: ModelConfig, weights: Weights, *, rope: Rope, attention: Attention) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope
        self._attention = attention

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        prompt_tokens: torch.Tensor,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Write the KV of all rows; return float32 logits [logit rows, vocabulary].

        The arguments are int64 on the CPU, the first three [rows]; the attention's ``begin`` has been called.
        """
        device = self._weights.embedding.device
        cos, sin = self._rope.cos_sin(positions, prompt_tokens)
        x = F.embedding(tokens.to(device), self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attend(index, layer, self._norm(x, layer.input_norm), cos, sin)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        # The head is the widest product: only rows that sample go through it.
        if not len(logit_rows):
            return x.new_empty((0, self._config.vocab_size), dtype=torch.float32)
        last = x.index_select(0, logit_rows.to(device))
        return self._weights.head(self._norm(last, self._weights.norm)).float()

    def _attend(
        self, index: int, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        heads, kv_heads, dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        qkv = layer.qkv(x).view(len(x), heads + 2 * kv_heads, dim)
        qk, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(qk[:, :heads], layer.q_norm), self._norm(qk[:, heads:], layer.k_norm)
            qk = torch.cat((q, k), dim=1)
        qk = rotate(qk, cos, sin)
        return layer.output(self._attention.attend(index, qk[:, :heads], qk[:, heads:], v))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.norm_eps)


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> Weights:
    """Return the weights on the device. ``progress`` is called with 0..1; one layer at a time is unpacked."""

    def tensor(name: str) -> torch.Tensor:
        return checkpoint.tensor(name, dtype=dtype).to(device)

    def linear(*names: str, bias: bool) -> Linear:
        """Several projections of one input become one product."""
        weight = torch.cat([tensor(f"{name}.weight") for name in names])
        return Linear(weight, torch.cat([tensor(f"{name}.bias") for name in names]) if bias else None)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            input_norm=tensor(prefix + "input_layernorm.weight"),
            qkv=linear(*(attention + name for name in ("q_proj", "k_proj", "v_proj")), bias=config.qkv_bias),
            q_norm=tensor(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=tensor(attention + "k_norm.weight") if config.qk_norm else None,
            output=linear(attention + "o_proj", bias=config.output_bias),
            mlp_norm=tensor(prefix + "post_attention_layernorm.weight"),
            gate_up=linear(mlp + "gate_proj", mlp + "up_proj", bias=config.mlp_bias),
            down=linear(mlp + "down_proj", bias=config.mlp_bias),
        )

    layers = []
    for index in range(config.layers):
        layers.append(layer(index))
        progress((index + 1) / (config.layers + 1))
    embedding, norm = tensor(EMBEDDING), tensor("model.norm.weight")
    head = Linear(embedding if config.tied else tensor(HEAD), None)
    loaded = [embedding, norm, *(part for one in layers for part in _tensors(one))]
    products = [part for one in layers for part in (one.qkv, one.output, one.gate_up, one.down)]
    size = sum(part.nbytes for part in loaded) + sum(part.bytes for part in products)
    progress(1.0)
    return Weights(embedding, tuple(layers), norm, head, size + (0 if config.tied else head.bytes))


def _tensors(layer: Layer) -> list[torch.Tensor]:
    parts = (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
    return [part for part in parts if part is not None]
