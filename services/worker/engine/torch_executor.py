"""Runs a batch on the decoder: rows from sequences, logits from rows, tokens from logits."""

from __future__ import annotations

import torch

from services.worker.engine.attention import Attention, Span
from services.worker.engine.executor import Batch, Samples
from services.worker.engine.model import Decoder
from services.worker.engine.sampler import sample
from services.worker.engine.sequence import SequenceState


class TorchExecutor:
    """Holds no state of any sequence besides the KV in the attention's pool."""

    def __init__(self, decoder: Decoder, attention: Attention, *, block_size: int) -> None:
        self._decoder = decoder
        self._attention = attention
        self._block_size = block_size

    def run(self, batch: Batch) -> Samples:
        """Return one sample per sampling row; the KV of every row is written."""
        with torch.inference_mode():
            logits = self.logits(batch)
            return sample(logits, batch.sampled) if len(logits) else Samples([])

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the float32 logits [sampling rows, vocabulary] of a step."""
        rows = _Rows(self._block_size)
        for sequence in batch.decodes:
            rows.add(sequence, len(sequence.tokens) - 1, len(sequence.tokens), samples=True)
        for chunk in batch.prefills:
            rows.add(chunk.sequence, chunk.start, chunk.end, samples=chunk.samples)
        self._attention.begin(rows.spans, torch.tensor(rows.slots))
        return self._decoder.forward(
            torch.tensor(rows.tokens),
            torch.tensor(rows.positions),
            torch.tensor(rows.prompt_tokens),
            torch.tensor(rows.logit_rows, dtype=torch.int64),
        )


class _Rows:
    """The rows of one step, as columns."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.prompt_tokens: list[int] = []
        self.slots: list[int] = []
        self.logit_rows: list[int] = []
        self.spans: list[Span] = []

    def add(self, sequence: SequenceState, start: int, end: int, *, samples: bool) -> None:
        """Append the sequence's tokens ``start`` to ``end``; the last gets logits if it ``samples``."""
        first_row, size, blocks = len(self.tokens), self._block_size, sequence.blocks
        self.spans.append(Span(first_row, end - start, end, blocks, sequence.contiguous))
        self.tokens += sequence.tokens[start:end]
        self.positions += range(start, end)
        self.prompt_tokens += [sequence.prompt_tokens] * (end - start)
        self.slots += [blocks[position // size] * size + position % size for position in range(start, end)]
        if samples:
            self.logit_rows.append(len(self.tokens) - 1)
