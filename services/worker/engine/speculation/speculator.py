"""The part of a step that speculates: the policy sets how many tokens to propose, the proposer which ones.

Proposals are verified: where operators are exact, nothing here changes a token of the output. What it decides
is time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from services.worker.engine.sequence import SequenceState
from services.worker.policy.speculation import SpeculationPolicy, Verified


class Proposer(Protocol):
    """Proposes tokens. It reads sequences, and keeps by handle what it needs; a wrong guess costs time."""

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """Return for each sequence the tokens that may follow its last one, at most as many as stated."""

    def forget(self, handle: int) -> None:
        """Drop what is kept of a sequence that is gone; there may be nothing."""

    def resize(self, blocks: int) -> None:
        """Have a KV pool of so many blocks, if it has one. Raises MemoryError as ``Runner.resize``."""


class Speculator:
    """Owns the proposer and the policy of one engine."""

    def __init__(self, proposer: Proposer, policy: SpeculationPolicy, *, clock: Callable[[], float]) -> None:
        self._proposer = proposer
        self._policy = policy
        self._clock = clock
        self._proposing_s = 0.0  # time that proposing took in the present step

    def propose(
        self, decodes: Sequence[SequenceState], *, most_rows: int, prefills: bool
    ) -> dict[int, list[int]]:
        """Return proposals by index in ``decodes``, with at most ``most_rows`` tokens in all.

        ``prefills``: whether the step also takes in prompts.
        """
        self._proposing_s = 0.0
        if most_rows < 1 or not self._policy.may_propose:
            return {}
        started_s = self._clock()
        handles = [sequence.handle for sequence in decodes]
        counts = self._policy.counts(handles, most_rows=most_rows, prefills=prefills)
        indexes: list[int] = []
        wanted: list[tuple[SequenceState, int]] = []
        for index, count in counts.items():
            sequence = decodes[index]
            # Its last token is sampled from the last proposal: one less than it may still produce.
            most = min(count, sequence.pause_at - len(sequence.tokens) - 1)
            if most > 0:
                indexes.append(index)
                wanted.append((sequence, most))
        found = self._proposer.propose(wanted) if wanted else []
        self._proposing_s = self._clock() - started_s
        return {index: tokens for index, tokens in zip(indexes, found, strict=True) if tokens}

    def stepped(self, decodes: int, verified: Sequence[Verified], step_s: float, *, prefilled: bool) -> None:
        """Learn from a step, the time of ``propose`` included in ``step_s``."""
        self._policy.measured(
            decodes,
            verified,
            step_s=step_s - self._proposing_s,
            proposing_s=self._proposing_s,
            prefilled=prefilled,
        )

    def resize(self, blocks: int) -> None:
        """The proposer's pool is as large as the target's. Raises MemoryError as ``Runner.resize``."""
        self._proposer.resize(blocks)

    def forget(self, handle: int) -> None:
        """A sequence is gone."""
        self._proposer.forget(handle)
        self._policy.forget(handle)
