"""A decoder's elementwise steps on CUDA, fused: what is short is launched once, and stays in registers.

At small batches a layer's products take tens of microseconds, and each kernel between them some: norms and
rotation of all heads are one, the gate is one, and a residual is added by the product itself. Sums are in
float32 and rounded once. Products are cuBLAS's: a row's may depend on how many rows there are.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from services.worker.engine.cuda import elementwise as kernels
from services.worker.engine.execute.operators import (
    Gated,
    HeadNorms,
    Heads,
    Parts,
    Projection,
    SiluGated,
    TorchOperators,
    whole,
)

GATE_COLUMNS: Final = 1024  # columns that one program computes


class TritonOperators(TorchOperators):
    """Implements ``Operators``; only the norm of whole rows is torch's."""

    def projection(self, parts: Parts, bias: torch.Tensor | None) -> Projection:
        """See ``Operators``."""
        return _Linear(whole(parts), bias)

    def gated(self, parts: Parts, bias: torch.Tensor | None) -> Gated:
        """See ``Operators``."""
        return _Gated(_Linear(whole(parts), bias))

    def heads(
        self, qkv: torch.Tensor, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> Heads:
        """See ``Operators``; ``qkv`` is changed in place."""
        rows, count, dim = qkv.shape
        turned = count - self._kv_heads
        weights = (qkv, qkv) if norms is None else (norms.query, norms.key)
        kernels.turn_heads[(rows * turned,)](
            qkv, *weights, cos, sin, self._eps,
            HEADS=turned - self._kv_heads, TURNED=turned, ALL=count, NORM=norms is not None,
            HALF=dim // 2, HALF_PAD=1 << (dim // 2 - 1).bit_length(),
            num_warps=1,
        )  # fmt: skip
        return qkv[:, : turned - self._kv_heads], qkv[:, turned - self._kv_heads : turned], qkv[:, turned:]


class _Linear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._bias is not None:
            return residual.add_(self(x))
        return residual.addmm_(x, self._weight.t())


class _Gated(SiluGated):
    def combine(self, both: torch.Tensor) -> torch.Tensor:
        rows, width = both.shape[0], both.shape[1] // 2
        out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
        programs = -(-width // GATE_COLUMNS)
        kernels.gate[(rows * programs,)](both, out, WIDTH=width, COLUMNS=GATE_COLUMNS, PROGRAMS=programs)
        return out
