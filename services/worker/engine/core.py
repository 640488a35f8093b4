"""Engine step: plan the batch, run it, commit the result. Torch lives behind ``Executor``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.worker.engine.block_manager import BlockPool
from services.worker.engine.executor import Batch, Executor, Samples
from services.worker.engine.planner import Planner, PlannerLimits
from services.worker.engine.prefix_reuse import PrefixReuse
from services.worker.engine.sequence import SequenceState, Status, sequence_of
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

NOTHING = Samples([])


class _Work(NamedTuple):
    """What a step computes: prompt tokens, tokens of KV that its decodes read, and by handle what of a
    prompt came from a cache, in the step that first computes it."""

    prefill_tokens: int
    attended_tokens: int
    cached: dict[int, int]


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
    ) -> None:
        """``budget`` paces the prefill, ``reuse`` finds KV that earlier sequences left."""
        self._executor = executor
        self._blocks = blocks
        self._planner = Planner(blocks, limits, budget=budget, reuse=reuse)
        self._intake = intake if intake is not None else Intake()
        self._reuses = reuse is not None
        self._model = model
        self._eos_ids = eos_ids
        self._clock = clock
        self._sequences: dict[int, SequenceState] = {}  # by handle, the live ones
        self._arrivals = 0
        self._steps = 0
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
                    if (sequence := self._sequences.pop(handle, None)) is not None:
                        self._planner.remove(sequence)
                    self._finished.pop(handle, None)
                    self._errors.pop(handle, None)

    def step(self) -> Stepped:
        """One forward pass. Same commands and same executor answers give the same events."""
        started_s = self._clock()
        batch, handed_back = self._planner.plan()
        for sequence in handed_back:
            self._report(sequence, "preempted")
        # Before the commit: it moves what all of these are measured by.
        work = _Work(
            batch.prefill_tokens,
            sum(len(sequence.tokens) for sequence in batch.decodes),
            {c.sequence.handle: c.start for c in batch.prefills if c.start == c.sequence.cached}
            if self._reuses
            else {},
        )
        sampled = batch.sampled
        samples = self._executor.run(batch) if batch.decodes or batch.prefills else NOTHING
        logprobs = self._commit(batch, sampled, samples)
        if samples.errors:
            sampled, samples = _without_errors(sampled, samples)
        step_s = self._clock() - started_s
        self._planner.measured(work.prefill_tokens, step_s)
        return self._stepped(step_s, sampled, samples.tokens, logprobs, work)

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

    def _commit(
        self, batch: Batch, sampled: Sequence[SequenceState], samples: Samples
    ) -> dict[int, TokenLogprobs]:
        """Append the tokens, then finish, stall or keep each sequence. Return log-probabilities by handle."""
        for sequence in batch.decodes:
            sequence.computed += 1
        if batch.prefills:
            self._planner.computed(batch.prefills)
        for row, message in samples.errors.items():
            self._errors[sampled[row].handle] = message
            self._finish(sampled[row], "error")
        for sequence, token in zip(sampled, samples.tokens, strict=True):
            if sequence.status is Status.DECODING:
                sequence.tokens.append(token)
                if len(sequence.tokens) >= sequence.pause_at or token in sequence.stop_ids:
                    self._pause(sequence, token)
        return {
            sampled[row].handle: entry for row, entry in samples.logprobs.items() if row not in samples.errors
        }

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
        self._planner.remove(sequence)
        self._report(sequence, reason)

    def _report(self, sequence: SequenceState, reason: FinishReason) -> None:
        del self._sequences[sequence.handle]
        self._finished[sequence.handle] = reason

    def _stepped(
        self,
        step_s: float,
        sampled: Sequence[SequenceState],
        tokens: list[int],
        logprobs: dict[int, TokenLogprobs],
        work: _Work,
    ) -> Stepped:
        self._steps += 1
        finished, self._finished = self._finished, {}
        errors, self._errors = self._errors, {}
        return Stepped(
            step=self._steps,
            step_s=step_s,
            handles=[sequence.handle for sequence in sampled],
            tokens=tokens,
            finished=finished,
            prefill_tokens=work.prefill_tokens,
            kv_blocks_used=self._blocks.blocks_used,
            running=self._planner.running,
            waiting=self._planner.waiting,
            logprobs=logprobs,
            errors=errors,
            preemptions=self._planner.preemptions,
            attended_tokens=work.attended_tokens,
            cached=work.cached,
        )


def _without_errors(
    sampled: Sequence[SequenceState], samples: Samples
) -> tuple[list[SequenceState], Samples]:
    """Return the rows that have a token."""
    rows = [row for row in range(len(sampled)) if row not in samples.errors]
    return [sampled[row] for row in rows], Samples([samples.tokens[row] for row in rows])
