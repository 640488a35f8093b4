"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families; what differs is in ``ModelConfig``.

The rows of a step belong to many sequences, one after the other, without padding. Only attention
separates the rows by sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from fairway.formats.decoder_config import ModelConfig
from fairway.formats.weights import EMBEDDING, HEAD
from services.worker.engine.execute.adapters import AdaptedRows, AdapterSet
from services.worker.engine.execute.attention import Attention
from services.worker.engine.execute.operators import Gated, HeadNorms, NotFinite, Operators, Parts, Projection
from services.worker.engine.execute.rope import Rope
from services.worker.engine.load.weights import Checkpoint, not_finite

_Product = TypeVar("_Product", Projection, Gated)


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Projection
    head_norms: HeadNorms | None
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Gated
    down: Projection


@dataclass(frozen=True, slots=True)
class Weights:
    """Everything that is loaded, and the operators that packed it and compute with it.

    ``bytes`` counts the parameters, not what packing adds.
    """

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Projection
    operators: Operators
    bytes: int


@dataclass(slots=True)
class Hidden:
    """Receives hidden states after the final norm: those of the logit rows [logit rows, hidden size], and
    those of ``others``, int64 rows that need no logits now, [others, hidden size]."""

    others: torch.Tensor | None = None
    values: torch.Tensor | None = None
    of_others: torch.Tensor | None = None


