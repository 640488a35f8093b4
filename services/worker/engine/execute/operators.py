"""What a decoder computes with, attention apart. ``Operators`` is the seam, ``TorchOperators`` runs anywhere.

Each implementation states how far a row's result depends on the rows that are computed with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from services.worker.engine.execute.linear import Linear
from services.worker.engine.execute.rope import rotate

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Projection(Protocol):
    """A linear map with its weight, which may be packed. ``bytes`` are those of its parameters."""

    bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, out] for x [rows, in]."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [rows, out] plus the projection of x; the argument may be changed in place."""


class Gated(Protocol):
    """Two projections of one input; the first, through SiLU, gates the second. ``bytes`` as above."""

    bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate(x)) * up(x), [rows, inner], for x [rows, in]."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [dim] of the norms of each query and each key head, where a family has them."""

    query: torch.Tensor
    key: torch.Tensor


class Operators(Protocol):
    """Rows [rows, ...] are contiguous, of one data type, on one device."""

    def projection(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
        """Take over weight [out, in] and bias [out]."""

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Gated:
        """Take over weight [2 * inner, in] and bias [2 * inner]: the gate's rows, then the other's."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of each row of x [rows, width]."""

    def heads(
        self, qkv: torch.Tensor, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> Heads:
        """Return q [rows, heads, dim], normalised and rotated, k [rows, kv_heads, dim] likewise, and v.

        ``qkv`` [rows, heads + 2 * kv_heads, dim] may be changed in place; cos and sin are those of ``Rope``.
        """


class TorchOperators:
    """A row's result depends on the other rows only where ``Linear`` states it."""

    def __init__(self, *, kv_heads: int, eps: float) -> None:
        self._kv_heads = kv_heads
        self._eps = eps

    def projection(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
        """See ``Operators``."""
        return Linear(weight, bias)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Gated:
        """See ``Operators``."""
        return _Gated(Linear(weight, bias))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See ``Operators``."""
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def heads(
        self, qkv: torch.Tensor, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> Heads:
        """See ``Operators``."""
        heads = qkv.shape[1] - 2 * self._kv_heads
        qk, v = qkv[:, : -self._kv_heads], qkv[:, -self._kv_heads :]
        if norms is not None:
            q, k = self.norm(qk[:, :heads], norms.query), self.norm(qk[:, heads:], norms.key)
            qk = torch.cat((q, k), dim=1)
        qk = rotate(qk, cos, sin)
        return qk[:, :heads], qk[:, heads:], v


class _Gated:
    def __init__(self, both: Linear) -> None:
        self.bytes = both.bytes
        self._both = both

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._both(x).chunk(2, dim=-1)
        return F.silu(gate) * up
