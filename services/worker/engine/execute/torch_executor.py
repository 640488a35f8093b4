"""Runs a batch on the decoder: rows from sequences, logits from rows, tokens from logits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Final, Protocol

import torch

from services.worker.engine.execute.adapters import AdapterSet
from services.worker.engine.execute.attention import Attention
from services.worker.engine.execute.executor import Batch, Samples
from services.worker.engine.execute.kv_cache import KvPool
from services.worker.engine.execute.model import Hidden
from services.worker.engine.execute.probe import SafetyProbe, scores_of
from services.worker.engine.execute.step_rows import Seats, Spans, StepRows
from services.worker.engine.sample.sampler import TORCH, Reductions, RuleOut, Sampled, launch, torch_rule_out
from services.worker.engine.sequence import MAX_LOGPROBS
from services.worker.engine.unsupported import BadEngineConfig
from services.worker.engine_protocol import SampledLogprobs

SLICE_ROWS: Final = 64  # rows whose logits are in memory at once
_IS_PROBED: Final = attrgetter("probe")


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


class Forward(Protocol):
    """What ``Decoder`` promises."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        prompt_tokens: torch.Tensor,
        logit_rows: torch.Tensor,
        hidden: Hidden | None = None,
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Running:
    """A step that was not collected. ``sampled`` is None if no row is sampled. ``hidden`` has the states of
    the rows ``embedded`` as float32 on the device. ``probed`` are the probe's logits [rows], which are on the
    host once the samples are; None: they are not requested."""

    sampled: Sampled | None
    embedded: list[int]
    hidden: torch.Tensor | None
    scores: PromptScores | None
    probed: torch.Tensor | None


def _rows_of(hidden: Hidden | None, rows: list[int]) -> torch.Tensor | None:
    if not rows or hidden is None or hidden.values is None:
        return None
    return hidden.values.index_select(0, torch.tensor(rows, device=hidden.values.device)).float()


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """How the weights that decoders are made of are replaced. Decoders alone refer to them."""

    check: Callable[[Path], None]  # ``WeightStore.check_weights`` of these weights
    # Frees them and loads those of a folder, with what receives the part that is done. It may leave none.
    load: Callable[[Path, Callable[[float], None]], None]


