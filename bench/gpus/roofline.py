"""What a device could do at best, from rates that are measured on it in the same run.

A decode step reads every weight that is a factor of a product, and the KV of all its sequences; a prefill
multiplies. An embedding that is no head is read by the row, and is left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from fairway.formats.decoder_config import ModelConfig

COPY_BYTES: Final = 4 << 30
MATMUL_SIDE: Final = 8192
REPEATS: Final = 10


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second that a copy reads and writes, and operations per second of a matrix product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's steps must move and multiply at least. ``number_bytes``: of a parameter and of KV."""

    model: ModelConfig
    number_bytes: int

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        model = self.model
        heads = 2 * model.heads + 2 * model.kv_heads
        return model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)

    @property
    def head_parameters(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a decode step reads."""
        return (self.model.layers * self.layer_parameters + self.head_parameters) * self.number_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV of one token."""
        return 2 * self.model.layers * self.model.kv_heads * self.model.head_dim * self.number_bytes

    def decode_s(self, rates: Rates, *, sequences: int, attended_tokens: int) -> float:
        """Return the least time of a step that decodes so many sequences with so much KV in all."""
        moved = self.weight_bytes + attended_tokens * self.kv_token_bytes
        products = 2.0 * sequences * self.weight_bytes / self.number_bytes
        return max(moved / rates.copy_bytes_per_s, products / rates.matmul_flops_per_s)

    def prefill_s(self, rates: Rates, *, prompts: int, prompt_tokens: int) -> float:
        """Return the least time to prefill so many prompts of a length, each from its first token.

        The head is computed for the last token of each. Attention is causal: on average a token sees half.
        """
        model, tokens = self.model, prompts * prompt_tokens
        linear = 2.0 * (tokens * model.layers * self.layer_parameters + prompts * self.head_parameters)
        pairs = prompts * prompt_tokens * (prompt_tokens + 1) / 2
        attention = 4.0 * model.layers * model.heads * model.head_dim * pairs
        return (linear + attention) / rates.matmul_flops_per_s


def measured_rates(
    device: torch.device,
    dtype: torch.dtype,
    *,
    copy_bytes: int = COPY_BYTES,
    matmul_side: int = MATMUL_SIDE,
) -> Rates:
    """Return the rates of this device now, medians of several runs on random data."""
    return Rates(_copy_rate(device, dtype, copy_bytes), _matmul_rate(device, dtype, matmul_side))


def _copy_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    source = torch.randn(size // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(device, lambda: target.copy_(source))


def _matmul_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * side**3 / median_s(device, lambda: torch.matmul(a, b, out=out))


def median_s(device: torch.device, run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median time of ``run`` with the device waited for, after two that do not count."""
    times = []
    for number in range(repeats + 2):
        wait(device)
        began_s = time.perf_counter()
        run()
        wait(device)
        if number >= 2:
            times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """All work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
