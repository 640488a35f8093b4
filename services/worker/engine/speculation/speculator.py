"""The part of a step that speculates: the policy sets how many tokens to propose, the proposer which ones.

Proposals are verified: where operators are exact, nothing here changes a token of the output. What it decides
is time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence, Sequence
from typing import Final, Protocol

from services.worker.engine.sequence import SequenceState
from services.worker.policy.speculation import SpeculationPolicy, Verified

GRAM: Final = 3  # tokens that have to agree before a place is looked at
WINDOW: Final = 8192  # tokens back that are found
MAX_CANDIDATES: Final = 8
MAX_MATCH: Final = 24  # agreeing tokens beyond which a match is as good as any
NOWHERE: Final = -1
HASH_MULTIPLIER: Final = 0x9E3779B1  # Knuth's, 2**32 over the golden ratio


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


class PromptLookup:
    """Proposals from the sequence's own text: what followed the last time that it read as it does now.

    Prompt lookup (Saxena, Prompt Lookup Decoding, 2023): answers that quote, edit or continue their prompt
    repeat runs of it. The index is the hash chains of deflate (RFC 1951, section 4): a table from the hash of
    ``GRAM`` tokens to where they were last, and from each place to the one before it with the same hash. A
    token costs one entry, a look at most ``MAX_CANDIDATES`` comparisons of ``MAX_MATCH`` tokens, and the
    memory is fixed.

    Implements ``Proposer``. An index takes 64 KiB; there are ``max_sequences``, the oldest goes first.
    """

    def __init__(self, *, max_sequences: int) -> None:
        self._max_sequences = max_sequences
        self._indexes: dict[int, SuffixIndex] = {}  # indexes by handle

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """See ``Proposer``."""
        return [self._index(sequence.handle).after(sequence.tokens, most) for sequence, most in wanted]

    def forget(self, handle: int) -> None:
        """See ``Proposer``."""
        self._indexes.pop(handle, None)

    def resize(self, blocks: int) -> None:
        """See ``Proposer``: it has no pool."""

    def _index(self, handle: int) -> SuffixIndex:
        index = self._indexes.get(handle)
        if index is None:
            if len(self._indexes) >= self._max_sequences:
                del self._indexes[next(iter(self._indexes))]
            index = self._indexes[handle] = SuffixIndex()
        return index


class SuffixIndex:
    """Where each run of ``GRAM`` tokens of one text began, for its last ``WINDOW`` tokens.

    The text is only ever appended to. A query reads new text into the index, each token once.
    """

    def __init__(self) -> None:
        self._heads = array("i", [NOWHERE]) * WINDOW  # the last place of each hash
        self._earlier = array("i", [NOWHERE]) * WINDOW  # the place before each that has the same hash
        self._indexed = 0  # places before this one are in the chains

    def after(self, tokens: MutableSequence[int], most: int) -> list[int]:
        """Return what followed the longest and, of those, latest match of the text's end; [] without one.

        What followed may be shorter than that: then it is taken to repeat.
        """
        length = len(tokens)
        if length <= GRAM or most < 1:
            return []
        self._read(tokens, length - GRAM)
        found = self._longest(tokens)
        if found == NOWHERE:
            return []
        period = length - found
        return [tokens[found + place % period] for place in range(most)]

    def _read(self, tokens: MutableSequence[int], end: int) -> None:
        """Enter the places before ``end``: each has a run of ``GRAM`` tokens and one that follows."""
        heads, earlier = self._heads, self._earlier
        first = max(self._indexed, end - WINDOW)
        if first < end:
            fresh = tokens[first : end + GRAM]
            for place in range(first, end):
                at = place - first
                slot = _slot(fresh[at], fresh[at + 1], fresh[at + 2])
                earlier[place % WINDOW] = heads[slot]
                heads[slot] = place
            self._indexed = end

    def _longest(self, tokens: Sequence[int]) -> int:
        """Return the place after the best match, else NOWHERE."""
        length = len(tokens)
        place = self._heads[_slot(tokens[length - 3], tokens[length - 2], tokens[length - 1])]
        best, best_agreeing = NOWHERE, GRAM - 1
        for _ in range(MAX_CANDIDATES):
            # Nearer than that nothing was overwritten; NOWHERE is farther.
            if place < max(0, length - WINDOW):
                break
            agreeing = _agreeing(tokens, place + GRAM)
            if agreeing > best_agreeing:
                best, best_agreeing = place + GRAM, agreeing
                if agreeing >= MAX_MATCH:
                    break
            place = self._earlier[place % WINDOW]
        return best


def _agreeing(text: Sequence[int], end: int) -> int:
    """Return how many tokens before ``end`` equal those at the end of the text, up to ``MAX_MATCH``."""
    length = len(text)
    for count in range(min(end, MAX_MATCH)):
        if text[end - 1 - count] != text[length - 1 - count]:
            return count
    return min(end, MAX_MATCH)


def _slot(first: int, second: int, third: int) -> int:
    mixed = ((first * HASH_MULTIPLIER + second) * HASH_MULTIPLIER + third) * HASH_MULTIPLIER
    return (mixed >> 16) % WINDOW
