"""The port between the engine, which schedules sequences, and the executor, which computes tokens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from services.ports.grammars import Bits
from services.worker.engine.sequence import SequenceState
from services.worker.engine_protocol import SampledLogprobs

NOT_FINITE: Final = "the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class RuledRows:
    """``allowed`` [rows, bytes] has a bit per token, the lowest first: a token of ``rows[i]`` whose bit is 0
    may not come next.

    ``problems`` states by sampling row why an output cannot continue. ``late`` are sampling rows whose masks
    were not computed; they are to be computed again. All bits of both are 1.
    """

    rows: list[int]
    allowed: Bits
    problems: dict[int, str] = field(default_factory=dict)
    late: frozenset[int] = frozenset()


# The masks of a step that is computed meanwhile.
StepMasks: TypeAlias = Future[RuledRows]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute KV for ``tokens[start:end]``; sample only if ``end`` is the last token."""

    sequence: SequenceState
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)

    @property
    def scored(self) -> range:
        """Places of tokens of the prompt whose log-probabilities are requested: the rows before them are
        the chunk's. Not the prompt's first token, which no row predicts."""
        sequence = self.sequence
        if sequence.sampling.prompt_logprobs is None:
            return range(0)
        return range(max(self.start + 1, sequence.scored), min(self.end + 1, sequence.prompt_tokens))


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Each of ``decodes`` computes its last token and samples; ``prefills`` are chunks.

    ``proposals``, by index in ``decodes``, are tokens that may come next. Such a decode computes them as well
    and samples after each, as if those before were output: one row more than it has proposals.
    ``copies`` are pairs of KV blocks: what the first holds is copied to the second, in this order, before
    anything of the step is written. The second ones are among the blocks of its sequences.
    ``masks`` of constrained rows are computed meanwhile; they are waited for before anything is sampled.
    Rows that sample, in order: those of every decode, then every prefill chunk whose ``samples`` is true.
    False without anything to compute.
    """

    decodes: list[SequenceState]
    prefills: list[PrefillChunk]
    proposals: dict[int, list[int]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    masks: StepMasks | None = None

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def decoded_rows(self) -> list[SequenceState]:
        """Return the sequence of each row that a decode samples, in row order."""
        if not self.proposals:
            return self.decodes
        counts = dict.fromkeys(range(len(self.decodes)), 1)
        counts |= {index: len(tokens) + 1 for index, tokens in self.proposals.items()}
        return [self.decodes[index] for index, count in counts.items() for _ in range(count)]

    @property
    def sampled(self) -> list[SequenceState]:
        """Return the sequence of each sampling row, in row order."""
        if not self.prefills:
            return self.decoded_rows
        return [*self.decoded_rows, *(chunk.sequence for chunk in self.prefills if chunk.samples)]

    @property
    def embedded(self) -> list[int]:
        """Return the sampling rows of sequences that embed: the last rows of their prefills."""
        if not any(chunk.sequence.embeds for chunk in self.prefills):
            return []
        return [row for row, sequence in enumerate(self.sampled) if sequence.embeds]

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.prefills)


@dataclass(frozen=True, slots=True)
class Samples:
    """What a batch computed, by sampling row."""

    # One per row; void where the row has an error, no mask, or is late.
    tokens: list[int]
    logprobs: dict[int, SampledLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    # Hidden states after the final norm, as float32, by row of a sequence that embeds.
    embeddings: dict[int, bytes] = field(default_factory=dict)
    # Why a row has no mask.
    unmasked: dict[int, str] = field(default_factory=dict)
    # Rows that mean nothing and are to be computed again.
    late: frozenset[int] = frozenset()
    # By index in ``prefills``: an entry for each place in ``Chunk.scored``; NaN where there is no number.
    scores: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    # What the version's probe gives each row; empty where no sequence of the batch requests it.
    probe_scores: list[float] = field(default_factory=list)


class Runner(Protocol):
    """Runs batches. It reads sequences and writes the KV of their blocks; it changes nothing else."""

    def run(self, batch: Batch) -> Samples:
        """Return one sample per sampling row. An exception ends the engine process."""

    def resize(self, blocks: int) -> None:
        """Have KV for so many blocks, between two batches; what the first ones hold is kept.

        Memory of the others is given back to the system. Raises MemoryError where there is not so much: the
        pool is as it was.
        """


class Executor(Protocol):
    """Runs batches in the order in which they come, perhaps while its caller does something else.

    From ``submit`` until ``collect`` returns, the caller must not change the sequences of the batch.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether a second batch may be submitted before the first is collected, and gains by it.

        Its sequences then may have an ``unknown_token``: the one that a row of the batch before it samples.
        """

    def submit(self, batch: Batch) -> None:
        """Start a batch, at most two that were not collected."""

    def collect(self) -> Samples:
        """Wait for the batch that was submitted first: as ``Runner.run``, with the exceptions of that."""

    def resize(self, blocks: int) -> None:
        """Do what ``Runner.resize`` does; every batch was collected."""


class Adapters(Protocol):
    """The LoRA adapters that an executor computes sequences with, by ``SequenceState.adapter``."""

    def load(self, adapter: int, folder: Path) -> int:
        """Compute sequences with this adapter from now on; return the bytes that it takes.

        Raises one of ``unsupported.REFUSALS``, or MemoryError.
        """

    def drop(self, adapter: int) -> None:
        """Free an adapter. No later batch has a sequence with it. Idempotent."""


class WeightStore(Protocol):
    """An executor whose weights can be replaced, between two batches."""

    def check_weights(self, folder: Path) -> None:
        """Return if the folder has weights of the same model. Raises one of ``unsupported.REFUSALS``."""

    def replace_weights(self, folder: Path, report: Callable[[float], None]) -> None:
        """Compute with the folder's weights from now on; ``report`` receives the part that is done, 0..1.

        The old ones are freed first, so that memory never has two copies. After an exception there are no
        whole weights: the process has to end.
        """


def unknown_token(row: int) -> int:
    """Return what stands for the token that the row samples, in the batch before the present one."""
    return -1 - row


def blank_scores(batch: Batch) -> dict[int, list[SampledLogprobs]]:
    """Return ``Samples.scores`` where there is no model: every token is certain."""
    scored = ((index, chunk.scored) for index, chunk in enumerate(batch.prefills))
    return {index: [SampledLogprobs(0.0, [], [], 1)] * len(places) for index, places in scored if places}


class Inline:
    """Runs the batch in ``collect``: nothing happens at the same time."""

    runs_ahead = False

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._batch: Batch | None = None

    def submit(self, batch: Batch) -> None:
        """See ``Executor``."""
        self._batch = batch

    def collect(self) -> Samples:
        """See ``Executor``."""
        batch, self._batch = self._batch, None
        assert batch is not None, "nothing was submitted"
        return self._runner.run(batch)

    def resize(self, blocks: int) -> None:
        """See ``Executor``."""
        self._runner.resize(blocks)
