"""The port between the engine, which knows sequences, and what computes tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from services.worker.engine.sequence import SequenceState
from services.worker.engine_protocol import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute KV for ``tokens[start:end]``; sample only if ``end`` is the last token."""

    sequence: SequenceState
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Each of ``decodes`` computes its last token and samples; ``prefills`` are chunks.

    Rows that sample, in order: every decode, then every prefill chunk whose ``samples`` is true.
    """

    decodes: list[SequenceState]
    prefills: list[Chunk]

    @property
    def sampled(self) -> list[SequenceState]:
        """Return the sequence of each sampling row, in row order."""
        if not self.prefills:
            return self.decodes
        return [*self.decodes, *(chunk.sequence for chunk in self.prefills if chunk.samples)]

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.prefills)


@dataclass(frozen=True, slots=True)
class Samples:
    """One token per sampling row. ``logprobs`` and ``errors`` are by row; the token of an error is void."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Executor(Protocol):
    """Runs batches. It reads sequences and writes the KV of their blocks; it changes nothing else."""

    def run(self, batch: Batch) -> Samples:
        """Return one sample per sampling row. An exception ends the engine process."""
