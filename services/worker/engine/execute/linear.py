"""A linear layer that packs its weight once, where the processor's library can.

``F.linear`` repacks the weight at each call on CPUs. oneDNN's packed form skips that. In float32 its result
for a row was the same in every number of rows from 2 to 512 that was tried, on processors with AVX512; a
single row was summed in another order where inputs are wider than 1,024, so it is computed beside a row of
zeros. This is an observation and no promise, unlike that of ``native``; in bfloat16 the result does depend on
the number of rows. The operators are private to torch: detected, not assumed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

PACKED_FOR_ROWS = 64  # a hint to the packing, not a limit


class Linear:
    """``weight`` [out, in] and ``bias`` [out] are taken over; calling it maps [rows, in] to [rows, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._bias = bias
        self._packed = _packs(weight)
        self._weight: Any = _pack(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed and len(x) == 1:
            return self(F.pad(x, (0, 0, 0, 1)))[:1]
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)

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
