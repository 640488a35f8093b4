"""Continuous batching: which sequences run in the next step, and who gives way when KV is short.

Iteration-level scheduling (Orca, OSDI'22), decode first and prefill in chunks within a token budget
(Sarathi-Serve, OSDI'24), preemption with recompute (PagedAttention, SOSP'23). ``policy/prefill_share.py``
says how the prefills of a step share its budget, ``policy/prefill_budget.py`` how large that is. One writer:
the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.core.fleet import LONG_PROMPT_TOKENS
from services.worker.engine.block_manager import BlockPool
from services.worker.engine.executor import Batch, Chunk
from services.worker.engine.prefix.reuse import PrefixReuse
from services.worker.engine.prefix.shared_prefill import claims
from services.worker.engine.sequence import SequenceState, Status
from services.worker.engine.wait_queue import WaitQueue
from services.worker.policy.prefill_budget import PrefillBudget
from services.worker.policy.prefill_share import shares

MAX_PREEMPTIONS = 2  # at the second one the sequence goes back to the scheduler
MAX_LONG_PREFILLS = 2


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """``token_budget``: tokens computed in one step; ``max_sequences``: sequences that hold KV.

    ``max_long_prefills``: sequences with LONG_PROMPT_TOKENS and more to compute that prefill at a time.
    """

    token_budget: int
    max_sequences: int
    max_long_prefills: int = MAX_LONG_PREFILLS

    def __post_init__(self) -> None:
        if self.max_sequences < 1 or self.token_budget < self.max_sequences:
            # Otherwise a step could not give every running sequence its decode.
            raise ValueError(f"token_budget {self.token_budget} is below max_sequences {self.max_sequences}")
        if self.max_long_prefills < 1:
            raise ValueError("max_long_prefills is below 1: a long prompt would wait for ever")


class Planner:
    """Owns every live sequence and its blocks. ``plan`` decides and reserves; nothing here computes."""

    def __init__(
        self,
        blocks: BlockPool,
        limits: PlannerLimits,
        *,
        budget: PrefillBudget | None = None,
        reuse: PrefixReuse | None = None,
    ) -> None:
        """``budget`` paces the prefill, which without it takes what is left of the token budget."""
        self._blocks = blocks
        self._limits = limits
        self._budget = budget
        self._reuse = reuse
        self._waiting = WaitQueue()
        self._preempted = WaitQueue()
        self._decoding: list[SequenceState] = []
        self._prefilling: list[SequenceState] = []
        self._stalled: list[SequenceState] = []
        self._long_prefills = 0  # of those that prefill
        self._copies: list[tuple[int, int]] = []  # of the step that is planned
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

    @property
    def decoding(self) -> Sequence[SequenceState]:
        """Those that decode in the next step, to be read before it is planned."""
        return self._decoding

    @property
    def only_decodes(self) -> bool:
        """Whether the next step decodes and nothing else: nobody prefills, nobody can start."""
        return bool(self._decoding) and not self._prefilling and self._admissible() is None

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
        without credit give way to all of them, so that a slow reader holds nobody up. Whoever has a place
        prefills: the shortest rest first, the oldest with a share of its own, so that a short prompt does not
        wait behind a long one and a long one is never starved.
        """
        handed_back = self._grow()
        decodes = list(self._decoding)
        while (admitted := self._admissible()) is not None and self._make_room(admitted, handed_back):
            self._admit(admitted)
        copies, self._copies = self._copies, []
        return Batch(decodes, self._chunks(len(decodes)), copies=copies), handed_back

    def room(self, batch: Batch) -> int:
        """Return how many more rows the token budget leaves to a batch."""
        return self._limits.token_budget - len(batch.decodes) - batch.prefill_tokens

    def with_proposals(self, batch: Batch, proposals: dict[int, list[int]]) -> Batch:
        """Return the batch with proposals by index in its decodes, and the blocks that they need reserved.

        They take what is free, from nobody, and give it back with the step's commit: where blocks are short
        they are cut to what their sequence has.
        """
        size = self._blocks.block_size
        kept: dict[int, list[int]] = {}
        for index, tokens in proposals.items():
            sequence = batch.decodes[index]
            missing = self._blocks.blocks_for(sequence.computed + 1 + len(tokens)) - len(sequence.blocks)
            taken = min(missing, self._blocks.blocks_free)
            if taken > 0:
                self._reserve(sequence, taken)
            fitting = tokens[: len(sequence.blocks) * size - sequence.computed - 1]
            if fitting:
                kept[index] = fitting
        return Batch(batch.decodes, batch.prefills, kept, batch.copies)

    def give_back(self, sequence: SequenceState) -> None:
        """Free the blocks beyond its computed tokens: those of proposals that were not accepted."""
        blocks = sequence.blocks
        kept = self._blocks.blocks_for(sequence.computed)
        if kept < len(blocks):
            self._blocks.release(blocks[kept:])
            del blocks[kept:]
            sequence.table_version += 1
            sequence.capacity = kept * self._blocks.block_size
            sequence.contiguous = blocks == list(range(blocks[0], blocks[0] + kept))

    def blocks_ahead(self, steps: int) -> int:
        """Return how many more blocks the decoding sequences take for ``steps`` steps."""
        return sum(
            self._blocks.blocks_for(sequence.computed + steps) - len(sequence.blocks)
            for sequence in self._decoding
            if sequence.computed + steps > sequence.capacity
        )

    def grow_ahead(self, steps: int) -> None:
        """Reserve the blocks of ``blocks_ahead``, which are free."""
        for sequence in self._decoding:
            missing = self._blocks.blocks_for(sequence.computed + steps) - len(sequence.blocks)
            if missing > 0:
                self._reserve(sequence, missing)

    def measured(self, prefill_tokens: int, step_s: float) -> None:
        """Note what a step took: the prefill budget follows it."""
        if self._budget is not None:
            self._budget.measured(prefill_tokens, step_s)

    def computed(self, prefills: list[Chunk]) -> None:
        """Record that the chunks have run; those that reached their last token decode from now on."""
        for chunk in prefills:
            sequence = chunk.sequence
            sequence.computed = chunk.end
            if chunk.samples:
                self._detach(sequence)
                self._decode(sequence)

    def publish(self, prefills: list[Chunk]) -> None:
        """Let others find what the chunks computed, once it is known which of their sequences failed."""
        if self._reuse is not None:
            for chunk in prefills:
                self._reuse.publish(chunk.sequence)

    def stall(self, sequence: SequenceState) -> None:
        """Take a decoding sequence out of the plan, with its blocks, until it has credit."""
        self._decoding.remove(sequence)
        sequence.status = Status.STALLED
        self._stalled.append(sequence)

    def remove(self, sequence: SequenceState, *, is_sound: bool = True) -> None:
        """Forget the sequence, whatever it was doing; its blocks are free.

        What it computed is kept for others if it ``is_sound``.
        """
        self._detach(sequence)
        if self._reuse is not None and not is_sound:
            self._reuse.discard(sequence)
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
        long_prefills = sum(sequence.is_long for sequence in self._prefilling)
        assert self._long_prefills == long_prefills <= self._limits.max_long_prefills, (
            "too many long prefills"
        )
        for sequence in holders:
            assert sequence.computed <= sequence.capacity == len(sequence.blocks) * self._blocks.block_size
        assert all(not sequence.blocks for sequence in self._parked.values()), "a parked sequence holds KV"

    # --- blocks --------------------------------------------------------------------------------------

    def _grow(self) -> list[SequenceState]:
        """Give a block to every decode that needs one, oldest first; return those handed back."""
        handed_back: list[SequenceState] = []
        needy = [sequence for sequence in self._decoding if sequence.computed == sequence.capacity]
        needy.sort(key=_order)
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
        """Return who gives way to a decode: one that waits for its reader, else the youngest of all.

        Those that wait for their readers keep their KV where others hold all of it: it would free nothing.
        """
        if self._blocks.freed_by([sequence.blocks for sequence in self._stalled]):
            return self._stalled_victim()
        return max((*self._decoding, *self._prefilling), key=_order)

    def _stalled_victim(self, kept: Collection[int] = ()) -> SequenceState:
        """Return the youngest of the stalled that frees a block not in ``kept``, else the youngest."""
        youngest_first = sorted(self._stalled, key=_order, reverse=True)
        freeing = (each for each in youngest_first if self._blocks.freed_by([each.blocks], kept=kept))
        return next(freeing, youngest_first[0])

    def _reserve(self, sequence: SequenceState, count: int) -> None:
        held = sequence.blocks
        last = held[-1] if held else None
        most = self._blocks.blocks_for(sequence.prompt_tokens + sequence.sampling.max_tokens)
        expected = 0 if sequence.capacity else most - len(held)  # it starts: all that it may come to need
        added = self._blocks.allocate(count, after=last, expected=expected)
        runs = added[-1] - added[0] == count - 1 and (last is None or added[0] == last + 1)
        sequence.contiguous = runs and (last is None or sequence.contiguous)
        held += added
        sequence.table_version += 1
        sequence.capacity = len(held) * self._blocks.block_size

    def _release(self, sequence: SequenceState) -> None:
        if self._reuse is not None:
            self._reuse.retain(sequence)
        self._blocks.release(sequence.blocks)
        sequence.blocks.clear()
        sequence.table_version += 1
        sequence.capacity = 0
        sequence.computed = 0
        sequence.cached = 0

    def _preempt(self, victim: SequenceState) -> bool:
        """Take the victim's KV; it is computed again later. Return whether it is handed back instead."""
        self._detach(victim)
        victim.preemptions += victim.computed > victim.cached  # one that had not begun loses nothing
        self._release(victim)
        self.preemptions += 1
        if victim.preemptions >= MAX_PREEMPTIONS:
            victim.status = Status.FINISHED
            return True
        self._enqueue(victim)
        return False

    # --- places --------------------------------------------------------------------------------------

    def _admissible(self) -> SequenceState | None:
        """Return the head of the line if it may start now, once those without credit gave way to it.

        Preempted ones go first and nobody overtakes, but for long prompts while as many of them as may
        prefill do: those behind pass.
        """
        long = self._long_prefills < self._limits.max_long_prefills
        head = self._preempted.head(long=long) or self._waiting.head(long=long)
        while head is not None and not long and self._has_long_rest(head):
            self._detach(head)  # what it was to find in the cache is gone
            self._enqueue(head)
            head = self._preempted.head(long=long) or self._waiting.head(long=long)
        if head is None:
            return None
        places = self._limits.max_sequences - self.running
        missing = self._missing(head)
        if places > 0 and missing <= 0:
            return head
        return head if places + len(self._stalled) > 0 and missing <= self._freed_for(head, missing) else None

    def _freed_for(self, head: SequenceState, wanted: int) -> int:
        """Return how many blocks all without credit would free for ``head``; 0 where ``wanted`` is beyond it.

        What they share with those that run stays held, and what ``head`` would share is no room for it.
        """
        tables = [sequence.blocks for sequence in self._stalled]
        if not 0 < wanted <= sum(map(len, tables)):
            return 0
        return self._blocks.freed_by(tables, kept=self._found(head))

    def _found(self, head: SequenceState) -> frozenset[int]:
        """Return the cached blocks that it would start with."""
        return frozenset() if self._reuse is None else frozenset(self._reuse.found(head))

    def _missing(self, head: SequenceState) -> int:
        """Return how many free blocks its start lacks.

        All blocks of the prefill are reserved at once, so that none is preempted half way for lack of them;
        and each running sequence keeps a block in reach, or admissions would cause preemptions.
        """
        held_by_others = 0 if self._reuse is None else self._reuse.reusable(head)[1]
        needed = self._blocks.blocks_for(len(head.tokens)) - held_by_others
        return needed + len(self._decoding) + len(self._prefilling) - self._blocks.blocks_free

    def _make_room(self, head: SequenceState, handed_back: list[SequenceState]) -> bool:
        """Let those without credit give way, the youngest first, until ``head`` fits; whether it does."""
        while self.running >= self._limits.max_sequences or self._missing(head) > 0:
            if not self._stalled:
                return False
            victim = self._stalled_victim(self._found(head))
            if self._preempt(victim):
                handed_back.append(victim)
        return True

    def _admit(self, sequence: SequenceState) -> None:
        self._detach(sequence)
        copied = None
        if self._reuse is not None:
            held, sequence.cached, copied = self._reuse.attach(sequence)
            sequence.blocks += held
            sequence.computed = sequence.cached
            sequence.contiguous = not held or held == list(range(held[0], held[0] + len(held)))
        missing = self._blocks.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        self._reserve(sequence, missing)
        if copied is not None:
            self._copies.append((copied, sequence.blocks[-missing]))
        sequence.status = Status.PREFILLING
        sequence.is_long = len(sequence.tokens) - sequence.computed >= LONG_PROMPT_TOKENS
        self._long_prefills += sequence.is_long
        self._prefilling.append(sequence)

    def _chunks(self, decodes: int) -> list[Chunk]:
        """Return this step's chunks, in the order in which their sequences got their places."""
        movers, claimed = claims(self._prefilling, self._reuse)
        budget = self._limits.token_budget - decodes
        if self._budget is not None and (decodes or self._long_prefills):
            budget = min(budget, self._budget.tokens)
        return [
            Chunk(sequence, sequence.computed, sequence.computed + tokens)
            for sequence, tokens in zip(movers, shares(claimed, budget), strict=True)
            if tokens
        ]

    def _decode(self, sequence: SequenceState) -> None:
        sequence.status = Status.DECODING
        self._decoding.append(sequence)

    def _enqueue(self, sequence: SequenceState) -> None:
        if not sequence.has_credit:
            sequence.status = Status.PARKED
            self._parked[sequence.handle] = sequence
            return
        sequence.is_long = self._has_long_rest(sequence)
        sequence.status = Status.PREEMPTED if sequence.preemptions else Status.WAITING
        (self._preempted if sequence.preemptions else self._waiting).push(sequence)

    def _has_long_rest(self, sequence: SequenceState) -> bool:
        """Whether its prefill would be a long one, with what is cached now."""
        rest = len(sequence.tokens)
        if rest >= LONG_PROMPT_TOKENS and self._reuse is not None:
            rest -= self._reuse.reusable(sequence)[0]
        return rest >= LONG_PROMPT_TOKENS

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
                self._long_prefills -= sequence.is_long
            case Status.DECODING:
                self._decoding.remove(sequence)
            case Status.STALLED:
                self._stalled.remove(sequence)
            case Status.FINISHED:
                raise AssertionError(f"sequence {sequence.handle} has finished")


def _order(sequence: SequenceState) -> tuple[int, int]:
    return sequence.order
