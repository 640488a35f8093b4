"""Sums over the rows that are sampled. ``Reductions`` is the seam, ``TorchReductions`` runs anywhere.

Each implementation states how far a row's result depends on the other rows.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Reductions(Protocol):
    """Rows are contiguous; the last dimension is reduced."""

    def log_softmax(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, width] for x likewise."""

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return float64 [...] for float32 x [..., width]."""

    def running_sums(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums up to each number, float64 [rows, width] for x likewise."""

    def greatest(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the greatest numbers and their places, each [rows, count], for x [rows, width]."""


class TorchReductions:
    """On a CPU a row is reduced by itself. On CUDA torch chooses by the number of rows how it is."""

    def log_softmax(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        return x.log_softmax(dim=-1)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        return x.sum(dim=-1, dtype=torch.float64)

    def running_sums(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        return x.cumsum(dim=-1)

    def greatest(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Reductions``."""
        found = x.topk(count, dim=-1)
        return found.values, found.indices
