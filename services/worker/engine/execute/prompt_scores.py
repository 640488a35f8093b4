"""Log-probabilities of a prompt's tokens, from the rows before them, as the prefill computes these.

The logits of a whole prompt would be [prompt, vocabulary]: they are made and reduced a slice at a time, and
what remains of a row is its token's number and those of the likeliest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import torch

from services.worker.engine.execute.executor import Batch
from services.worker.engine.execute.spans import Spans
from services.worker.engine.sample.reductions import Reductions
from services.worker.engine.validation import MAX_LOGPROBS
from services.worker.engine_protocol import SampledLogprobs

SLICE_ROWS: Final = 64  # rows whose logits are in memory at once


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk by its index in ``prefills``: how many of its rows are scored, and the alternatives of each."""

    index: int
    rows: int
    wanted: int


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """``rows`` [scored] of a step predict ``targets`` [scored] of prompts, both int64, chunk by chunk."""

    rows: torch.Tensor
    targets: torch.Tensor
    chunks: list[ScoredChunk]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of the rows that were scored: per slice the tokens' own log-probabilities [rows], their ranks [rows],
    and the greatest with their tokens [rows, width]; perhaps still being computed on the device."""

    chunks: list[ScoredChunk]
    slices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]

    def entries(self) -> dict[int, list[SampledLogprobs]]:
        """Wait for them; return them by index in ``prefills``."""
        rows = self._rows()
        return {
            chunk.index: [
                SampledLogprobs(own, ids[: chunk.wanted], values[: chunk.wanted], rank)
                for own, rank, values, ids in islice(rows, chunk.rows)
            ]
            for chunk in self.chunks
        }

    def _rows(self) -> Iterator[tuple[float, int, list[float], list[int]]]:
        for columns in self.slices:
            yield from zip(*(column.tolist() for column in columns), strict=True)


def scored_rows(batch: Batch, spans: Spans) -> ScoredRows | None:
    """Return the rows of the step that predict tokens of prompts; None without any."""
    rows: list[torch.Tensor] = []
    targets: list[int] = []
    chunks: list[ScoredChunk] = []
    for index, chunk in enumerate(batch.prefills):
        places = chunk.scored
        if places:
            first = int(spans.first_rows[len(batch.decodes) + index]) + places.start - 1 - chunk.start
            rows.append(torch.arange(first, first + len(places)))
            targets += chunk.sequence.tokens[places.start : places.stop]
            wanted = chunk.sequence.sampling.prompt_logprobs or 0
            chunks.append(ScoredChunk(index, len(places), wanted))
    return ScoredRows(torch.cat(rows), torch.tensor(targets), chunks) if chunks else None


def launch_scores(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    scored: ScoredRows,
    reductions: Reductions,
) -> PromptScores:
    """Begin to score rows by their hidden states [scored, hidden size], SLICE_ROWS at a time.

    The numbers are the model's: bias, penalties and constraints concern the output.
    """
    width = max(chunk.wanted for chunk in scored.chunks)
    targets = scored.targets.to(hidden.device, non_blocking=True)
    slices = []
    for first in range(0, len(targets), SLICE_ROWS):
        states, tokens = hidden[first : first + SLICE_ROWS], targets[first : first + SLICE_ROWS]
        logprobs = reductions.log_softmax(logits_of(states))
        own = logprobs.gather(1, tokens[:, None])
        ranks = (logprobs > own).sum(dim=-1) + 1
        # The count is constant, because the order of equal numbers depends on how many are selected.
        values, ids = reductions.greatest(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))
        slices.append((own[:, 0], ranks, values[:, :width], ids[:, :width]))
    return PromptScores(scored.chunks, slices)
