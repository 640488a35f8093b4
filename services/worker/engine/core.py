"""Engine step: plan the batch, run it, commit the result. Torch lives behind ``Executor``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from services.worker.engine.acceptance import accepted_proposals, standing_rows
from services.worker.engine.block_manager import BlockPool
from services.worker.engine.executor import Batch, Executor, Samples
from services.worker.engine.planner import Planner, PlannerLimits
from services.worker.engine.prefix.reuse import PrefixReuse
from services.worker.engine.sequence import SequenceState, Status, sequence_of
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine.validation import MAX_WAITING, ModelLimits, refusal
from services.worker.engine_protocol import (
    Cancel,
    Credit,
    FinishReason,
    Heartbeat,
    Stepped,
    Submit,
    TokenLogprobs,
)
from services.worker.policy.prefill_budget import PrefillBudget
from services.worker.policy.speculation import Verified

_HANDLE: Final = attrgetter("handle")
_TOKENS: Final = attrgetter("tokens")


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step is measured by: its decodes read ``attended_tokens`` of KV; ``cached`` is by handle what of
    a prompt came from a cache, in the step that first computes it."""

    decodes: int = 0
    prefill_tokens: int = 0
    attended_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Outcome:
    """What a step has to tell, in the columns of ``Stepped``."""

    handles: list[int]
    tokens: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    verified: list[Verified] = field(default_factory=list)


NOTHING: Final = Samples([])


class DuplicateHandle(Exception):
    """The agent used the handle of a live sequence again: neither could be told from the other."""


class Intake:
    """How a command becomes a sequence, or is refused. Another intake may keep less of a prompt."""

    def refusal(self, command: Submit, model: ModelLimits) -> str | None:
        """Return why the sequence cannot run, or None."""
        return refusal(command, model)

    def sequence(self, command: Submit, *, arrival: int, eos_ids: frozenset[int]) -> SequenceState:
        """Return the state of a sequence that is not refused."""
        return sequence_of(command, arrival=arrival, eos_ids=eos_ids)


