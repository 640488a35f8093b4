"""Continuous batching: which sequences run in the next step, and which are preempted when KV is short.

Iteration-level scheduling (Orca, OSDI'22), decode first and prefill in chunks within a token budget
(Sarathi-Serve, OSDI'24), preemption with recompute (PagedAttention, SOSP'23). ``policy/prefill.py`` sets
the budget of a step and divides it between its prefills. One writer:
the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from services.core.fleet import LONG_PROMPT_TOKENS
from services.worker.engine.execute.executor import Batch, PrefillChunk
from services.worker.engine.plan.block_manager import BlockPool, clear, cut, extend
from services.worker.engine.plan.kv_budgets import KvBudgets
from services.worker.engine.plan.sequence_sets import SequenceSets
from services.worker.engine.prefix.reuse import PrefixReuse, claims
from services.worker.engine.sequence import SequenceState, Status
from services.worker.policy.prefill import PrefillBudget, shares

MAX_PREEMPTIONS = 2  # preemptions after which the sequence goes back to the scheduler
MAX_LONG_PREFILLS = 2
_ORDER: Final = attrgetter("order")


class StepAdmission:
    """Decides who gets KV next: the line of those that hold none, and whether its head may start.

    The planner preempts others for them.
    """

    def __init__(
        self,
        places: SequenceSets,
        blocks: BlockPool,
        *,
        max_sequences: int,
        max_long_prefills: int,
        reuse: PrefixReuse | None,
        budgets: KvBudgets,
    ) -> None:
        self._places = places
        self._budgets = budgets
        self._blocks = blocks
        self._max_sequences = max_sequences
        self._max_long_prefills = max_long_prefills
        self._reuse = reuse

    def line_up(self, sequence: SequenceState) -> None:
        """Put a sequence that is nowhere in its line; one without credit is parked instead."""
        if not sequence.has_credit:
            self._places.put(sequence, Status.PARKED)
            return
        if sequence.is_suspect:
            self._places.put(sequence, Status.SUSPECT)
            return
        sequence.is_long = self._has_long_rest(sequence)
        self._places.put(sequence, Status.PREEMPTED if sequence.preemptions else Status.WAITING)

    def head(self) -> SequenceState | None:
        """Return the head of the line if it may start now, after preemption of those without credit.

        Preempted ones go first and none overtakes, except for long prompts while as many of them as may
        prefill do: those behind pass, and for those whose tenants have no budget left.
        """
        long = self._places.long_prefills < self._max_long_prefills
        head = self._places.head(long=long)
        while head is not None and not long and self._has_long_rest(head):
            self._places.take(head)  # what it was to find in the cache is gone
            self.line_up(head)
            head = self._places.head(long=long)
        if head is not None and self._waits_for_budget(head):
            return self.head()
        return head if head is not None and self.may_start(head) else None

    def suspect(self) -> SequenceState | None:
        """Return the first suspect whose tenant has budget for it."""
        suspects = self._places.suspects
        while suspects and self._waits_for_budget(suspects[0]):
            pass
        return suspects[0] if suspects else None

    def _waits_for_budget(self, head: SequenceState) -> bool:
        """Put a sequence aside until its tenant releases blocks, if it has no budget for it now."""
        if not head.kv_share:
            return False
        found = len(self.found(head))
        while self._budgets.admits(head, found):
            left = len(self.found(head))
            if left == found:
                return False
            found = left  # What it would have found was evicted for it.
        self._places.move(head, Status.OVER_BUDGET)
        return True

    def may_start(self, head: SequenceState) -> bool:
        """Whether a seat is free, and blocks after preemption of those without credit."""
        if self._places.seated >= self._max_sequences:
            return False
        missing = self._missing(head)
        return missing <= 0 or missing <= self._freed_for(head, missing)

    def fits(self, head: SequenceState) -> bool:
        """Whether a seat and blocks are free without preemption."""
        return self._places.seated < self._max_sequences and self._missing(head) <= 0

    def admit(self, head: SequenceState) -> list[tuple[int, int]]:
        """Let it prefill, with all blocks of its prompt; return the blocks to copy before, (from, to)."""
        self._places.take(head)
        copied = None
        if self._reuse is not None:
            held, head.cached, copied = self._reuse.attach(head)
            head.blocks += held
            head.computed = head.cached
            head.contiguous = not held or held == list(range(held[0], held[0] + len(held)))
        missing = self._blocks.blocks_for(len(head.tokens)) - len(head.blocks)
        extend(head, missing, self._blocks)
        head.is_long = len(head.tokens) - head.computed >= LONG_PROMPT_TOKENS
        self._places.put(head, Status.PREFILLING)
        return [] if copied is None else [(copied, head.blocks[-missing])]

    def found(self, head: SequenceState) -> frozenset[int]:
        """Return the cached blocks that it would start with."""
        return frozenset() if self._reuse is None else frozenset(self._reuse.found(head))

    def stalled_victim(self, kept: Collection[int] = ()) -> SequenceState:
        """Return the youngest of the stalled that frees a block not in ``kept``, else the youngest."""
        youngest_first = sorted(self._places.stalled, key=_ORDER, reverse=True)
        freeing = (each for each in youngest_first if self._blocks.freed_by([each.blocks], kept=kept))
        return next(freeing, youngest_first[0])

    def _missing(self, head: SequenceState) -> int:
        """Return how many free blocks its start lacks.

        All blocks of the prefill are reserved at once, so that none is preempted half way for lack of them;
        and each running sequence keeps a block in reach, or admissions would cause preemptions.
        """
        held_by_others = 0 if self._reuse is None else self._reuse.reusable(head)[1]
        needed = self._blocks.blocks_for(len(head.tokens)) - held_by_others
        growing = len(self._places.decoding) + len(self._places.prefilling)
        return needed + growing - self._blocks.blocks_free

    def _freed_for(self, head: SequenceState, wanted: int) -> int:
        """Return how many blocks all without credit would free for ``head``; 0 where ``wanted`` is beyond it.

        What they share with those that run stays held, and what ``head`` would share is no room for it.
        """
        tables = [sequence.blocks for sequence in self._places.stalled]
        if not 0 < wanted <= sum(map(len, tables)):
            return 0
        return self._blocks.freed_by(tables, kept=self.found(head))

    def _has_long_rest(self, sequence: SequenceState) -> bool:
        """Whether its prefill would be a long one, with what is cached now."""
        rest = len(sequence.tokens)
        if rest >= LONG_PROMPT_TOKENS and self._reuse is not None:
            rest -= self._reuse.reusable(sequence)[0]
        return rest >= LONG_PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """``token_budget``: tokens computed in one step; ``max_sequences``: sequences that run. Those without
    credit hold KV at most.

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
        self._places = SequenceSets()
        self._budgets = KvBudgets(self._places, blocks)
        self._admission = StepAdmission(
            self._places,
            blocks,
            max_sequences=limits.max_sequences,
            max_long_prefills=limits.max_long_prefills,
            reuse=reuse,
            budgets=self._budgets,
        )
        self._copies: list[tuple[int, int]] = []  # block copies of the step that is planned
        self._suspect: SequenceState | None = None  # the sequence that runs in steps of its own
        self._suspect_before = False  # the step before was one of these
        self.preemptions = 0
        self._preempted: list[int] = []  # handles preempted since they were last taken

    def take_preempted(self) -> list[int]:
        """Return the handles that were preempted since the last call."""
        found, self._preempted = self._preempted, []
        return found

    @property
    def running(self) -> int:
        """How many sequences hold KV."""
        return self._places.with_kv

    @property
    def waiting(self) -> int:
        """How many sequences hold none."""
        return self._places.without_kv

    @property
    def has_work(self) -> bool:
        """Whether ``plan`` would return a batch."""
        places = self._places
        return bool(places.decoding or places.prefilling or places.returning or self._closed_holders()) or (
            (self._suspect_head() or self._admission.head()) is not None or bool(self._beyond_budget())
        )

    @property
    def decoding(self) -> Sequence[SequenceState]:
        """Those that decode in the next step, to be read before it is planned."""
        return self._places.decoding

    @property
    def only_decodes(self) -> bool:
        """Whether the next step decodes only: none prefills, none can start."""
        if self._places.prefilling or self._places.returning or self._blocks.is_closing or self.has_suspects:
            return False
        return bool(self._places.decoding) and self._admission.head() is None

    @property
    def has_suspects(self) -> bool:
        """Whether a sequence runs in steps of its own, or waits to."""
        return bool(self._places.suspects) or self._running_suspect() is not None

    def add(self, sequence: SequenceState) -> None:
        """Queue a new sequence, a constrained one when ``compiled``; the planner owns it from now on."""
        self._budgets.note(sequence)
        if sequence.sampling.constraint is not None:
            self._places.put(sequence, Status.COMPILING)
        else:
            self._admission.line_up(sequence)

    def compiled(self, sequence: SequenceState) -> None:
        """Queue a sequence whose constraint was compiled."""
        self._places.take(sequence)
        self._admission.line_up(sequence)

    def credit(self, sequence: SequenceState, limit: int) -> None:
        """Raise the output limit; a sequence that waited for that is planned again once it has a seat."""
        sequence.set_credit(limit)
        if not sequence.has_credit:
            return
        if sequence.status is Status.STALLED:
            self._places.move(sequence, Status.RETURNING)
            self._seat_returning()
        elif sequence.status is Status.PARKED:
            self._places.take(sequence)
            self._admission.line_up(sequence)

    def plan(self) -> tuple[Batch, list[SequenceState]]:
        """Return the next batch, with its blocks reserved, and the sequences that are handed back.

        The batch computes at most ``token_budget`` tokens. The older sequences with credit take blocks
        from the younger, never the reverse, so the oldest always moves and everything finishes; those
        without credit are preempted for any of them, so that a slow reader delays no other. Each with a seat
        prefills: the shortest rest first, the oldest with a share of its own, so that a short prompt does not
        wait behind a long one and a long one is never starved. While the pool shrinks, one holder of blocks
        beyond its end is preempted in each plan.

        Suspects of a crash start before others, one at a time, and run in steps of their own. While one does,
        every other step computes the others.
        """
        self._seat_returning()
        handed_back = [*self._release_closed(), *self._release_over_budget(), *self._grow()]
        if self._seat_suspect(handed_back):
            while (head := self._admission.head()) is not None and self._make_room(head, handed_back):
                self._copies += self._admission.admit(head)
        copies, self._copies = self._copies, []
        return self._batch(copies), handed_back

    def room(self, batch: Batch) -> int:
        """Return how many more rows the token budget leaves to a batch."""
        return self._limits.token_budget - len(batch.decodes) - batch.prefill_tokens

    def with_proposals(self, batch: Batch, proposals: dict[int, list[int]]) -> Batch:
        """Return the batch with proposals by index in its decodes, and the blocks that they need reserved.

        They take only free blocks and return them with the step's commit: where blocks are short
        they are cut to what their sequence has.
        """
        size = self._blocks.block_size
        kept: dict[int, list[int]] = {}
        for index, tokens in proposals.items():
            sequence = batch.decodes[index]
            missing = self._blocks.blocks_for(sequence.computed + 1 + len(tokens)) - len(sequence.blocks)
            taken = min(missing, self._blocks.blocks_free)
            if taken > 0 and self._budgets.makes_room(sequence, taken):
                extend(sequence, taken, self._blocks)
            fitting = tokens[: len(sequence.blocks) * size - sequence.computed - 1]
            if fitting:
                kept[index] = fitting
        return Batch(batch.decodes, batch.prefills, kept, batch.copies)

    def give_back(self, sequence: SequenceState) -> None:
        """Free the blocks of proposals that were not accepted."""
        cut(sequence, self._blocks)

    def blocks_ahead(self, steps: int) -> int:
        """Return how many more blocks the decoding sequences take for ``steps`` steps."""
        return sum(
            self._blocks.blocks_for(sequence.computed + steps) - len(sequence.blocks)
            for sequence in self._places.decoding
            if sequence.computed + steps > sequence.capacity
        )

    def fits_ahead(self, steps: int) -> bool:
        """Whether these blocks are free, and within the budgets of their tenants."""
        return self.blocks_ahead(steps) <= self._blocks.blocks_free and self._budgets.fits(
            self._tenants_ahead(steps)
        )

    def _tenants_ahead(self, steps: int) -> Counter[str]:
        more: Counter[str] = Counter()
        for one in self._places.decoding:
            if one.kv_share and one.computed + steps > one.capacity:
                more[one.tenant] += self._blocks.blocks_for(one.computed + steps) - len(one.blocks)
        return more

    def grow_ahead(self, steps: int) -> None:
        """Reserve the blocks of ``blocks_ahead``, for which ``fits_ahead`` holds."""
        for sequence in self._places.decoding:
            missing = self._blocks.blocks_for(sequence.computed + steps) - len(sequence.blocks)
            if missing > 0:
                fits = self._budgets.makes_room(sequence, missing)
                assert fits, "blocks ahead exceed a budget"
                extend(sequence, missing, self._blocks)

    def measured(self, prefill_tokens: int, step_s: float) -> None:
        """Note what a step took: the prefill budget follows it."""
        if self._budget is not None:
            self._budget.measured(prefill_tokens, step_s)

    def pace(self, target_s: float) -> None:
        """Aim at steps of this length from now on; 0: only the token budget cuts a step."""
        if target_s <= 0.0:
            self._budget = None
        elif self._budget is None:
            self._budget = PrefillBudget(target_s, most_tokens=self._limits.token_budget)
        else:
            self._budget.aim(target_s)

    def computed(self, prefills: list[PrefillChunk]) -> None:
        """Record that the chunks have run; those that reached their last token decode from now on.

        Chunks of sequences that were removed meanwhile mean nothing.
        """
        for chunk in prefills:
            sequence = chunk.sequence
            if sequence.status is Status.FINISHED:
                continue
            sequence.computed = chunk.end
            if chunk.samples:
                self._places.move(sequence, Status.DECODING)

    def publish(self, prefills: list[PrefillChunk]) -> None:
        """Let others find what the chunks computed, once it is known which of their sequences failed."""
        if self._reuse is not None:
            for chunk in prefills:
                self._reuse.publish(chunk.sequence)

    def has_blocks_after(self, batch: Batch) -> bool:
        """Whether all can go on after a batch that is computed, without a block of anybody's."""
        more = self._tenants_ahead(2)
        more.update(chunk.sequence.tenant for chunk in batch.prefills if chunk.sequence.kv_share)
        free = self.blocks_ahead(2) + len(batch.prefills) <= self._blocks.blocks_free
        return free and self._budgets.fits(more)

    def hold(self, sequence: SequenceState) -> None:
        """Take a decoding sequence out of the plan, with its blocks, until its next token is known."""
        self._places.move(sequence, Status.HELD)

    def mask_separately(self, sequence: SequenceState) -> None:
        """Take a decoding sequence out of the plan, with its blocks, until its next mask is computed."""
        self._places.move(sequence, Status.MASKING)

    def masked(self, sequence: SequenceState) -> None:
        """Plan a sequence whose next mask was computed, unless something else happened to it meanwhile."""
        if sequence.status is Status.MASKING:
            self._places.move(sequence, Status.DECODING)

    def stall(self, sequence: SequenceState) -> None:
        """Take a sequence out of the plan until it has credit. Its seat is free; its blocks stay until
        another sequence needs them. A suspect has run by then: what it lacks is a reader."""
        sequence.run_alone(0)
        self._places.move(sequence, Status.STALLED)

    def remove(self, sequence: SequenceState, *, is_sound: bool = True) -> None:
        """Forget the sequence, whatever it was doing; its blocks are free.

        What it computed is kept for others if it ``is_sound``.
        """
        self._places.move(sequence, Status.FINISHED)
        if self._reuse is not None and not is_sound:
            self._reuse.discard(sequence)
        self._release(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks leaked, a status lies or a bound is exceeded."""
        places, holders = self._places, self._places.holders()
        places.check_integrity()
        self._budgets.check_integrity()
        self._blocks.check_integrity(sequence.blocks for sequence in holders)
        assert places.seated <= self._limits.max_sequences, "more sequences run than allowed"
        assert places.long_prefills <= self._limits.max_long_prefills, "too many long prefills"
        for sequence in (*places.decoding, *places.masking):
            assert sequence.computed == len(sequence.tokens) - 1, "a decode computes its last token"
        for sequence in holders:
            assert sequence.computed <= sequence.capacity == len(sequence.blocks) * self._blocks.block_size

    def _seat_returning(self) -> None:
        """Let sequences with KV and credit decode while seats are free, before others start."""
        returning = self._places.returning
        while returning and self._places.seated < self._limits.max_sequences:
            self._places.move(returning[0], Status.DECODING)

    # --- suspects ------------------------------------------------------------------------------------

    def _running_suspect(self) -> SequenceState | None:
        """Return the suspect whose trial runs: it has a seat and has not produced its tokens."""
        suspect = self._suspect
        if suspect is None or suspect.status not in (Status.PREFILLING, Status.DECODING):
            return None
        return suspect if suspect.is_suspect else None

    def _suspect_head(self) -> SequenceState | None:
        """Return the suspect that starts next, None while one runs or none may start."""
        if not self._places.suspects or self._running_suspect() is not None:
            return None
        head = self._admission.suspect()
        return head if head is not None and self._admission.may_start(head) else None

    def _seat_suspect(self, handed_back: list[SequenceState]) -> bool:
        """Let the next suspect start; return whether others may start too: none overtakes a suspect that
        waits for blocks."""
        if not self._places.suspects or self._running_suspect() is not None:
            return True
        head = self._suspect_head()
        if head is None and not self._places.suspects:
            return True
        if head is None or not self._make_room(head, handed_back):
            return False
        self._copies += self._admission.admit(head)
        self._suspect = head
        return True

    def _batch(self, copies: list[tuple[int, int]]) -> Batch:
        """Return the suspect's step or that of all others, in turn while both have something to compute."""
        suspect, places = self._running_suspect(), self._places
        if suspect is None:
            return Batch(
                list(places.decoding), self._chunks(places.prefilling, len(places.decoding)), copies=copies
            )
        decodes = [sequence for sequence in places.decoding if sequence is not suspect]
        prefills = [sequence for sequence in places.prefilling if sequence is not suspect]
        self._suspect_before = not self._suspect_before or not (decodes or prefills)
        if not self._suspect_before:
            return Batch(decodes, self._chunks(prefills, len(decodes)), copies=copies)
        if suspect.status is Status.DECODING:
            return Batch([suspect], [], copies=copies)
        return Batch([], self._chunks([suspect], 0), copies=copies)

    # --- blocks --------------------------------------------------------------------------------------

    def _closed_holders(self) -> list[SequenceState]:
        """Return those that hold a closed block."""
        if not self._blocks.is_closing:
            return []
        return [sequence for sequence in self._places.holders() if self._blocks.holds_closed(sequence.blocks)]

    def _release_closed(self) -> list[SequenceState]:
        """Preempt the youngest holder of a closed block, so that a shrink ends; return it if handed back."""
        holders = self._closed_holders()
        if not holders:
            return []
        victim = max(holders, key=_ORDER)
        return [victim] if self._preempt(victim) else []

    def _release_over_budget(self) -> list[SequenceState]:
        """Preempt the youngest of each tenant above its budget, as after a shrink; return those handed
        back, with those that wait for more than their whole budget."""
        handed_back = self._beyond_budget()
        for sequence in handed_back:
            self._places.move(sequence, Status.FINISHED)
        for tenant in self._budgets.over():
            while self._budgets.held(tenant) > self._budgets.limit(tenant):
                victim = self._own_victim(tenant)
                if victim is None:
                    break
                if self._preempt(victim):
                    handed_back.append(victim)
            self._budgets.over()  # what its sequences left in the cache counts too
        return handed_back

    def _beyond_budget(self) -> list[SequenceState]:
        """Return those that wait for their tenants' budgets and exceed them alone."""
        return [one for one in self._places.over_budget if not self._budgets.fits_alone(one)]

    def _own_victim(self, tenant: str) -> SequenceState | None:
        """Return the youngest sequence of the tenant that may be preempted; those without credit go first."""
        places = self._places
        moving = (*places.decoding, *places.prefilling, *places.masking, *places.returning)
        for group in (places.stalled, moving):
            if own := [one for one in group if one.tenant == tenant]:
                return max(own, key=_ORDER)
        return None

    def _grow(self) -> list[SequenceState]:
        """Give a block to every decode that needs one, oldest first; return those handed back."""
        handed_back: list[SequenceState] = []
        needy = [sequence for sequence in self._places.decoding if sequence.computed == sequence.capacity]
        needy.sort(key=_ORDER)
        for sequence in needy:
            while (
                sequence.kv_share
                and sequence.status is Status.DECODING
                and not self._budgets.makes_room(sequence, 1)
            ):
                victim = self._own_victim(sequence.tenant) or sequence
                if self._preempt(victim):
                    handed_back.append(victim)
            # An older one of this loop may have taken this one's blocks.
            while sequence.status is Status.DECODING and self._blocks.blocks_free == 0:
                victim = self._victim()
                if self._preempt(victim):
                    handed_back.append(victim)
            if sequence.status is Status.DECODING:
                extend(sequence, 1, self._blocks)
        return handed_back

    def _victim(self) -> SequenceState:
        """Return the sequence to preempt for a decode: one that waits for its reader, else the youngest.

        Sequences that wait for their readers keep KV that others hold too, because preempting them frees
        nothing.
        """
        if self._blocks.freed_by([sequence.blocks for sequence in self._places.stalled]):
            return self._admission.stalled_victim()
        places = self._places
        moving = (*places.decoding, *places.prefilling, *places.masking)
        return max((*moving, *places.returning), key=_ORDER)

    def _release(self, sequence: SequenceState) -> None:
        if self._reuse is not None:
            self._reuse.retain(sequence)
        clear(sequence, self._blocks)
        if sequence.kv_share:
            for waits in [one for one in self._places.over_budget if one.tenant == sequence.tenant]:
                self._places.take(waits)
                self._admission.line_up(waits)

    def _preempt(self, victim: SequenceState) -> bool:
        """Take the victim's KV; it is computed again later. Return whether it is handed back instead."""
        assert victim.tokens[-1] >= 0, "its next token is being computed"
        self._places.take(victim)
        victim.preemptions += victim.computed > victim.cached  # one that had not begun loses nothing
        self._release(victim)
        self.preemptions += 1
        self._preempted.append(victim.handle)
        if victim.preemptions >= MAX_PREEMPTIONS or not self._budgets.fits_alone(victim):
            self._places.put(victim, Status.FINISHED)
            return True
        self._admission.line_up(victim)
        return False

    def _make_room(self, head: SequenceState, handed_back: list[SequenceState]) -> bool:
        """Preempt those without credit, the youngest first, until ``head`` fits; return whether it does."""
        while not self._admission.fits(head):
            if not self._places.stalled:
                return False
            victim = self._admission.stalled_victim(kept=self._admission.found(head))
            if self._preempt(victim):
                handed_back.append(victim)
        return True

    def _chunks(self, prefilling: list[SequenceState], decodes: int) -> list[PrefillChunk]:
        """Return this step's chunks, in the order in which their sequences got their places."""
        movers, claimed = claims(prefilling, self._reuse)
        budget = self._limits.token_budget - decodes
        if self._budget is not None and (decodes or self._places.long_prefills):
            budget = min(budget, self._budget.tokens)
        return [
            PrefillChunk(sequence, sequence.computed, sequence.computed + tokens)
            for sequence, tokens in zip(movers, shares(claimed, budget), strict=True)
            if tokens
        ]
