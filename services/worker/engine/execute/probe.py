"""The probe of a version on an engine: one score per sampling row, from hidden states that the step has."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch

from services.worker.engine.sample.sampler import Reductions

SLICE_ROWS: Final = 64  # rows whose products are in memory at once
CERTAIN: Final = 1.0  # score of a row whose products exceed float32, which must not pass for safe


class SafetyProbe:
    """``weight`` [categories, hidden size] and ``bias`` [categories], float32, on the decoder's device.

    A row's result does not depend on the other rows where ``reductions`` do not: a product of matrices would
    sum in another order for another number of rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, reductions: Reductions) -> None:
        self._weight = weight
        self._bias = bias
        self._reductions = reductions

    def launch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Begin to judge states [rows, hidden size]; return each row's greatest logit, float64 [rows]."""
        firsts = range(0, len(hidden), SLICE_ROWS)
        slices = [self._slice(hidden[first : first + SLICE_ROWS]) for first in firsts]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _slice(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self._reductions.sums(hidden.float()[:, None] * self._weight) + self._bias).amax(dim=1)


def scores_of(logits: Iterable[float]) -> list[float]:
    """Return the sigmoid of each logit, from 0 to 1.

    torch rounds an element in a vector register otherwise than one at the end of a tensor, so the result
    there would depend on the number of rows.
    """
    return [CERTAIN if math.isnan(logit) else 0.5 + 0.5 * math.tanh(0.5 * logit) for logit in logits]