class Engine:
    """Owns the sequences of one process. Not thread-safe: commands and steps come from one thread."""

    def __init__(
        self,
        executor: Executor,
        *,
        blocks: BlockPool,
        limits: PlannerLimits,
        model: ModelLimits,
        eos_ids: frozenset[int],
        clock: Callable[[], float],
        budget: PrefillBudget | None = None,
        reuse: PrefixReuse | None = None,
        intake: Intake | None = None,
        speculation: Speculator | None = None,
    ) -> None:
        """``budget`` paces the prefill, ``reuse`` finds KV that earlier sequences left, ``speculation`` says
        which tokens may come next."""
        self._executor = executor
        self._blocks = blocks
        self._planner = Planner(blocks, limits, budget=budget, reuse=reuse)
        self._intake = intake if intake is not None else Intake()
        self._speculation = speculation
        self._reuse = reuse
        self._model = model
        self._eos_ids = eos_ids
        self._clock = clock
        self._sequences: dict[int, SequenceState] = {}  # by handle, the live ones
        self._arrivals = 0
        self._steps = 0
        self._gone: list[int] = []  # of the present step
        self._finished: dict[int, FinishReason] = {}  # of the present step
        self._errors: dict[int, str] = {}

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would compute or report anything."""
        return bool(self._finished) or self._planner.has_work

    @property
    def planner(self) -> Planner:
        return self._planner

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    def apply(self, command: Submit | Credit | Cancel) -> None:
        """Carry out a command between two steps. Raises DuplicateHandle."""
        match command:
            case Submit():
                self._submit(command)
            case Credit():
                for handle, limit in zip(command.handles, command.limits, strict=False):
                    if (sequence := self._sequences.get(handle)) is not None:  # else it has just finished
                        self._planner.credit(sequence, limit)
            case Cancel():
                for handle in command.handles:
                    if (sequence := self._sequences.get(handle)) is not None:
                        self._planner.remove(sequence)
                        del self._sequences[handle]
                        if self._speculation is not None:
                            self._speculation.forget(handle)
                    self._finished.pop(handle, None)
                    self._errors.pop(handle, None)

    def step(self) -> Stepped:
        """One forward pass. Same commands and same executor answers give the same events."""
        started_s = self._clock()
        batch = self._plan()
        work, samples = self._run(batch)
        outcome = self._commit(batch, samples)
        step_s = self._clock() - started_s
        self._learn(work, outcome, step_s)
        return self._stepped(work, outcome, step_s)

    def heartbeat(self) -> Heartbeat:
        """What to say while there is nothing to step."""
        return Heartbeat(self._steps, self._blocks.blocks_used, self._planner.running, self._planner.waiting)

    def check_integrity(self) -> None:
        """Raise AssertionError if a block leaked or a live sequence is nowhere planned."""
        self._planner.check_integrity()
        assert len(self._sequences) == self._planner.running + self._planner.waiting, "a sequence was lost"

    def _submit(self, command: Submit) -> None:
        if command.handle in self._sequences:
            raise DuplicateHandle(f"handle {command.handle} is live")
        reason = self._intake.refusal(command, self._model)
        if reason is None and self._planner.waiting >= MAX_WAITING:
            reason = f"{MAX_WAITING} sequences wait already"
        if reason is not None:
            self._finished[command.handle] = "error"
            self._errors[command.handle] = reason
        elif len(command.produced_ids) >= command.sampling.max_tokens:
            self._finished[command.handle] = "length"  # the earlier run had just made its last token
        else:
            self._arrivals += 1
            sequence = self._intake.sequence(command, arrival=self._arrivals, eos_ids=self._eos_ids)
            self._sequences[command.handle] = sequence
            self._planner.add(sequence)

    def _plan(self) -> Batch:
        """Decide what to compute. The sequences that are handed back are among the events."""
        batch, handed_back = self._planner.plan()
        for sequence in handed_back:
            self._report(sequence, "preempted")
        if self._speculation is None or not batch.decodes:
            return batch
        proposals = self._speculation.propose(batch.decodes, most_rows=self._planner.room(batch))
        return self._planner.with_proposals(batch, proposals)

    def _run(self, batch: Batch) -> tuple[_Work, Samples]:
        """Compute the batch; while the device does, take down what the step is measured by."""
        if not (batch.decodes or batch.prefills):
            return _Work(), NOTHING
        self._executor.submit(batch)
        return self._work(batch), self._executor.collect()

    def _work(self, batch: Batch) -> _Work:
        cached: dict[int, int] = {}
        if self._reuse is not None:
            cached = {c.sequence.handle: c.start for c in batch.prefills if c.start == c.sequence.cached}
        attended = sum(map(len, map(_TOKENS, batch.decodes)))
        return _Work(len(batch.decodes), batch.prefill_tokens, attended, cached)

    def _commit(self, batch: Batch, samples: Samples) -> _Outcome:
        """Append the tokens of the rows that stand, then finish, stall or keep each sequence."""
        if batch.prefills:
            self._planner.computed(batch.prefills)
        sampled = batch.sampled
        accepted = accepted_proposals(batch, samples)
        rows = standing_rows(batch, accepted, len(sampled)) if accepted else range(len(sampled))
        kept: list[int] = []
        for row in rows:
            sequence = sampled[row]
            if sequence.status is not Status.DECODING:
                continue  # an earlier row of it was its last
            if samples.errors and row in samples.errors:
                self._errors[sequence.handle] = samples.errors[row]
                self._finish(sequence, "error")
                continue
            token, length = samples.tokens[row], len(sequence.tokens)
            sequence.computed = length
            sequence.tokens.append(token)
            kept.append(row)
            if length + 1 >= sequence.pause_at or token in sequence.stop_ids:
                self._pause(sequence, token)
        for index in accepted:
            self._planner.give_back(batch.decodes[index])
        if batch.prefills:
            self._planner.publish(batch.prefills)
        outcome = _outcome(sampled, samples, kept)
        outcome.verified += (
            Verified(batch.decodes[index].handle, len(batch.proposals[index]), count)
            for index, count in accepted.items()
        )
        return outcome

    def _learn(self, work: _Work, outcome: _Outcome, step_s: float) -> None:
        """Let the policies follow what the step took, and what became of its proposals."""
        self._planner.measured(work.prefill_tokens, step_s)
        if self._speculation is not None:
            self._speculation.stepped(
                work.decodes, outcome.verified, step_s, prefilled=work.prefill_tokens > 0
            )
            for handle in self._gone:  # after the last that is learnt of them
                self._speculation.forget(handle)
        self._gone.clear()

    def _pause(self, sequence: SequenceState, token: int) -> None:
        """Finish or stall a sequence whose last token may be its last."""
        produced = sequence.output_tokens
        if token in sequence.stop_ids and produced > sequence.sampling.min_tokens:
            self._finish(sequence, "stop")
        elif produced >= sequence.sampling.max_tokens:
            self._finish(sequence, "length")
        elif not sequence.has_credit:
            self._planner.stall(sequence)

    def _finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        self._planner.remove(sequence, is_sound=reason != "error")
        self._report(sequence, reason)

    def _report(self, sequence: SequenceState, reason: FinishReason) -> None:
        del self._sequences[sequence.handle]
        self._gone.append(sequence.handle)
        self._finished[sequence.handle] = reason

    def _stepped(self, work: _Work, outcome: _Outcome, step_s: float) -> Stepped:
        self._steps += 1
        finished, self._finished = self._finished, {}
        errors, self._errors = self._errors, {}
        added, removed = self._reuse.take_changes() if self._reuse is not None else ([], [])
        return Stepped(
            step=self._steps,
            step_s=step_s,
            handles=outcome.handles,
            tokens=outcome.tokens,
            finished=finished,
            prefill_tokens=work.prefill_tokens,
            kv_blocks_used=self._blocks.blocks_used,
            running=self._planner.running,
            waiting=self._planner.waiting,
            logprobs=outcome.logprobs,
            errors=errors,
            preemptions=self._planner.preemptions,
            attended_tokens=work.attended_tokens,
            prefix_added=added,
            prefix_removed=removed,
            cached=work.cached,
            proposed_tokens=sum(each.proposed for each in outcome.verified),
            accepted_tokens=sum(each.accepted for each in outcome.verified),
        )


def _outcome(sampled: list[SequenceState], samples: Samples, kept: list[int]) -> _Outcome:
    """Return the columns of the rows that were kept, of the sequences that were sampled."""
    tokens = samples.tokens
    if len(kept) < len(sampled):
        sampled, tokens = [sampled[row] for row in kept], [tokens[row] for row in kept]
    outcome = _Outcome(list(map(_HANDLE, sampled)), tokens)
    if samples.logprobs:
        for row, sequence in zip(kept, sampled, strict=True):
            if row in samples.logprobs:
                outcome.logprobs.setdefault(sequence.handle, []).append(samples.logprobs[row])
    return outcome
