"""What a resumed run needs, in one safetensors file: weights, optimizer moments, progress in the header."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from modeling import TinyLlama
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Progress:
    """Updates done, tokens seen, and time spent in updates."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0

    def after_step(self, tokens: int, elapsed_s: float) -> "Progress":
        return replace(
            self, step=self.step + 1, tokens=self.tokens + tokens, elapsed_s=self.elapsed_s + elapsed_s
        )


def save_state(
    path: Path, model: TinyLlama, optimizers: tuple[torch.optim.Optimizer, ...], progress: Progress
) -> None:
    """`path` holds the state of now; an interrupted write leaves the earlier one in place."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight:{name}"] = parameter.detach()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{key}:{name}"] = value
    header = {
        "step": str(progress.step),
        "tokens": str(progress.tokens),
        "elapsed_s": str(progress.elapsed_s),
    }
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished, metadata=header)
    os.replace(unfinished, path)


def load_state(path: Path, model: TinyLlama, optimizers: tuple[torch.optim.Optimizer, ...]) -> Progress:
    """`model` and `optimizers` are those that were saved."""
    parameters = dict(model.named_parameters())
    owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    for entry, value in load_file(path).items():
        key, _, name = entry.partition(":")
        if key == "weight":
            parameters[name].data.copy_(value)
        else:
            owner[parameters[name]].state[parameters[name]][key] = value
    with safe_open(path, "pt") as file:
        header = file.metadata()
    return Progress(int(header["step"]), int(header["tokens"]), float(header["elapsed_s"]))
