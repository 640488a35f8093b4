"""Prefill state of one engine's sequences without a token: remaining tokens, and when each prefill began."""

from __future__ import annotations

from collections.abc import Iterable

from services.core.fleet import LONG_PROMPT_TOKENS
from services.worker.streams.live_sequence import WorkerSequence


class Prefills:
    """In order of submission, which is the engine's order. Single writer: the sequence table.

    ``queued_tokens`` and ``long`` count sequences without a token, less their cached prefixes.
    """

    def __init__(self) -> None:
        self.queued_tokens = 0
        self.long = 0
        self._waiting: dict[int, WorkerSequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: WorkerSequence) -> None:
        """Count a sequence that was just submitted."""
        self._waiting[sequence.number] = sequence
        self.queued_tokens += sequence.prefill_left
        self.long += _is_long(sequence)

    def remove(self, sequence: WorkerSequence) -> None:
        """Remove a sequence that got its first token or never will. No effect if it was removed before."""
        if self._waiting.pop(sequence.number, None) is not None:
            self.queued_tokens -= sequence.spec.prefill_tokens - sequence.cached_tokens
            self.long -= _is_long(sequence)

    def note_cached(self, sequence: WorkerSequence, tokens: int) -> None:
        """Subtract the tokens found in the cache. Only the first report on a sequence counts."""
        if sequence.number not in self._waiting or sequence.cache_reported:
            return
        sequence.cache_reported = True
        self.long -= _is_long(sequence)
        sequence.cached_tokens = cached = min(tokens, sequence.spec.prefill_tokens)
        self.long += _is_long(sequence)
        sequence.prefill_left = max(0, sequence.prefill_left - cached)
        self.queued_tokens -= cached

    def note_step(self, tokens: int, *, began_s: float) -> None:
        """Attribute a step's prefill tokens in order of submission, to find when each prefill began."""
        left = tokens
        for sequence in self._waiting.values():
            if left <= 0:
                return
            if sequence.prefill_left > 0:
                if sequence.prefill_started_s is None:
                    sequence.prefill_started_s = max(began_s, sequence.accepted_s)
                taken = min(left, sequence.prefill_left)
                sequence.prefill_left -= taken
                left -= taken

    def check_integrity(self, live: Iterable[WorkerSequence]) -> None:
        """Raise AssertionError unless these are the live sequences without a token, and the counts match."""
        waiting = self._waiting.values()
        assert self.queued_tokens == sum(s.spec.prefill_tokens - s.cached_tokens for s in waiting)
        assert self.long == sum(_is_long(s) for s in waiting), "long prefills leaked"
        without = {s.number for s in live if s.first_token_s is None}
        assert without == self._waiting.keys(), "it waits for the token it has, or does not wait"


def _is_long(sequence: WorkerSequence) -> bool:
    return sequence.spec.prefill_tokens - sequence.cached_tokens >= LONG_PROMPT_TOKENS
