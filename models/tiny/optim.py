"""Muon for the matrices of the layers, AdamW for the embedding and the norms.

Muon (Jordan and others, 2024): momentum whose update a Newton-Schulz iteration brings near to an
orthogonal matrix.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MUON_LR, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.01
ADAM_LR, ADAM_BETAS = 4e-3, (0.9, 0.95)
WARM_UP_UNTIL, WARM_DOWN_FROM = 0.01, 0.4


class Muon(torch.optim.Optimizer):
    """Steps matrices only; those of one shape are orthogonalised together."""

    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for matrices in by_shape.values():
                self._step_together(matrices, group["lr"])

    def _step_together(self, matrices: list[nn.Parameter], lr: float) -> None:
        ahead: list[Tensor] = []
        for matrix in matrices:
            assert matrix.grad is not None
            state = self.state[matrix]
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
            momentum = state["momentum"]
            momentum.lerp_(matrix.grad, 1 - MUON_MOMENTUM)
            ahead.append(matrix.grad.lerp(momentum, MUON_MOMENTUM))
        rows, columns = matrices[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for matrix, update in zip(matrices, orthogonalise(torch.stack(ahead)), strict=True):
            matrix.mul_(1 - lr * MUON_DECAY).add_(update.to(matrix.dtype), alpha=-lr * scale)


def orthogonalise(stack: Tensor) -> Tensor:
    """`stack` [n, rows, columns] with the singular values of each matrix brought near to one, in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = stack.bfloat16()
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def build_optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Muon over the matrices of the layers, AdamW over the rest; `set_lr_share` moves both."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=ADAM_BETAS, weight_decay=0.0, foreach=True)
    optimizers = (Muon(matrices, MUON_LR), adam)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_lr_share(optimizers: tuple[torch.optim.Optimizer, ...], share: float) -> None:
    """Every learning rate is `share` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share


def lr_share(progress: float) -> float:
    """Of the peak: a short rise, a plateau, and from WARM_DOWN_FROM on a line to zero at `progress` 1."""
    if progress < WARM_UP_UNTIL:
        return (progress + 1e-3) / (WARM_UP_UNTIL + 1e-3)
    return min(1.0, max(0.0, 1 - progress) / (1 - WARM_DOWN_FROM))
