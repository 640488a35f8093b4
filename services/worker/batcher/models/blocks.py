"""What the models are made of: linear layers, norms, activations, and attention within each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F

from services.worker.batcher.models.rows import TokenRows

ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
    "none": lambda x: x,
}


class TensorSource(Protocol):
    """Returns a tensor of the checkpoint, converted, on the device."""

    def __call__(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Dense:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def linear(tensor: TensorSource, *names: str, bias: bool = True) -> Dense:
    """Return one layer; several of one input are joined."""
    weight = torch.cat([tensor(f"{name}.weight") for name in names])
    return Dense(weight, torch.cat([tensor(f"{name}.bias") for name in names]) if bias else None)


def norm(tensor: TensorSource, name: str, eps: float) -> Norm:
    return Norm(tensor(f"{name}.weight"), tensor(f"{name}.bias"), eps)


class RowAttention(Protocol):
    """Attention of every token to all tokens of its own row."""

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return [tokens, heads * head_dim] for queries, keys and values [tokens, 3, heads, head_dim]."""


def attention_of(rows: TokenRows) -> RowAttention:
    """Return the attention of these rows."""
    if not rows.width:
        return partial(_packed, rows.runs)
    mask = None
    if min(rows.lengths) < rows.width:
        lengths = torch.tensor(rows.lengths, device=rows.ids.device)
        mask = torch.arange(rows.width, device=rows.ids.device) < lengths[:, None]
        # True for the keys that are no padding, for all heads and queries of a row.
        mask = mask[:, None, None, :]
    return partial(_padded, len(rows.lengths), mask)


def whole_attention(rows: int) -> RowAttention:
    """Return the attention of rows of one length without padding."""
    return partial(_padded, rows, None)


def _padded(rows: int, mask: torch.Tensor | None, qkv: torch.Tensor) -> torch.Tensor:
    tokens, _, heads, head_dim = qkv.shape
    q, k, v = qkv.view(rows, tokens // rows, 3, heads, head_dim).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return attended.transpose(1, 2).reshape(tokens, heads * head_dim)


def _packed(runs: list[tuple[int, int]], qkv: torch.Tensor) -> torch.Tensor:
    """Attend run by run: no product spans two rows, so that not even a NaN passes from one to another."""
    parts: list[Any] = []
    begin = 0
    for count, length in runs:
        parts.append(_padded(count, None, qkv[begin : begin + count * length]))
        begin += count * length
    return torch.cat(parts)
