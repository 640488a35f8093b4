"""Engine step: plan a batch, run it, commit what came of it. Torch lives behind ``Executor``.

On a device that computes in parallel to the processor, the next batch is planned and submitted while one is
computed: each sequence is taken where that batch's tokens will bring it, whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Final

from services.worker.engine.constrain.constraints import Constraints
from services.worker.engine.execute.executor import Adapters, Batch, Executor, Samples, WeightStore
from services.worker.engine.live_sequences import Flight, LiveSequences, Outcome, Work
from services.worker.engine.plan.block_manager import BlockPool
from services.worker.engine.plan.planner import Planner, PlannerLimits
from services.worker.engine.prefix.reuse import PrefixReuse
from services.worker.engine.sequence import MAX_WAITING, Intake, ModelLimits, Status, is_complete
from services.worker.engine.speculation.speculator import Speculator
from services.worker.engine.step_meter import NOBODY, StepMeter
from services.worker.engine.unsupported import REFUSALS, BadEngineConfig
from services.worker.engine_protocol import (
    AdapterLoaded,
    AdapterRefused,
    Cancel,
    Command,
    Credit,
    DropAdapter,
    EngineHeartbeat,
    EngineMessage,
    LoadAdapter,
    Pace,
    Park,
    Progress,
    ReplaceWeights,
    Resize,
    Resized,
    StepLink,
    Stepped,
    Submit,
    WeightsRefused,
    WeightsReplaced,
)
from services.worker.policy.prefill import PrefillBudget
from services.worker.step_page import StepPage

_TOKENS: Final = attrgetter("tokens")
_SEES_OUTPUT: Final = attrgetter("sees_output")
NOTHING: Final = Samples([])
COMPILING_S: Final = 0.002  # how long a step waits for a grammar or a mask when nothing else is to be done


class PoolSize:
    """Owns the size of the KV pool, of the memory behind it, and of the draft model's pool.

    Requests are carried out between two steps. Blocks are closed at once and returned when they have no
    holder; the memory behind them changes when the last of them is free, once for each ``Resize``. Growing
    has memory before it has blocks.
    """

    def __init__(self, blocks: BlockPool, executor: Executor, speculation: Speculator | None) -> None:
        self._blocks = blocks
        self._executor = executor
        self._speculation = speculation
        self._backed = blocks.blocks_total  # blocks that have memory
        self._wanted: int | None = None  # the size that was requested and has no answer yet

    @property
    def changing(self) -> bool:
        """Whether a change is to be carried out: no batch may be planned ahead of another."""
        return self._wanted is not None

    def request(self, blocks: int) -> None:
        """Close what is beyond ``blocks``, or open what was closed; the rest is for ``settle``."""
        self._wanted = max(1, blocks)
        self._blocks.grow(0)
        if self._wanted < self._blocks.blocks_total:
            self._blocks.shrink(self._blocks.blocks_total - self._wanted)

    def settle(self) -> int | None:
        """Carry out what can be, while nothing is computed; the blocks that there are if that was the end."""
        if self._wanted is None:
            return None
        self._blocks.drain()
        if self._blocks.is_closing:
            return None
        wanted, total = self._wanted, self._blocks.blocks_total
        size = max(wanted, total)  # ``least_blocks`` may be more than was requested
        try:
            self._have_memory(size)
        except MemoryError:
            size = self._backed
        if size > total:
            self._blocks.grow(size - total)
        self._wanted = None
        return size

    def _have_memory(self, blocks: int) -> None:
        """Raises MemoryError where there is none, with as much as before."""
        before = self._backed
        if blocks == before:
            return
        try:
            self._executor.resize(blocks)
            if self._speculation is not None:
                self._speculation.resize(blocks)
        except MemoryError:
            with suppress(MemoryError):
                self._executor.resize(before)
            raise
        self._backed = blocks


class LoadedAdapters:
    """The adapters that sequences may name. ``send`` sends what became of a command."""

    def __init__(self, adapters: Adapters | None) -> None:
        self._adapters = adapters
        self.loaded: set[int] = set()
        self.send: Callable[[EngineMessage], None] = lambda _: None

    def load(self, command: LoadAdapter) -> None:
        """Load an adapter between two steps; the engine goes on without one that is refused."""
        number = command.adapter
        try:
            if self._adapters is None:
                raise BadEngineConfig("this engine promises no adapters: use a CPU, or merge them")
            if number < 1 or number in self.loaded:
                raise BadEngineConfig(f"{number} is no new number of an adapter")
            size_bytes = self._adapters.load(number, Path(command.folder))
        except REFUSALS as error:
            self.send(AdapterRefused(number, str(error)))
        except MemoryError:
            self.send(AdapterRefused(number, "there is no memory for it", "does_not_fit"))
        else:
            self.loaded.add(number)
            self.send(AdapterLoaded(number, size_bytes))

    def drop(self, number: int) -> None:
        """Free an adapter. Idempotent."""
        self.loaded.discard(number)
        if self._adapters is not None:
            self._adapters.drop(number)


class WeightsLost(Exception):
    """A replacement failed halfway: the process has no whole weights and must end."""


class DuplicateHandle(Exception):
    """The agent used the handle of a live sequence for another one."""


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
        page: StepPage | None = None,
        constraints: Constraints | None = None,
        adapters: Adapters | None = None,
        weights: WeightStore | None = None,
        has_probe: bool = False,
    ) -> None:
        """``budget`` paces the prefill, ``reuse`` finds KV that earlier sequences left, ``speculation`` sets
        which tokens may come next, ``page`` receives the members of each step. Without ``constraints`` a
        constrained sequence is refused, without ``adapters`` every adapter, without ``weights`` every
        replacement, and a sequence with scores of a probe unless the executor ``has_probe``."""
        self.has_probe = has_probe
        self._executor = executor
        self._blocks = blocks
        self._planner = Planner(blocks, limits, budget=budget, reuse=reuse)
        self._intake = intake if intake is not None else Intake()
        self._speculation = speculation
        self._reuse = reuse
        self._model = model
        self._eos_ids = eos_ids
        self._clock = clock
        self._page = page
        self._constraints = constraints
        self._adapters = LoadedAdapters(adapters)
        self._weights = weights
        self._send: Callable[[EngineMessage], None] = lambda _: None
        self._live = LiveSequences(self._planner)
        self._meter = StepMeter()
        self._arrivals = 0
        self._steps = 0
        self._size = PoolSize(blocks, executor, speculation)
        self._flight: Flight | None = None  # submitted while the batch before it was computed

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would compute or report anything."""
        return (
            self._live.any_ended
            or self._flight is not None
            or self._planner.has_work
            or self._meter.any_ending
            or (self._constraints is not None and self._constraints.any_pending)
        )

    @property
    def planner(self) -> Planner:
        return self._planner

    @property
    def max_model_len(self) -> int:
        return self._model.max_model_len

    def apply(self, command: Command) -> None:
        """Carry out a command between two steps. Raises DuplicateHandle, WeightsLost."""
        match command:
            case Submit():
                self._submit(command)
            case Credit():
                for handle, limit in zip(command.handles, command.limits, strict=False):
                    self._live.credit(handle, limit)
            case Park():
                for handle in command.handles:
                    self._live.park(handle)
            case Cancel():
                for handle in command.handles:
                    if self._live.cancel(handle):
                        self._meter.end(handle)
                    self._forget(handle)
            case Resize():
                self._size.request(command.kv_blocks)
            case Pace():
                self._planner.pace(command.itl_target_s)
            case LoadAdapter():
                self._adapters.load(command)
            case DropAdapter():
                self._adapters.drop(command.adapter)
            case ReplaceWeights():
                self._replace_weights(Path(command.folder))

    def resized(self) -> Resized | None:
        """Continue a ``Resize`` between two steps; return its event once it has ended."""
        blocks = self._size.settle() if self._flight is None else None
        return None if blocks is None else Resized(blocks)

    def connect(self, link: StepLink) -> None:
        """See ``process.StepLoop``."""
        self._adapters.send = self._send = link.send

    def step(self) -> Stepped:
        """One forward pass. Same commands and same executor answers give the same events."""
        self._take_compiled()
        flight = self._flight if self._flight is not None else self._launch()
        self._flight = self._launch_next(flight) if self._may_run_ahead(flight) else None
        samples = self._collect(flight.batch) if flight.batch else NOTHING
        outcome = self._live.commit(flight, samples)
        self._mask_separately(flight)
        if flight.batch and self._page is not None:
            self._page.ended()
        step_s = self._ended(flight)
        prefill_s = self._meter.ended(flight.members, step_s)
        self._learn(flight.work, outcome, step_s)
        return self._stepped(flight.work, outcome, step_s, prefill_s)

    def skipped(self, batch: Batch, steps_s: Sequence[float]) -> tuple[dict[int, int], list[int]]:
        """Charge steps of a batch of decodes that the caller carried out; return columns of ``Stepped``."""
        attended = sum(map(len, map(_TOKENS, batch.decodes)))
        for step_s in steps_s:
            self._meter.ended(self._meter.launched(batch, attended), step_s)
            attended += len(batch.decodes)
        return self._meter.report((), airborne=False)

    def heartbeat(self) -> EngineHeartbeat:
        """Return the event that is sent while no sequence can be stepped."""
        return EngineHeartbeat(
            self._steps, self._blocks.blocks_used, self._planner.running, self._planner.waiting
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if a block leaked or a live sequence is nowhere planned."""
        self._planner.check_integrity()
        assert len(self._live) == self._planner.running + self._planner.waiting, "a sequence was lost"

    def _replace_weights(self, folder: Path) -> None:
        """Replace the weights, or refuse it with nothing changed. Raises WeightsLost where it fails between.

        The cached KV is dropped, and reported so, before a sequence can be computed with the new weights.
        """
        began_s = self._clock()
        try:
            if self._weights is None or self._adapters.loaded:
                raise BadEngineConfig("this engine cannot replace its weights: load the version beside it")
            if len(self._live):
                raise BadEngineConfig(f"{len(self._live)} sequences run on the present weights")
            self._weights.check_weights(folder)
        except REFUSALS as error:
            self._send(WeightsRefused(error.reason, str(error)))
            return
        while self._flight is not None:  # batches of sequences that were cancelled meanwhile
            self._send(self.step())
        try:
            self._weights.replace_weights(folder, lambda done: self._send(Progress("replace", done)))
        except REFUSALS as error:
            self._send(WeightsRefused(error.reason, str(error), changed=True))
            raise WeightsLost(error.reason) from error
        if self._reuse is not None:
            self._reuse.clear()
        self._send(self.step())  # it reports the removed blocks
        self._send(WeightsReplaced(self._clock() - began_s))

    def _submit(self, command: Submit) -> None:
        if command.handle in self._live:
            raise DuplicateHandle(f"handle {command.handle} is live")
        reason = self._refusal(command)
        if reason is not None:
            self._live.end_at_once(command.handle, "error", reason)
        elif is_complete(command):
            self._live.end_at_once(command.handle, "length")  # the earlier run had just made its last token
        else:
            self._arrivals += 1
            self._live.add(self._intake.sequence(command, arrival=self._arrivals, eos_ids=self._eos_ids))
            if self._constraints is not None and command.sampling.constraint is not None:
                self._constraints.begin(command.handle, command.sampling.constraint)

    def _refusal(self, command: Submit) -> str | None:
        """Return why a sequence may not run, or None."""
        reason = self._intake.refusal(command, self._model)
        if reason is None and self._planner.waiting >= MAX_WAITING:
            reason = f"{MAX_WAITING} sequences wait already"
        if reason is None and command.sampling.constraint is not None and self._constraints is None:
            reason = "this engine has no constraints"
        if reason is None and command.adapter and command.adapter not in self._adapters.loaded:
            reason = f"adapter {command.adapter} is not loaded"
        if reason is None and command.probe and not self.has_probe:
            reason = "this engine has no probe"
        return reason

    def _take_compiled(self) -> None:
        """Plan the sequences whose grammars, or masks, are ready; wait a moment if there is nothing to do."""
        if self._constraints is None or not self._constraints.any_pending:
            return
        idle = self._flight is None and not (self._planner.has_work or self._live.any_ended)
        for compiled in self._constraints.take_compiled(timeout_s=COMPILING_S if idle else 0.0):
            self._live.compiled(compiled.handle, compiled.refusal)
        for handle in self._constraints.take_masked():
            self._live.masked(handle)

    def _mask_separately(self, flight: Flight) -> None:
        """Take the sequences out of the plan whose next masks would delay a step. A suspect delays none."""
        if self._constraints is None or flight.batch.masks is None:
            return
        for sequence in dict.fromkeys(flight.sampled):
            decodes = sequence.status is Status.DECODING and not sequence.is_suspect
            if decodes and self._constraints.is_slow(sequence.handle):
                self._planner.mask_separately(sequence)
                self._constraints.mask_separately(sequence)

    def _collect(self, batch: Batch) -> Samples:
        """Return the samples of the batch that was submitted first, and which rows have no mask."""
        samples = self._executor.collect()
        if batch.masks is None:
            return samples
        ruled = batch.masks.result()
        return replace(samples, unmasked=ruled.problems, late=ruled.late)

    def _forget(self, handle: int) -> None:
        """Drop what is kept of a sequence that is gone."""
        if self._speculation is not None:
            self._speculation.forget(handle)
        if self._constraints is not None:
            self._constraints.forget(handle)

    def _plan(self) -> Batch:
        """Decide what to compute. The sequences that are handed back are among the events."""
        batch, handed_back = self._planner.plan()
        self._live.hand_back(handed_back)
        batch = self._with_proposals(batch)
        if self._constraints is not None and (masks := self._constraints.masks(batch)) is not None:
            batch = replace(batch, masks=masks)
        return batch

    def _with_proposals(self, batch: Batch) -> Batch:
        if self._speculation is None or not batch.decodes:
            return batch
        room, prefills = self._planner.room(batch), bool(batch.prefills)
        proposals = self._speculation.propose(batch.decodes, most_rows=room, prefills=prefills)
        if self._constraints is not None and proposals:
            proposals = self._constraints.cut(batch.decodes, proposals)
        return self._planner.with_proposals(batch, proposals)

    def _launch(self) -> Flight:
        """Plan a batch and submit it; while the device computes, take down what the step is measured by."""
        began_s = self._clock()
        batch = self._plan()
        if not batch:
            return Flight(batch, [], Work(), began_s, NOBODY)
        if self._page is not None:
            self._page.began(batch.decodes, [chunk.sequence for chunk in batch.prefills])
        self._executor.submit(batch)
        work = self._work(batch)
        members = self._meter.launched(batch, work.attended_tokens)
        return Flight(batch, batch.sampled, work, began_s, members)

    def _work(self, batch: Batch) -> Work:
        cached: dict[int, int] = {}
        if self._reuse is not None:
            cached = {c.sequence.handle: c.start for c in batch.prefills if c.start == c.sequence.cached}
        attended = sum(map(len, map(_TOKENS, batch.decodes)))
        prefilled = {c.sequence.handle: c.end - c.start for c in batch.prefills}
        return Work(len(batch.decodes), batch.prefill_tokens, attended, cached, prefilled)

    # --- ahead of the commit -------------------------------------------------------------------------

    def _may_run_ahead(self, flight: Flight) -> bool:
        """Whether the next batch can be planned without this one's tokens.

        It cannot where a suspect runs in steps of its own, or where the tokens decide more than which
        sequences end: they choose what is proposed or penalised next, or blocks are short, so that those
        which an end frees save others from being preempted. It cannot either where this batch prefills what
        others may find in the cache, because its commit enters that.
        """
        return (
            self._executor.runs_ahead
            and self._speculation is None
            and not self._size.changing
            and not self._planner.has_suspects
            and bool(flight.batch)
            and not (flight.batch.prefills and self._reuse is not None)
            and self._planner.has_blocks_after(flight.batch)
            and not any(map(_SEES_OUTPUT, flight.sampled))
        )

    def _launch_next(self, flight: Flight) -> Flight | None:
        """Plan and submit the batch after one that is computed; None if there is nothing to compute."""
        self._live.foresee(flight)
        following = self._launch()
        return following if following.batch else None

    # --- after a step --------------------------------------------------------------------------------

    def _ended(self, flight: Flight) -> float:
        """Return how long the step took; until its end the device had nothing of the one that follows."""
        now_s = self._clock()
        if self._flight is not None:
            self._flight.began_s = now_s
        return now_s - flight.began_s

    def _learn(self, work: Work, outcome: Outcome, step_s: float) -> None:
        """Let the policies follow what the step took, and what became of its proposals."""
        self._planner.measured(work.prefill_tokens, step_s)
        gone = self._live.take_gone()
        if self._speculation is not None:
            self._speculation.stepped(
                work.decodes, outcome.verified, step_s, prefilled=work.prefill_tokens > 0
            )
        # The handles are forgotten last, because the steps above still look them up.
        for handle in gone:
            self._forget(handle)

    def _stepped(self, work: Work, outcome: Outcome, step_s: float, prefill_s: float) -> Stepped:
        self._steps += 1
        finished, errors, embeddings = self._live.take_ended()
        device_us, settled = self._meter.report(finished, airborne=self._flight is not None)
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
            prompt_logprobs=outcome.prompt_logprobs,
            errors=errors,
            preemptions=self._planner.preemptions,
            attended_tokens=work.attended_tokens,
            prefix_added=added,
            prefix_removed=removed,
            cached=work.cached,
            proposed_tokens=sum(each.proposed for each in outcome.verified),
            accepted_tokens=sum(each.accepted for each in outcome.verified),
            prefill_s=prefill_s,
            prefilled=work.prefilled,
            preempted=self._planner.take_preempted(),
            device_us=device_us,
            settled=settled,
            embeddings=embeddings,
            probe_scores=outcome.probe_scores,
        )