class TorchExecutor:
    """Implements ``Runner``, ``Executor`` and ``WeightStore``. What it keeps of sequences is their KV; its
    seats are a copy.

    ``submit`` queues the step on the device and ``collect`` waits for its tokens. On the CPU the step is over
    when ``submit`` returns. A token that is unknown on the host is taken from the batch before on the device.
    """

    def __init__(
        self,
        decoder: Forward,
        attention: Attention,
        cache: KvPool,
        reductions: Reductions = TORCH,
        *,
        rule_out: RuleOut = torch_rule_out,
        rebuild: Callable[[bool], tuple[Forward, Attention]] | None = None,
        runs_ahead: bool = False,
        adapters: AdapterSet | None = None,
        probe: SafetyProbe | None = None,
        weights: HeldWeights | None = None,
    ) -> None:
        """``rebuild`` makes decoder and attention again where their buffers depend on the pool's size; with
        true it also makes what is otherwise made at its first use. ``adapters`` are those of the decoder,
        ``probe`` is that of the version, ``weights`` those that ``rebuild`` reads; None: they stay."""
        self.adapters = adapters
        self._weights = weights
        self.probe = probe
        self.runs_ahead = runs_ahead
        self._rebuild = rebuild
        self._decoder = decoder
        self._attention = attention
        self._cache = cache
        self._reductions = reductions
        self._rule_out = rule_out
        self._seats = Seats(cache.block_size)
        self._under_way: deque[_Running] = deque()
        self._tokens = torch.empty(0, dtype=torch.int64)  # tokens of the newest batch's rows, on the device

    def run(self, batch: Batch) -> Samples:
        """Return one sample per sampling row; the KV of every row is written."""
        self.submit(batch)
        return self.collect()

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        rows = self._seats.rows(batch)
        with torch.inference_mode():
            self._cache.copy(batch.copies)
            embedded, scored = batch.embedded, scored_rows(batch, rows.spans)
            probe = self.probe if any(map(_IS_PROBED, rows.sampling.sequences)) else None
            keeps = bool(embedded or scored or probe)
            hidden = Hidden(None if scored is None else scored.rows) if keeps else None
            logits = self._logits(rows, hidden)
            sampled = probed = None
            if probe is not None and hidden is not None and hidden.values is not None:
                # Before the samples, so that these wait for its copy as well.
                probed = probe.launch(hidden.values).to("cpu", non_blocking=True)
            if len(logits):
                sampled = launch(logits, rows.sampling, self._reductions, batch.masks, self._rule_out)
                self._tokens = sampled.tokens
                sampled = sampled.to_host()
            # The memory is freed first, because the scores below make as many logits of other rows.
            del logits
            scores = None
            if scored is not None and hidden is not None and hidden.of_others is not None:
                scores = launch_scores(self._decoder.logits, hidden.of_others, scored, self._reductions)
            states = _rows_of(hidden, embedded)
            self._under_way.append(_Running(sampled, embedded, states, scores, probed))

    def collect(self) -> Samples:
        """See ``Executor``."""
        running = self._under_way.popleft()
        samples = running.sampled.samples() if running.sampled is not None else Samples([])
        if running.probed is not None:
            samples.probe_scores.extend(scores_of(running.probed.tolist()))
        if running.scores is not None:
            samples.scores.update(running.scores.entries())
        if running.hidden is not None:
            vectors = running.hidden.cpu().numpy()
            samples.embeddings.update(
                (row, vector.tobytes()) for row, vector in zip(running.embedded, vectors, strict=True)
            )
        return samples

    @property
    def contexts_at_once(self) -> int:
        """See ``Attention``."""
        return self._attention.contexts_at_once

    def moving_bytes(self, blocks: int) -> int:
        """Return the bytes that a change to or from so many blocks takes while it runs, besides the larger
        pool."""
        return self._cache.moving_bytes(blocks)

    def resize(self, blocks: int, *, warm: bool = False) -> None:
        """See ``Runner``. Unless ``warm``, graphs are captured again when they are used."""
        assert not self._under_way, "a batch is being computed"
        with torch.inference_mode():
            if self._rebuild is None:
                self._cache.resize(blocks)
                return
            # The graphs go as well, because they point into the pool.
            del self._decoder, self._attention
            try:
                self._cache.resize(blocks)
            finally:
                self._decoder, self._attention = self._rebuild(warm)

    def check_weights(self, folder: Path) -> None:
        """See ``WeightStore``."""
        if self._weights is None or self._rebuild is None:
            raise BadEngineConfig("this executor keeps its weights")
        self._weights.check(folder)

    def replace_weights(self, folder: Path, report: Callable[[float], None]) -> None:
        """See ``WeightStore``. Graphs are captured again, because they point into the weights."""
        assert not self._under_way, "a batch is being computed"
        assert self._weights is not None, "``check_weights`` comes before"
        assert self._rebuild is not None, "``check_weights`` comes before"
        del self._decoder, self._attention
        self._weights.load(folder, report)
        with torch.inference_mode():
            self._decoder, self._attention = self._rebuild(True)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the float32 logits [sampling rows, vocabulary] of a step."""
        return self._logits(self._seats.rows(batch))

    def _logits(self, rows: StepRows, hidden: Hidden | None = None) -> torch.Tensor:
        self._attention.begin(rows.spans, torch.from_numpy(rows.slots))
        if self.adapters is not None:
            self.adapters.begin([sequence.adapter for sequence in rows.spans.sequences], rows.spans.rows)
        return self._decoder.forward(
            self._known(rows),
            torch.from_numpy(rows.positions),
            torch.from_numpy(rows.prompt_tokens),
            torch.from_numpy(rows.logit_rows),
            hidden,
        )

    def _known(self, rows: StepRows) -> torch.Tensor:
        """Return the tokens [rows], those that are unknown on the host from the batch before.

        A sample that failed there gives token 0, whose result is discarded.
        """
        tokens = torch.from_numpy(rows.tokens)
        if not (rows.tokens < 0).any():
            return tokens
        tokens = tokens.to(self._tokens.device, non_blocking=True)
        places = (-1 - tokens).clamp_(min=0)
        return torch.where(tokens < 0, self._tokens.index_select(0, places).clamp_(min=0), tokens)
