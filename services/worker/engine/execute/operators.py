"""What a decoder computes with, except attention. ``Operators`` is the seam, ``TorchOperators`` runs
anywhere.

Each implementation states how far a row's result depends on the rows that are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from services.worker.engine.execute.rope import rotate

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Parts = Sequence[torch.Tensor]  # a weight [out, in] in pieces [some of out, in], in their order


class NotFinite(ValueError):
    """A part of a weight holds a number that is not finite."""

    def __init__(self, part: int) -> None:
        super().__init__(part)
        self.part = part


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

    def both(self, x: torch.Tensor) -> torch.Tensor:
        """Return gate(x) and up(x) beside each other, [rows, 2 * inner]."""

    def combine(self, both: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, [rows, inner], of what ``both`` returns."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [dim] of the norms of each query and each key head, where a family has them."""

    query: torch.Tensor
    key: torch.Tensor


class Operators(Protocol):
    """Rows [rows, ...] are contiguous, of one data type, on one device."""

    copies: bool  # whether weights are copied and checked, by any thread: parts may be views of a file

    def projection(self, parts: Parts, bias: torch.Tensor | None) -> Projection:
        """Take over weight [out, in] and bias [out]. Raises NotFinite where it checks."""

    def gated(self, parts: Parts, bias: torch.Tensor | None) -> Gated:
        """Take over weight [2 * inner, in] and bias [2 * inner]: the gate's rows, then the other's."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of each row of x [rows, width]."""

    def heads(
        self, qkv: torch.Tensor, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> Heads:
        """Return q [rows, heads, dim], normalised and rotated, k [rows, kv_heads, dim] likewise, and v.

        ``qkv`` [rows, heads + 2 * kv_heads, dim] may be changed in place; cos and sin are those of ``Rope``.
        """


def whole(parts: Parts) -> torch.Tensor:
    """Return the weight in one piece; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class TorchOperators:
    """A row's result depends on the other rows only where ``Linear`` states it."""

    copies = False

    def __init__(self, *, kv_heads: int, eps: float) -> None:
        self._kv_heads = kv_heads
        self._eps = eps

    def projection(self, parts: Parts, bias: torch.Tensor | None) -> Projection:
        """See ``Operators``."""
        return Linear(whole(parts), bias)

    def gated(self, parts: Parts, bias: torch.Tensor | None) -> Gated:
        """See ``Operators``."""
        return SiluGated(Linear(whole(parts), bias))

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


class SiluGated:
    """Implements ``Gated`` on one projection to both."""

    def __init__(self, both: Projection) -> None:
        self.bytes = both.bytes
        self._both = both

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(self.both(x))

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self._both(x)

    def combine(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


def in_company(product: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the product of ``x``, [rows, in] in most cases; a single row together with one of zeros.

    oneDNN sums a row alone in another order than one in company where it is wider than 1,024.
    """
    if x.dim() == 2 and len(x) == 1:
        return product(F.pad(x, (0, 0, 0, 1)), *rest)[:1]
    return product(x, *rest)


PACKED_FOR_ROWS = 64  # a hint to the packing, not a limit


class Linear:
    """A linear layer that packs its weight once, where the processor's library can.

    ``weight`` [out, in] and ``bias`` [out] are taken over; calling it maps [rows, in] to [rows, out].

    ``F.linear`` repacks the weight at each call on CPUs. oneDNN's packed form skips that. In float32 its
    result for a row was the same in every number of rows from 2 to 512 that was tried, on processors with
    AVX512, and no row is computed alone. This is an observation and no promise, unlike that of ``native``; in
    bfloat16 the result does depend on the number of rows. The operators are private to torch: detected, not
    assumed.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._bias = bias
        self._packed = _packs(weight)
        self._weight: Any = _pack(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return in_company(self._product, x)
        return F.linear(x, self._weight, self._bias)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual [rows, out] plus what calling it returns."""
        return residual + self(x)


def _pack(weight: torch.Tensor) -> Any:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)


def _packs(weight: torch.Tensor) -> bool:
    """Whether this build of torch packs such a weight and computes with it what ``F.linear`` does."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    try:
        probe = torch.eye(4)
        result = torch.ops.mkldnn._linear_pointwise(probe, _pack(probe), None, "none", [], "")
        return bool(torch.equal(result, probe))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
