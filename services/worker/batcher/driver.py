"""The rows of one version on this worker: admission, batches, answers, isolation of failures.

One batch at a time runs in the process that serves, and while tenants share it a second one between its
layers (``runs``). What the policy decides is in ``policy``; this module acts. All times are of one monotonic
clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog
from msgspec import structs

from services.core.errors import DeadlineUnmeetable, FairwayError, InvalidInput
from services.core.fixed_cost.rows import RowEnd, RowSpec
from services.core.fleet import PoolSnapshot
from services.core.poison.suspicion import LossCause
from services.ports.clock import Clock
from services.worker.batcher.batch_choice import BatchChoice
from services.worker.batcher.charges import RowCharges
from services.worker.batcher.policy.cost_curve import CostCurve, CostPrior
from services.worker.batcher.policy.isolation import RunFailure, RunPlace
from services.worker.batcher.policy.length_buckets import mixed_width
from services.worker.batcher.policy.start import (
    MOST_BATCH_BYTES,
    MOST_PADDED_TOKENS,
    BatchLimits,
    Linger,
)
from services.worker.batcher.policy.window import DerivedWindow, Window
from services.worker.batcher.runs import BatchRun, BatchRuns
from services.worker.batcher.search import RowSearch, RowSearches
from services.worker.batcher.telemetry import BatcherTelemetry
from services.worker.engine_protocol import BatchRaised, BatchRan, RowModel
from services.worker.slots.engine_process import Crashed, EngineExit, RunningEngine
from services.worker.step_recorder import EngineRecorder
from services.worker.streams.live_row import LiveRow
from services.worker.streams.outbox import Outbox

log = structlog.get_logger()

SLOTS_PER_BATCH: Final = 4  # rows in flight, in full batches: one runs, others gather and travel
RESTART_S: Final = 30.0  # longest wait of rows for a process that starts again, unless loading takes long
RESTART_LOADS: Final = 4  # the same in loads, for two processes may load at once
SEARCH_RESTART_S: Final = 300.0  # the same wait for suspects: they would end a process of another worker too


class Sacrifice(Protocol):
    """The process in which suspects run. Answers by ``Batcher.attach``, or ``search_in_serving``."""

    def start(self) -> None:
        """Start it, unless it runs or starts."""

    def stop(self) -> None:
        """End it, if it runs or starts."""


@dataclass(frozen=True, slots=True)
class BatcherContext:
    """What a batcher uses."""

    clock: Clock
    call_later: Callable[[float, Callable[[], None]], Any]  # a timer of the event loop
    changed: Callable[[], None]  # free slots, or rows, changed
    draining: Callable[[], bool]  # no new rows come
    charges: RowCharges
    recorder: EngineRecorder
    sacrifice: Sacrifice
    window: Window = field(default_factory=DerivedWindow)  # decides when a batch starts
    telemetry: BatcherTelemetry | None = None


class Batcher:
    """Single writer: the worker's event loop. Implements ``RowTable``; outlives the processes."""

    def __init__(
        self, version_digest: str, model: RowModel, *, memory_bytes: int, context: BatcherContext
    ) -> None:
        """``memory_bytes``: the working memory of a batch; 0: no bound."""
        costs = model.costs
        self._digest = version_digest
        self._model = model
        self._context = context
        self._clock = context.clock
        self.limits = BatchLimits(
            padded_tokens=MOST_PADDED_TOKENS if model.max_tokens else 0,
            memory_bytes=memory_bytes,
            row_bytes=costs.row_bytes,
            token_bytes=costs.token_bytes,
            input_bytes=MOST_BATCH_BYTES,
        )
        self.row_slots = SLOTS_PER_BATCH * self.limits.rows
        self.curve = CostCurve(CostPrior(costs.batch_s, costs.row_s, costs.token_s))
        self._choice = BatchChoice(
            version_digest,
            model,
            limits=self.limits,
            curve=self.curve,
            window=context.window,
            telemetry=context.telemetry,
        )
        self._live: dict[int, LiveRow] = {}
        self._searches = RowSearches(version_digest)
        self._runs = BatchRuns(self.curve, self._clock)
        self._last_number = self._decision = 0
        self._detached_s = 0.0
        self._restart_s = RESTART_S
        self._batches, self._batch_s, self._row_s = 0, 0.0, 0.0

    # --- RowTable -------------------------------------------------------------------------------

    @property
    def version_digest(self) -> str:
        return self._digest

    @property
    def ready(self) -> bool:
        return RunPlace.SERVING in self._runs.processes

    @property
    def has_room(self) -> bool:
        return len(self._live) < self.row_slots

    @property
    def alone(self) -> int:
        return sum(not row.spec.epoch for row in self._live.values())

    @property
    def running(self) -> int:
        """Rows in batches that run."""
        return sum(len(run.rows) for run in self._runs)

    @property
    def places(self) -> frozenset[RunPlace]:
        """Which processes run."""
        return frozenset(self._runs.processes)

    @property
    def batches(self) -> int:
        """Batches that were answered."""
        return self._batches

    def __len__(self) -> int:
        return len(self._live)

    def start(self, outbox: Outbox, handle: int, spec: RowSpec) -> None:
        now_s = self._clock.monotonic_s()
        self._last_number += 1
        deadline_s = now_s + spec.time_left_s if spec.time_left_s > 0 else math.inf
        row = LiveRow(spec, outbox, handle, self._last_number, now_s, deadline_s)
        outbox.rows[handle] = row
        self._live[row.number] = row
        self._context.charges.began(row)
        error: FairwayError | None = self._searches.refusal(spec.inputs, now_s)
        if error is None:
            error = self._choice.add(row, now_s, self._runs.serving)
        if error is not None:
            self._end(row, RowEnd(error=error), error.reason)
        else:
            self._decide()

    def cancel(self, rows: Sequence[LiveRow]) -> None:
        """Drop the rows. Those in a batch stay until it ended, for it is charged to them."""
        for row in rows:
            row.dropped = True
        for row in self._choice.take(rows):
            self._end(row, RowEnd(), "CANCELLED")

    def sweep(self, now_s: float) -> None:
        """End rows whose deadline passes, and batches that hang."""
        for row in self._choice.take_late(now_s):
            late = DeadlineUnmeetable("the deadline passes before the row is computed")
            self._end(row, RowEnd(error=late), late.reason)
        self._runs.kill_hung(now_s)
        away_s = 0.0 if self.ready else now_s - self._detached_s
        if away_s > self._restart_s and (waiting := self._choice.rows()):
            self._lose(waiting)
        for search in self._searches.at(RunPlace.SERVING) if away_s > SEARCH_RESTART_S else ():
            self._lose(self._searches.give_up(search))

    def reset_silence(self) -> None:
        """See ``RowTable``."""
        self._runs.reset_silence()

    def report(self, *, ready: bool) -> PoolSnapshot:
        return PoolSnapshot(
            digest=self._digest,
            kv_blocks_total=0,
            kv_blocks_reserved=0,
            block_size=1,
            running=self.running,
            waiting=len(self._live) - self.running,
            max_sequences=0,
            max_model_len=0,
            ready=ready,
            steps=self._batches,
            step_seconds=self._batch_s,
            row_slots=self.row_slots,
            row_us=round(self._row_s * 1e6),
        )

    def check_integrity(self) -> None:
        self._choice.check_integrity()
        in_runs = {row.number for run in self._runs for row in run.rows}
        searched = {row.number for search in self._searches for row in search.unanswered()}
        placed = in_runs | searched | {row.number for row in self._choice.rows()}
        assert placed == set(self._live), "rows are in no batch, no search and not waiting"
        for row in self._live.values():
            assert row.dropped or row.outbox.rows.get(row.handle) is row, "its stream has no such row"

    # --- processes ------------------------------------------------------------------------------

    def attach(self, place: RunPlace, process: RunningEngine, *, load_s: float = 0.0) -> None:
        """Run batches in this process from now on. ``load_s``: how long it took to load."""
        self._runs.processes[place] = process
        self._restart_s = min(SEARCH_RESTART_S, max(self._restart_s, RESTART_LOADS * load_s))
        self._proceed()

    def detach(self, place: RunPlace, exit_: EngineExit) -> None:
        """Search the rows of its batch after a process ended by itself; they are lost if it was stopped."""
        now_s = self._clock.monotonic_s()
        if place is RunPlace.SERVING:
            self._detached_s = now_s
        runs = self._runs.ended(place)
        if runs:
            self._context.charges.wasted(now_s - runs[0].began_s)
        for run in runs:
            if isinstance(exit_, Crashed):
                if place is RunPlace.SACRIFICIAL and self._context.telemetry is not None:
                    self._context.telemetry.sacrificed()
                died = RunFailure.DIED if exit_.cause is LossCause.FAULT else RunFailure.KILLED
                self._failed(run, RunFailure.HUNG if run.hung else died)
            elif run.search is None:
                self._lose(run.rows)
        self._proceed()

    def on_batch(self, place: RunPlace, event: BatchRan | BatchRaised) -> None:
        """Answer the rows of a batch, or search the one that raised."""
        run = self._runs.answered(place, event.number, event.run_s)
        if run is None:
            return
        now_s = self._clock.monotonic_s()
        if isinstance(event, BatchRaised):
            self._context.charges.wasted(event.run_s)
            self._failed(run, RunFailure.RAISED)
        else:
            self._answer(run, event, now_s)
        self._proceed()

    def search_in_serving(self, reason: str) -> None:
        """Search in the process that serves, once it is up: no process can be sacrificed."""
        for search in self._searches.at(RunPlace.SACRIFICIAL):
            log.warning("search.not_apart", digest=self._digest, reason=reason)
            search.go_on_in_serving()
        self._proceed()

    def lose_all(self) -> None:
        """End every row as lost: no process will run."""
        self._runs.clear()
        self._searches.clear()
        self._lose(list(self._live.values()))

    # --- batches --------------------------------------------------------------------------------

    def _proceed(self) -> None:
        """Start what can start in either process."""
        running = [run.search for run in self._runs]
        for abandoned in [each for each in self._searches if each.place is None and each not in running]:
            self._settle(abandoned)
        self._decide()
        searches = self._searches.at(RunPlace.SACRIFICIAL)
        if not searches:
            self._context.sacrifice.stop()
        elif RunPlace.SACRIFICIAL not in self._runs.processes:
            self._context.sacrifice.start()
        elif RunPlace.SACRIFICIAL not in self._runs:
            self._search_on(searches[0])
        self._context.changed()

    def _decide(self) -> None:
        """Start a batch if the serving process is idle and waiting does not pay."""
        self._decision += 1
        if not self.ready:
            return
        now_s = self._clock.monotonic_s()
        if (running := self._runs.serving) is not None:
            self._preempt(running, now_s)
            return
        search = self._searches.next_in_serving(others_wait=bool(len(self._choice)))
        if search is not None:
            self._search_on(search)
            return
        found = self._choice.next(now_s, draining=self._context.draining())
        if isinstance(found, Linger):
            self._context.call_later(found.until_s - now_s, self._timer(self._decision))
        elif found is not None:
            self._searches.others_ran()
            self._runs.start(
                RunPlace.SERVING,
                found.rows,
                found.width,
                found.cause.value,
                window=found.window,
                most_rows=found.most_rows,
            )

    def _timer(self, decision: int) -> Callable[[], None]:
        def due() -> None:
            if decision == self._decision:  # a later decision makes it void
                self._decide()

        return due

    def _preempt(self, running: BatchRun, now_s: float) -> None:
        """Run rows of other tenants between the layers of a batch, if that pays."""
        if not self._model.pauses or self._runs.has_between or running.search is not None:
            return
        found = self._choice.between(running, now_s)
        if found is not None:
            self._runs.start_between(found.rows, found.width, found.cause.value)

    def _search_on(self, search: RowSearch) -> None:
        assert search.place is not None, "the search is over"
        if self._context.telemetry is not None:
            self._context.telemetry.searched(search.place.value)
        # A part of a mixed batch may have longer rows than the whole: its time limit is that of its own rows.
        width = search.width
        if self._model.packs:
            width = max(width, mixed_width(sum(row.length for row in search.rows) / len(search.rows)))
        if search.place is RunPlace.SERVING:
            self._choice.charge(search.rows, width, self._clock.monotonic_s())
        self._runs.start(search.place, search.rows, width, search.cause, search=search)

    def _answer(self, run: BatchRun, event: BatchRan, now_s: float) -> None:
        ran = [row for place, row in enumerate(run.rows) if place not in event.problems]
        elapsed_s = now_s - run.began_s - run.paused_s
        self._context.charges.ran(ran, event.run_s)
        if ran:
            self._context.recorder.ran(
                run.rows,
                began_s=run.began_s,
                predicted_s=self.curve.mean_s(run.width, len(ran)),
                waiting=len(self._choice),
            )
            self._measure(run, ran, event.run_s, elapsed_s, now_s)
        explained: set[str] = set()  # requests that have the window
        for place, row in enumerate(run.rows):
            wait_s = max(0.0, run.began_s - row.accepted_s)
            if (problem := event.problems.get(place)) is not None:
                self._end(row, RowEnd(error=InvalidInput(problem), wait_s=wait_s), InvalidInput.reason)
                continue
            outputs = tuple(event.outputs[place])
            first = row.spec.request_id not in explained
            explained.add(row.spec.request_id)
            end = RowEnd(
                outputs,
                None,
                False,
                row.device_s,
                wait_s,
                batch_rows=len(ran),
                batch_cause=run.cause,
                window=run.window if first else None,
            )
            self._end(row, end, "ANSWERED")
        if run.search is not None:
            run.search.after(None)
            self._settle(run.search)

    def _measure(
        self, run: BatchRun, ran: Sequence[LiveRow], run_s: float, elapsed_s: float, now_s: float
    ) -> None:
        """Count a batch of the serving process in the curve: what it takes, as this process sees it."""
        rows = len(ran)
        if run.search is None:
            if not run.between:
                self.curve.note(run.width, rows, elapsed_s)
            self._choice.ended(rows, now_s)
        self._batches += 1
        self._batch_s += run_s
        each_s = run_s / rows
        self._row_s = each_s if not self._row_s else self._row_s + 0.1 * (each_s - self._row_s)
        if self._context.telemetry is not None:
            self._context.telemetry.ran(
                lengths=[row.length for row in ran],
                width=run.width if self._model.has_tokens and not self._model.packs else 0,
                most_rows=run.most_rows or self.limits.rows_at(run.width)[0],
                cause=run.cause,
                waited_s=sum(max(0.0, run.began_s - row.accepted_s) for row in ran),
                run_s=elapsed_s,
            )

    # --- failures -------------------------------------------------------------------------------

    def _failed(self, run: BatchRun, failure: RunFailure) -> None:
        """Search the rows of a batch without answers, or go on with the search."""
        log.warning("batch.lost", digest=self._digest, rows=len(run.rows), failure=failure.value)
        search = run.search
        if search is None:
            search = self._searches.begin(run.rows, run.width, run.cause, failure)
        else:
            search.after(failure)
        self._settle(search)

    def _settle(self, search: RowSearch) -> None:
        """End the rows that a search condemned, and the search when it is over."""
        for row, error in self._searches.take_condemned(search, self._clock.monotonic_s()):
            self._end(row, RowEnd(error=error, device_s=row.device_s), error.reason)
        if search.place is None:
            self._lose(self._searches.give_up(search))

    def _lose(self, rows: Sequence[LiveRow]) -> None:
        self._choice.take(rows)
        for row in rows:
            self._end(row, RowEnd(lost=True, device_s=row.device_s), "LOST")
        self._context.changed()

    def _end(self, row: LiveRow, end: RowEnd, reason: str) -> None:
        del self._live[row.number]
        row.end(structs.replace(end, stay_s=self._clock.monotonic_s() - row.accepted_s))
        self._context.charges.ended(row)
        if self._context.telemetry is not None:
            self._context.telemetry.ended(reason.lower())
