"""Continuous batching: which sequences run in the next step, and who gives way when KV is short.

Iteration-level scheduling (Orca, OSDI'22), decode first and prefill in chunks within a token budget
(Sarathi-Serve, OSDI'24), preemption with recompute (PagedAttention, SOSP'23). One writer: the engine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from services.worker.engine.block_manager import BlockManager
from services.worker.engine.executor import Batch, Chunk
from services.worker.engine.sequence import SequenceState, Status

MAX_PREEMPTIONS = 2  # at the second one the sequence goes back to the scheduler


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """``token_budget``: tokens computed in one step; ``max_sequences``: sequences that hold KV."""

    token_budget: int
    max_sequences: int

    def __post_init__(self) -> None:
        if self.max_sequences < 1 or self.token_budget < self.max_sequences:
            # Otherwise a step could not give every running sequence its decode.
            raise ValueError(f"token_budget {self.token_budget} is below max_sequences {self.max_sequences}")


class WaitQueue:
    """Sequences in (priority, arrival) order. Head and push of the newest are cheap at any length."""

    def __init__(self) -> None:
        self._items: list[SequenceState] = []  # last is first, so that taking the head moves nothing

    def __len__(self) -> int:
        return len(self._items)

    @property
    def head(self) -> SequenceState | None:
        return self._items[-1] if self._items else None

    def push(self, sequence: SequenceState) -> None:
        insort(self._items, sequence, key=_last_first)

    def pop(self) -> SequenceState:
        return self._items.pop()

    def remove(self, sequence: SequenceState) -> None:
        index = bisect_left(self._items, _last_first(sequence), key=_last_first)
        assert self._items[index] is sequence, f"sequence {sequence.handle} is not queued"
        del self._items[index]


def _last_first(sequence: SequenceState) -> tuple[int, int]:
    priority, arrival = sequence.order
    return -priority, -arrival


class Planner:
    """Owns every live sequence and its blocks. ``plan`` decides and reserves; nothing here computes."""

    def __init__(self, blocks: BlockManager, limits: PlannerLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._waiting = WaitQueue()
        self._preempted = WaitQueue()
        self._decoding: list[SequenceState] = []
        self._prefilling: list[SequenceState] = []
        self._stalled: list[SequenceState] = []
        self.preemptions = 0
        self._parked: dict[int, SequenceState] = {}  # by handle; as many as the agent submits without credit

    @property
    def running(self) -> int:
        """How many sequences hold KV."""
        return len(self._decoding) + len(self._prefilling) + len(self._stalled)

    @property
    def waiting(self) -> int:
        """How many sequences hold none."""
        return len(self._waiting) + len(self._preempted) + len(self._parked)

    @property
    def has_work(self) -> bool:
        """Whether ``plan`` would return a batch."""
        return bool(self._decoding or self._prefilling) or self._admissible() is not None

    def add(self, sequence: SequenceState) -> None:
        """Queue a new sequence; the planner owns it from now on."""
        self._enqueue(sequence)

    def credit(self, sequence: SequenceState, limit: int) -> None:
        """Raise the output limit; the sequence is planned again if it waited for that."""
        sequence.set_credit(limit)
        if not sequence.has_credit:
            return
        if sequence.status is Status.STALLED:
            self._stalled.remove(sequence)
            self._decode(sequence)
        elif sequence.status is Status.PARKED:
            del self._parked[sequence.handle]
            self._enqueue(sequence)

    def plan(self) -> tuple[Batch, list[SequenceState]]:
        """Return the next batch, with its blocks reserved, and the sequences that are handed back.

        The batch computes at most ``token_budget`` tokens. Of sequences with credit the older take blocks
        from the younger, never the reverse, so the oldest always moves and everything finishes; those
        without credit give way to all of them, so that a slow reader holds nobody up.
        """
        handed_back = self._grow()
        decodes = list(self._decoding)
        budget = self._limits.token_budget - len(decodes)
        prefills: list[Chunk] = []
        for sequence in self._prefilling:
            budget -= _take_chunk(sequence, budget, prefills)
        while budget > 0 and (admitted := self._admissible()) is not None:
            self._admit(admitted)
            budget -= _take_chunk(admitted, budget, prefills)
        return Batch(decodes, prefills), handed_back

    def computed(self, prefills: list[Chunk]) -> None:
        """Record that the chunks have run; those that reached their last token decode from now on."""
        for chunk in prefills:
            sequence = chunk.sequence
            sequence.computed = chunk.end
            if chunk.samples:
                self._prefilling.remove(sequence)
                self._decode(sequence)

    def stall(self, sequence: SequenceState) -> None:
        """Take a decoding sequence out of the plan, with its blocks, until it has credit."""
        self._decoding.remove(sequence)
        sequence.status = Status.STALLED
        self._stalled.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forget the sequence, whatever it was doing; its blocks are free."""
        self._detach(sequence)
        self._release(sequence)
        sequence.status = Status.FINISHED

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks leaked, a status lies or a bound is exceeded."""
        holders = [*self._decoding, *self._prefilling, *self._stalled]
        self._blocks.check_integrity(sequence.blocks for sequence in holders)
        assert len(holders) <= self._limits.max_sequences, "more sequences hold KV than allowed"
        for status, group in (
            (Status.DECODING, self._decoding),
            (Status.PREFILLING, self._prefilling),
            (Status.STALLED, self._stalled),
            (Status.PARKED, list(self._parked.values())),
        ):
            assert all(sequence.status is status for sequence in group), f"a status is not {status}"
        for sequence in holders:
            assert sequence.computed <= sequence.capacity == len(sequence.blocks) * self._blocks.block_size
        assert all(not sequence.blocks for sequence in self._parked.values()), "a parked sequence holds KV"

    # --- blocks --------------------------------------------------------------------------------------

    def _grow(self) -> list[SequenceState]:
        """Give a block to every decode that needs one, oldest first; return those handed back."""
        handed_back: list[SequenceState] = []
        needy = [sequence for sequence in self._decoding if sequence.computed == sequence.capacity]
        needy.sort(key=lambda sequence: sequence.order)
        for sequence in needy:
            # An older one of this loop may have taken this one's blocks.
            while sequence.status is Status.DECODING and self._blocks.blocks_free == 0:
                victim = self._victim()
                if self._preempt(victim):
                    handed_back.append(victim)
            if sequence.status is Status.DECODING:
                self._reserve(sequence, 1)
        return handed_back

    def _victim(self) -> SequenceState:
        """Return who gives way: one that waits for its reader if there is any, else the youngest of all."""
        group = self._stalled or (*self._decoding, *self._prefilling)
        return max(group, key=lambda other: other.order)

    def _reserve(self, sequence: SequenceState, count: int) -> None:
        held = sequence.blocks
        last = held[-1] if held else None
        expected = (
            0 if held else self._blocks.blocks_for(sequence.prompt_tokens + sequence.sampling.max_tokens)
        )
        added = self._blocks.allocate(count, after=last, expected=expected)
        runs = added[-1] - added[0] == count - 1 and (last is None or added[0] == last + 1)
        sequence.contiguous = runs and (last is None or sequence.contiguous)
        held += added
        sequence.capacity = len(held) * self._blocks.block_size

    def _release(self, sequence: SequenceState) -> None:
        self._blocks.release(sequence.blocks)
        sequence.blocks.clear()
        sequence.capacity = 0
        sequence.computed = 0

    def _preempt(self, victim: SequenceState) -> bool:
        """Take the victim's KV; it is computed again later. Return whether it is handed back instead."""
        self._detach(victim)
        self._release(victim)
        victim.preemptions += 1
        self.preemptions += 1
        if victim.preemptions >= MAX_PREEMPTIONS:
            victim.status = Status.FINISHED
            return True
        self._enqueue(victim)
        return False

    # --- places --------------------------------------------------------------------------------------

    def _admissible(self) -> SequenceState | None:
        """Return the head of the line if it may start now: preempted ones first, nobody overtakes."""
        queue = self._preempted if self._preempted else self._waiting
        head = queue.head
        if head is None or self.running >= self._limits.max_sequences:
            return None
        # All blocks of the prefill are reserved at once, so that none is preempted half way for lack of
        # them; and each running sequence keeps a block in reach, or admissions would cause preemptions.
        needed = self._blocks.blocks_for(len(head.tokens)) + len(self._decoding) + len(self._prefilling)
        return head if needed <= self._blocks.blocks_free else None

    def _admit(self, sequence: SequenceState) -> None:
        self._detach(sequence)
        self._reserve(sequence, self._blocks.blocks_for(len(sequence.tokens)))
        sequence.status = Status.PREFILLING
        self._prefilling.append(sequence)

    def _decode(self, sequence: SequenceState) -> None:
        sequence.status = Status.DECODING
        self._decoding.append(sequence)

    def _enqueue(self, sequence: SequenceState) -> None:
        if not sequence.has_credit:
            sequence.status = Status.PARKED
            self._parked[sequence.handle] = sequence
        elif sequence.preemptions:
            sequence.status = Status.PREEMPTED
            self._preempted.push(sequence)
        else:
            sequence.status = Status.WAITING
            self._waiting.push(sequence)

    def _detach(self, sequence: SequenceState) -> None:
        """Take it out of the list that its status names."""
        match sequence.status:
            case Status.WAITING:
                self._waiting.remove(sequence)
            case Status.PREEMPTED:
                self._preempted.remove(sequence)
            case Status.PARKED:
                del self._parked[sequence.handle]
            case Status.PREFILLING:
                self._prefilling.remove(sequence)
            case Status.DECODING:
                self._decoding.remove(sequence)
            case Status.STALLED:
                self._stalled.remove(sequence)
            case Status.FINISHED:
                raise AssertionError(f"sequence {sequence.handle} has finished")


def _take_chunk(sequence: SequenceState, budget: int, chunks: list[Chunk]) -> int:
    """Append the sequence's next chunk, at most ``budget`` tokens long; return its length."""
    take = min(len(sequence.tokens) - sequence.computed, budget)
    if take > 0:
        chunks.append(Chunk(sequence, sequence.computed, sequence.computed + take))
    return take
