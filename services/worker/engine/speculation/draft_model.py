"""Proposals of a smaller model: it runs ahead of the target over the same text, with a KV pool of its own.

The draft samples as the target will: with the same key at each output position, the same temperature and
filters. With equal keys two models of near distributions draw the same token far more often than independent
draws would, so proposals are accepted at temperature above 0 too. All sequences that speculate are one batch
of the draft at each of its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.worker.engine.execute.executor import Batch, PrefillChunk, Runner
from services.worker.engine.plan.block_manager import BlockPool
from services.worker.engine.sequence import SequenceState, Status

# Share of the token budget that the draft may compute to get to the text's end.
MAX_CATCH_UP_RATIO: Final = 1 / 4


@dataclass(slots=True, eq=False)
class _Draft:
    """``state`` is the sequence as the draft has it; its first ``followed`` tokens are the text's, the others
    were proposed. ``most`` tokens are wanted of it in this step."""

    state: SequenceState
    followed: int = 0
    most: int = 0
    used: int = 0  # the turn of its last request


class DraftModel:
    """Implements ``Proposer``. ``runner`` is the draft's; its KV blocks are those of ``blocks``.

    A sequence whose text the draft has not computed yet catches up within a part of ``token_budget`` a step,
    and proposes once it is there. Where blocks are short the draft drops the least recently used sequence.
    """

    def __init__(self, runner: Runner, *, blocks: BlockPool, max_model_len: int, token_budget: int) -> None:
        self._runner = runner
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._catch_up = max(1, int(token_budget * MAX_CATCH_UP_RATIO))
        self._drafts: dict[int, _Draft] = {}  # drafts by handle
        self._turn = 0

    def propose(self, wanted: Sequence[tuple[SequenceState, int]]) -> list[list[int]]:
        """See ``Proposer``."""
        self._turn += 1
        drafts = [self._follow(sequence, most) for sequence, most in wanted]
        going = self._first_step([draft for draft in drafts if draft is not None])
        while going:
            going = self._next_step(going)
        return [
            [] if draft is None else list(draft.state.tokens[len(sequence.tokens) :])
            for draft, (sequence, _) in zip(drafts, wanted, strict=True)
        ]

    def forget(self, handle: int) -> None:
        """See ``Proposer``."""
        draft = self._drafts.pop(handle, None)
        if draft is not None:
            self._blocks.release(draft.state.blocks)

    def resize(self, blocks: int) -> None:
        """See ``Proposer``. What was computed of the texts is forgotten: it is computed again."""
        for handle in list(self._drafts):
            self.forget(handle)
        self._runner.resize(blocks)
        change = blocks - self._blocks.blocks_total
        if change > 0:
            self._blocks.grow(change)
        else:
            self._blocks.shrink(-change)

    def check_integrity(self) -> None:
        """Raise AssertionError if a block leaked."""
        self._blocks.check_integrity(draft.state.blocks for draft in self._drafts.values())

    # --- one sequence --------------------------------------------------------------------------------

    def _follow(self, sequence: SequenceState, most: int) -> _Draft | None:
        """Return its draft with the text as it is now, and room for the proposals; None without room."""
        most = min(most, self._max_model_len - len(sequence.tokens))
        if most < 1:
            return None
        draft = self._drafts.get(sequence.handle)
        if draft is None:
            draft = self._drafts[sequence.handle] = _Draft(_shadow(sequence))
        state, tokens = draft.state, sequence.tokens
        # What it ran ahead by may have come otherwise: the KV of an equal beginning stays.
        first = _equal_until(state.tokens, tokens, draft.followed)
        state.tokens[first:] = tokens[first:]
        state.computed = min(state.computed, first, len(tokens) - 1)
        draft.followed = len(tokens)
        draft.most, draft.used = most, self._turn
        return draft if self._reserve(state, len(tokens) + most - 1) else None

    def _reserve(self, state: SequenceState, tokens: int) -> bool:
        """Hold blocks for so many tokens; whether that was possible."""
        missing = self._blocks.blocks_for(tokens) - len(state.blocks)
        if missing <= 0:
            return True
        while missing > self._blocks.blocks_free:
            idle = [handle for handle, draft in self._drafts.items() if draft.used < self._turn]
            if not idle:
                return False
            self.forget(min(idle, key=lambda handle: self._drafts[handle].used))
        last = state.blocks[-1] if state.blocks else None
        state.blocks += self._blocks.allocate(missing, after=last)
        state.table_version += 1
        blocks = state.blocks
        state.contiguous = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        state.capacity = len(blocks) * self._blocks.block_size
        return True

    # --- steps ---------------------------------------------------------------------------------------

    def _first_step(self, drafts: list[_Draft]) -> list[_Draft]:
        """Bring the drafts to the end of their texts; return those that are there, with a token."""
        decodes: list[_Draft] = []
        chunks: list[tuple[_Draft, PrefillChunk]] = []
        left = self._catch_up
        for draft in drafts:
            state = draft.state
            rest = len(state.tokens) - state.computed
            if rest == 1:
                decodes.append(draft)
            elif left > 0:
                taken = min(rest, left)
                left -= taken
                chunks.append((draft, PrefillChunk(state, state.computed, state.computed + taken)))
        if not decodes and not chunks:
            return []
        batch = Batch([draft.state for draft in decodes], [chunk for _, chunk in chunks])
        sampled = [*decodes, *(draft for draft, chunk in chunks if chunk.samples)]
        samples = self._runner.run(batch)
        for draft, chunk in chunks:
            draft.state.computed = chunk.end
        return self._take(sampled, samples.tokens, samples.errors)

    def _next_step(self, drafts: list[_Draft]) -> list[_Draft]:
        samples = self._runner.run(Batch([draft.state for draft in drafts], []))
        return self._take(drafts, samples.tokens, samples.errors)

    def _take(self, drafts: list[_Draft], tokens: list[int], errors: dict[int, str]) -> list[_Draft]:
        """Append a token to each; return the drafts that want more."""
        going: list[_Draft] = []
        for row, (draft, token) in enumerate(zip(drafts, tokens, strict=True)):
            draft.state.computed = len(draft.state.tokens)
            if row in errors:
                continue
            draft.state.tokens.append(token)
            draft.most -= 1
            if draft.most > 0 and token not in draft.state.stop_ids:
                going.append(draft)
        return going


def _shadow(sequence: SequenceState) -> SequenceState:
    """Return the sequence as the draft starts it: no KV, and nothing to report."""
    return SequenceState(
        handle=sequence.handle,
        tokens=list(sequence.tokens),
        prompt_tokens=sequence.prompt_tokens,
        sampling=replace(sequence.sampling, logprobs=None, constraint=None, prompt_logprobs=None),
        limits=sequence.limits,
        stop_ids=sequence.stop_ids,
        key=sequence.key,
        order=sequence.order,
        credit_limit=sequence.credit_limit,
        status=Status.DECODING,
    )


def _equal_until(mine: Sequence[int], theirs: Sequence[int], start: int) -> int:
    """Return where two texts that are equal up to ``start`` first differ, or the shorter ends."""
    end = min(len(mine), len(theirs))
    return next((place for place in range(start, end) if mine[place] != theirs[place]), end)
