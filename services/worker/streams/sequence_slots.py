"""Batch slots of one engine: which live sequences have one, which are parked, and which return next.

A sequence without credit computes nothing: it is *parked*, without a slot and without a reservation of KV.
With new credit it *returns* as soon as a slot and KV are free. Slots are shared by tenant (max-min): if none
is free, the tenant with the most slots yields one to a tenant that has at least two fewer, but never to a
lower class. So no tenant fills a worker that another tenant waits for. The sequence that yields returns like
a parked one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

from services.core.fleet import LONG_PROMPT_TOKENS
from services.core.generation import StartSpec
from services.worker.streams.live_sequence import SlotState, WorkerSequence

_RANK: Final = attrgetter("spec.generation.priority.rank")
PARKED_PER_SLOT: Final = 4  # sequences without a slot, per slot; beyond it the longest parked ones are ended


class Prefills:
    """Sequences without a token: the tokens that remain, and when each prefill began.

    In order of submission, which is the engine's order. Single writer: the sequence table.

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


class SequenceSlots:
    """Single writer: the sequence table. ``WorkerSequence.slot`` names the group that contains a sequence."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0
        # Sequences by tenant, in order of their start.
        self._running: dict[str, dict[int, WorkerSequence]] = {}
        self._parked: dict[int, WorkerSequence] = {}  # the longest parked first
        # Sequences by tenant, in order of their credit.
        self._returning: dict[str, dict[int, WorkerSequence]] = {}
        self._returning_count = 0

    @property
    def parked(self) -> int:
        """How many wait for credit."""
        return len(self._parked)

    @property
    def returning(self) -> int:
        """How many have credit and wait for a slot."""
        return self._returning_count

    @property
    def spare(self) -> int:
        """How many more may be without a slot; below 0: the longest parked must be ended."""
        return self.most * PARKED_PER_SLOT - len(self._parked) - self._returning_count

    @property
    def yields_to_rank(self) -> int:
        """The lowest class that gets a slot from another tenant while none is free; 0: no class."""
        victim = self._newest_of_largest(2) if self.taken >= self.most else None
        return 0 if victim is None else victim.spec.generation.priority.rank

    def admits(self, spec: StartSpec) -> bool:
        """Whether a sequence may start: none of its tenant, or of one with fewer slots, waits to return."""
        tenant = spec.tenant_id
        had = self._count(tenant)
        if not spec.initial_credit_tokens and self.spare <= 0:
            return False  # it would be parked immediately
        if any(other == tenant or self._count(other) < had for other in self._returning):
            return False
        return self.taken < self.most or self.victim(spec) is not None

    def victim(self, spec: StartSpec) -> WorkerSequence | None:
        """Return the sequence that yields its slot to ``spec`` while none is free, or None."""
        found = self._newest_of_largest(self._count(spec.tenant_id) + 2)
        if found is None or found.spec.generation.priority.rank > spec.generation.priority.rank:
            return None
        return found

    def _newest_of_largest(self, least: int) -> WorkerSequence | None:
        """Return the newest sequence with a token, in the lowest class of the tenant with the most slots.

        None if that tenant has fewer than ``least`` slots, or if too many sequences are parked already.
        """
        if not self._running or self.spare <= 0:
            return None
        largest = max(self._running.values(), key=len)
        if len(largest) < least:
            return None
        begun = (each for each in reversed(largest.values()) if each.first_token_s is not None)
        return min(begun, key=_RANK, default=None)

    def next_back(self, fits: Callable[[WorkerSequence], bool]) -> WorkerSequence | None:
        """Return the sequence that returns now, of the tenant with the fewest slots; None if none can."""
        for tenant in sorted(self._returning, key=self._count):
            first = next(iter(self._returning[tenant].values()))
            if (self.taken < self.most or self.victim(first.spec) is not None) and fits(first):
                return first
        return None

    def longest_parked(self) -> WorkerSequence | None:
        """Return the longest parked sequence of the tenant that has most of them."""
        counts: dict[str, int] = {}
        for each in self._parked.values():
            counts[each.spec.tenant_id] = counts.get(each.spec.tenant_id, 0) + 1
        if not counts:
            return None
        most = max(counts, key=counts.__getitem__)
        return next(each for each in self._parked.values() if each.spec.tenant_id == most)

    def put(self, sequence: WorkerSequence, slot: SlotState) -> None:
        """Put a sequence that is in no group into a group."""
        sequence.slot = slot
        tenant, number = sequence.spec.tenant_id, sequence.number
        match slot:
            case SlotState.RUNNING:
                self.taken += 1
                self._running.setdefault(tenant, {})[number] = sequence
            case SlotState.PARKED:
                self._parked[number] = sequence
            case SlotState.RETURNING:
                self._returning_count += 1
                self._returning.setdefault(tenant, {})[number] = sequence

    def take(self, sequence: WorkerSequence) -> None:
        """Remove a sequence from its group."""
        match sequence.slot:
            case SlotState.RUNNING:
                self.taken -= 1
                _drop(self._running, sequence)
            case SlotState.PARKED:
                del self._parked[sequence.number]
            case SlotState.RETURNING:
                self._returning_count -= 1
                _drop(self._returning, sequence)

    def move(self, sequence: WorkerSequence, slot: SlotState) -> None:
        """Move a sequence from its group to another."""
        self.take(sequence)
        self.put(sequence, slot)

    def check_integrity(self, live: Iterable[WorkerSequence]) -> None:
        """Raise AssertionError unless each live sequence is in its group and the bounds hold."""
        running = {number for group in self._running.values() for number in group}
        returning = {number for group in self._returning.values() for number in group}
        found = {SlotState.RUNNING: running, SlotState.RETURNING: returning}
        found[SlotState.PARKED] = set(self._parked)
        named: dict[SlotState, set[int]] = {slot: set() for slot in SlotState}
        for sequence in live:
            named[sequence.slot].add(sequence.number)
        assert found == named, "a sequence is not where its slot says"
        assert self.taken == len(running) <= self.most, "more run than there are slots"
        assert self._returning_count == len(returning), "those that return are miscounted"
        groups = (*self._running.values(), *self._returning.values())
        assert all(groups), "a tenant with nothing is kept"

    def _count(self, tenant: str) -> int:
        return len(self._running.get(tenant, ()))


def _drop(groups: dict[str, dict[int, WorkerSequence]], sequence: WorkerSequence) -> None:
    group = groups[sequence.spec.tenant_id]
    del group[sequence.number]
    if not group:
        del groups[sequence.spec.tenant_id]