class Decoder:
    """Computes logits. Holds no state of any sequence: the attention backend has the KV."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        rope: Rope,
        attention: Attention,
        adapters: AdapterSet | None = None,
    ) -> None:
        """``adapters`` change the rows that they name for the present step."""
        self._config = config
        self._adapters = adapters
        self._weights = weights
        self._rope = rope
        self._attention = attention
        self._operators = weights.operators

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        prompt_tokens: torch.Tensor,
        logit_rows: torch.Tensor,
        hidden: Hidden | None = None,
    ) -> torch.Tensor:
        """Write the KV of all rows; return float32 logits [logit rows, vocabulary].

        The arguments are int64, the first three [rows], on the CPU but for ``tokens``, which may be anywhere;
        the attention's ``begin`` has been called. ``hidden`` receives what the logits are computed from.
        """
        device, norm = self._weights.embedding.device, self._operators.norm
        rows, count = logit_rows, len(logit_rows)
        if hidden is not None and hidden.others is not None:
            rows = torch.cat((logit_rows, hidden.others))
        cos, sin = self._rope.cos_sin(positions, prompt_tokens)
        x = F.embedding(tokens.to(device, non_blocking=True), self._weights.embedding)
        last = len(self._weights.layers) - 1
        adapted = [] if self._adapters is None else self._adapters.rows()
        for index, layer in enumerate(self._weights.layers):
            qkv = self._qkv(index, layer, norm(x, layer.input_norm), adapted)
            heads = self._operators.heads(qkv, layer.head_norms, cos, sin)
            attended = self._attention.attend(index, *heads)
            if index == last and (len(rows) < len(x) or rows is not logit_rows):
                # All KV is written: from here on only these rows are of use.
                if not len(rows):
                    return x.new_empty((0, self._config.vocab_size), dtype=torch.float32)
                chosen = rows.to(device, non_blocking=True)
                x, attended = x.index_select(0, chosen), attended.index_select(0, chosen)
                adapted = [] if self._adapters is None else self._adapters.rows(rows)
            x = layer.output.add_to(x, attended)
            for each in adapted:
                each.add(index, "output", x, attended)
            x = self._with_mlp(index, layer, x, adapted)
        x = norm(x, self._weights.norm)
        if hidden is not None:
            hidden.values, hidden.of_others = x[:count], x[count:]
        if not count:
            return x.new_empty((0, self._config.vocab_size), dtype=torch.float32)
        return self.logits(x[:count])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [rows, vocabulary] of hidden states after the final norm."""
        return self._weights.head(hidden).float()

    def _qkv(self, index: int, layer: Layer, x: torch.Tensor, adapted: list[AdaptedRows]) -> torch.Tensor:
        qkv = layer.qkv(x)
        for each in adapted:
            each.add(index, "qkv", qkv, x)
        return qkv.view(len(x), self._config.heads + 2 * self._config.kv_heads, self._config.head_dim)

    def _with_mlp(
        self, index: int, layer: Layer, residual: torch.Tensor, adapted: list[AdaptedRows]
    ) -> torch.Tensor:
        x = self._operators.norm(residual, layer.mlp_norm)
        inner = layer.gate_up(x)
        for each in adapted:
            each.gate(index, layer.gate_up, inner, x)
        residual = layer.down.add_to(residual, inner)
        for each in adapted:
            each.add(index, "down", residual, inner)
        return residual


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The pieces of a model, made from its open checkpoint; by several threads where the operators copy."""

    config: ModelConfig
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    operators: Operators

    def tensor(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(name, dtype=self.dtype).to(self.device)

    def product(
        self, make: Callable[[Parts, torch.Tensor | None], _Product], *names: str, bias: bool = False
    ) -> _Product:
        """Several projections of one input become one product."""
        owned = not self.operators.copies
        parts = [
            self.checkpoint.tensor(f"{name}.weight", dtype=self.dtype, owned=owned).to(self.device)
            for name in names
        ]
        biases = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        try:
            return make(parts, biases)
        except NotFinite as error:
            raise not_finite(f"{names[error.part]}.weight", self.dtype) from error

    @torch.inference_mode()
    def layer(self, index: int) -> Layer:
        config, operators = self.config, self.operators
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        norms = (self.tensor(f"{attention}{name}_norm.weight") for name in "qk" if config.qk_norm)
        inputs = (attention + name for name in ("q_proj", "k_proj", "v_proj"))
        return Layer(
            input_norm=self.tensor(prefix + "input_layernorm.weight"),
            qkv=self.product(operators.projection, *inputs, bias=config.qkv_bias),
            head_norms=HeadNorms(*norms) if config.qk_norm else None,
            output=self.product(operators.projection, attention + "o_proj", bias=config.output_bias),
            mlp_norm=self.tensor(prefix + "post_attention_layernorm.weight"),
            gate_up=self.product(operators.gated, mlp + "gate_proj", mlp + "up_proj", bias=config.mlp_bias),
            down=self.product(operators.projection, mlp + "down_proj", bias=config.mlp_bias),
        )

    @torch.inference_mode()
    def head(self, embedding: torch.Tensor) -> Projection:
        if self.config.tied:
            return self.operators.projection([embedding], None)
        return self.product(self.operators.projection, HEAD.removesuffix(".weight"))


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    operators: Operators,
    progress: Callable[[float], None],
) -> Weights:
    """Return the weights on the device. ``progress`` is called with 0..1; each thread unpacks one layer."""
    made = _Pieces(config, checkpoint, dtype, device, operators)
    embedding, norm = made.tensor(EMBEDDING), made.tensor("model.norm.weight")
    layers: list[Layer] = []
    # Each thread makes a layer of its own: threads that share one wait for each other at every weight.
    with ThreadPoolExecutor(torch.get_num_threads() if operators.copies else 1, "load") as pool:
        last = pool.submit(made.head, embedding)
        for each in pool.map(made.layer, range(config.layers)):
            layers.append(each)
            progress(len(layers) / (config.layers + 1))
        head = last.result()
    loaded = [embedding, norm, *(part for one in layers for part in _tensors(one))]
    products = [part for one in layers for part in (one.qkv, one.output, one.gate_up, one.down)]
    size = sum(part.nbytes for part in loaded) + sum(part.bytes for part in products)
    progress(1.0)
    return Weights(embedding, tuple(layers), norm, head, operators, size + (0 if config.tied else head.bytes))


def _tensors(layer: Layer) -> list[torch.Tensor]:
    norms = layer.head_norms
    return [layer.input_norm, layer.mlp_norm, *((norms.query, norms.key) if norms is not None else ())]
