"""Runs a batch on the decoder: rows from sequences, logits from rows, tokens from logits."""

from __future__ import annotations

from typing import Protocol

import torch

from services.worker.engine.attention import Attention
from services.worker.engine.executor import Batch, Samples
from services.worker.engine.kv_cache import KvPool
from services.worker.engine.sampler import Sampled, launch
from services.worker.engine.step_rows import Seats, StepRows


class Forward(Protocol):
    """What ``Decoder.forward`` promises."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        prompt_tokens: torch.Tensor,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


class TorchExecutor:
    """Implements ``Runner`` and ``Executor``. What it keeps of sequences is their KV; its seats are a copy.

    ``submit`` queues the step on the device and ``collect`` waits for its tokens. On the CPU the step is over
    when ``submit`` returns.
    """

    def __init__(self, decoder: Forward, attention: Attention, cache: KvPool) -> None:
        self._decoder = decoder
        self._attention = attention
        self._cache = cache
        self._seats = Seats(cache.block_size)
        self._sampled: Sampled | None = None  # of the step under way

    def run(self, batch: Batch) -> Samples:
        """Return one sample per sampling row; the KV of every row is written."""
        self.submit(batch)
        return self.collect()

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        rows = self._seats.rows(batch)
        with torch.inference_mode():
            self._cache.copy(batch.copies)
            logits = self._logits(rows)
            self._sampled = launch(logits, rows.sampling) if len(logits) else None

    def collect(self) -> Samples:
        """See ``Executor``."""
        sampled, self._sampled = self._sampled, None
        return Samples([]) if sampled is None else sampled.samples()

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the float32 logits [sampling rows, vocabulary] of a step."""
        return self._logits(self._seats.rows(batch))

    def _logits(self, rows: StepRows) -> torch.Tensor:
        self._attention.begin(rows.spans, torch.from_numpy(rows.slots))
        return self._decoder.forward(
            torch.from_numpy(rows.tokens),
            torch.from_numpy(rows.positions),
            torch.from_numpy(rows.prompt_tokens),
            torch.from_numpy(rows.logit_rows),
        )
