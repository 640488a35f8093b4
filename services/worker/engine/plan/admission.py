"""Who gets KV next: the line of those that hold none, and whether its head may start."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Final

from services.core.fleet import LONG_PROMPT_TOKENS
from services.worker.engine.plan.block_manager import BlockPool, extend
from services.worker.engine.plan.sequence_sets import SequenceSets
from services.worker.engine.prefix.reuse import PrefixReuse
from services.worker.engine.sequence import SequenceState, Status

_ORDER: Final = attrgetter("order")


class StepAdmission:
    """Decides which sequences get a seat; the planner preempts others for them."""

    def __init__(
        self,
        places: SequenceSets,
        blocks: BlockPool,
        *,
        max_sequences: int,
        max_long_prefills: int,
        reuse: PrefixReuse | None,
    ) -> None:
        self._places = places
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
        prefill do: those behind pass.
        """
        long = self._places.long_prefills < self._max_long_prefills
        head = self._places.head(long=long)
        while head is not None and not long and self._has_long_rest(head):
            self._places.take(head)  # what it was to find in the cache is gone
            self.line_up(head)
            head = self._places.head(long=long)
        return head if head is not None and self.may_start(head) else None

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
