"""The rows of one version on this worker: admission, batches, answers, isolation of failures.

One batch at a time runs in the process that serves, and while tenants share it a second one between its
layers (``runs``). What the policy decides is in ``policy``; this module acts. All times are of one monotonic
clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, Protocol

import structlog
from msgspec import structs

from services.core.errors import DeadlineUnmeetable, FairwayError, InvalidInput, QueueFull
from services.core.fixed_cost.rows import RowEnd, RowSpec
from services.core.fixed_cost.tensors import TILES, tiles_of
from services.core.fleet import PoolSnapshot, TenantSlots
from services.core.poison.suspicion import LossCause
from services.ports.clock import Clock
from services.worker.batcher.arriving_rows import ArrivingRows
from services.worker.batcher.charges import RowCharges
from services.worker.batcher.condemned import CondemnedRows
from services.worker.batcher.policy.batch_key import BatchKey, BatchKeys
from services.worker.batcher.policy.cost_curve import CostCurve, CostPrior
from services.worker.batcher.policy.flush import (
    MOST_BATCH_BYTES,
    MOST_PADDED_TOKENS,
    BatchLimits,
    Device,
    Flush,
    FlushCause,
    Linger,
)
from services.worker.batcher.policy.isolation import RunFailure, RunPlace
from services.worker.batcher.policy.length_buckets import mixed_width
from services.worker.batcher.policy.linger import BatchObjective, window_of
from services.worker.batcher.policy.preemption import LongBatch
from services.worker.batcher.policy.turns import TURN_RATIO, TenantTurns
from services.worker.batcher.policy.waiting import (
    Tags,
    TooLate,
    TooManyRows,
    WaitingRow,
    WaitingRows,
    fitting,
    mean_width,
)
from services.worker.batcher.policy.window import Decided, DerivedWindow, Window, first_to_start
from services.worker.batcher.runs import BatchRun, BatchRuns
from services.worker.batcher.search import RowSearch
from services.worker.batcher.telemetry import BatcherTelemetry
from services.worker.engine_protocol import BatchRaised, BatchRan, RowModel
from services.worker.slots.engine_process import Crashed, EngineExit, RunningEngine
from services.worker.streams.live_row import LiveRow
from services.worker.streams.outbox import Outbox

log = structlog.get_logger()

SLOTS_PER_BATCH: Final = 4  # rows in flight, in full batches: one runs, others gather and travel
_LOOKS: Final = 8  # in vain, at most, for rows to run between the layers of one batch
_TRANSPORT_GAIN: Final = 0.02  # weight of a row in the mean
RESTART_S: Final = 30.0  # longest wait of rows for a process that starts again
SEARCH_RESTART_S: Final = 300.0  # of suspects: they would end a process of another worker too


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
        self._objective = BatchObjective()
        self._has_tokens = model.has_tokens
        self._length_of: Callable[[Sequence[int]], int] = itemgetter(0) if self._has_tokens else tiles_of
        self._arrivals = ArrivingRows(model.max_tokens, pads=self._has_tokens)
        self._waiting = WaitingRows()
        self._turns = TenantTurns()
        self._transport_s = 0.0  # of answers, a mean of what gateways observe
        self._live: dict[int, LiveRow] = {}
        self._keys = BatchKeys(version_digest, model.operation, model.dtype, has_length=self._has_tokens)
        self._searches: list[RowSearch] = []  # the oldest first
        self._condemned = CondemnedRows(version_digest)
        self._healthy_first = False  # the serving process ran suspects: rows that wait have their turn
        self._runs = BatchRuns(self.curve, self._clock)
        self._last_number = self._decision = 0
        self._detached_s = 0.0
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
        if spec.transport_s:
            self._transport_s += _TRANSPORT_GAIN * (spec.transport_s - self._transport_s)
        self._live[row.number] = row
        self._context.charges.began(row)
        if (error := self._admit(row, now_s)) is not None:
            self._end(row, RowEnd(error=error), error.reason)
        else:
            self._decide()

    def cancel(self, rows: Sequence[LiveRow]) -> None:
        """Drop the rows. Those in a batch stay until it ended, for it is charged to them."""
        for row in rows:
            row.dropped = True
        waiting = [row for row in rows if row.number in self._waiting]
        self._waiting.remove(row.number for row in waiting)
        for row in waiting:
            self._end(row, RowEnd(), "CANCELLED")

    def lease(self, slots: TenantSlots) -> None:
        self._turns.lease(slots)

    def sweep(self, now_s: float) -> None:
        """End rows whose deadline passes, and batches that hang."""
        for found in self._waiting.unmeetable(self.curve, now_s=now_s):
            self._waiting.remove((found.number,))
            late = DeadlineUnmeetable("the deadline passes before the row is computed")
            self._end(self._live[found.number], RowEnd(error=late), late.reason)
        self._runs.kill_hung(now_s)
        away_s = 0.0 if self.ready else now_s - self._detached_s
        if len(self._waiting) and away_s > RESTART_S:
            self._lose([self._live[number] for number in self._waiting.numbers()])
        for search in self._searches_in(RunPlace.SERVING) if away_s > SEARCH_RESTART_S else ():
            self._searches.remove(search)
            self._lose(search.unanswered())

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
        self._waiting.check_integrity()
        in_runs = {row.number for run in self._runs for row in run.rows}
        searched = {row.number for search in self._searches for row in search.unanswered()}
        placed = in_runs | searched | set(self._waiting.numbers())
        assert placed == set(self._live), "rows are in no batch, no search and not waiting"
        for row in self._live.values():
            assert row.dropped or row.outbox.rows.get(row.handle) is row, "its stream has no such row"

    # --- processes ------------------------------------------------------------------------------

    def attach(self, place: RunPlace, process: RunningEngine) -> None:
        """Run batches in this process from now on."""
        self._runs.processes[place] = process
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
        for search in self._searches_in(RunPlace.SACRIFICIAL):
            log.warning("search.not_apart", digest=self._digest, reason=reason)
            search.go_on_in_serving()
        self._proceed()

    def lose_all(self) -> None:
        """End every row as lost: no process will run."""
        self._runs.clear()
        self._searches.clear()
        self._lose(list(self._live.values()))

    # --- admission ------------------------------------------------------------------------------

    def _admit(self, row: LiveRow, now_s: float) -> FairwayError | None:
        """Let the row wait, or return why it cannot."""
        spec, most = row.spec, self._model.max_tokens
        if (condemned := self._condemned.find(spec.inputs, now_s)) is not None:
            return condemned
        if most:
            lengths = [self._length_of(tensor.shape) for tensor in spec.inputs if tensor.shape]
            row.length = max(lengths, default=0)
            if not 1 <= row.length <= most:
                unit = "tokens" if self._has_tokens else TILES
                return InvalidInput(f"the row has {row.length} {unit}; the model takes 1 to {most}")
            row.tokens = row.length if self._has_tokens else 0
        width = self._arrivals.note(row.length, now_s)
        target_s = spec.target_s or self._objective.latency_s
        answer_by_s = now_s + target_s - spec.waited_s
        self._turns.seen(spec.tenant_id, now_s)
        key = self._keys.of(spec.inputs)
        size = sum(len(tensor.data) for tensor in spec.inputs)
        waiting = WaitingRow(
            row.number, spec.tenant_id, key, width, now_s, answer_by_s, target_s, row.deadline_s, size
        )
        run = self._runs.serving
        busy_until_s = 0.0 if run is None else run.began_s + self.curve.mean_s(run.width, len(run.rows))
        added = self._waiting.add(
            waiting,
            self.curve,
            self.limits,
            now_s=now_s,
            busy_until_s=busy_until_s,
            transport_s=spec.transport_s / 2,  # the way back
        )
        match added:
            case TooManyRows(most_rows):
                return QueueFull(f"{most_rows} rows wait on this worker")
            case TooLate(predicted_s, left_s):
                return DeadlineUnmeetable(
                    f"the row would be answered in {predicted_s:.3f} s; the deadline is in {left_s:.3f} s"
                )
        return None

    # --- batches --------------------------------------------------------------------------------

    def _proceed(self) -> None:
        """Start what can start in either process."""
        running = [run.search for run in self._runs]
        for abandoned in [each for each in self._searches if each.place is None and each not in running]:
            self._settle(abandoned)
        self._decide()
        apart = self._searches_in(RunPlace.SACRIFICIAL)
        if not apart:
            self._context.sacrifice.stop()
        elif RunPlace.SACRIFICIAL not in self._runs.processes:
            self._context.sacrifice.start()
        elif RunPlace.SACRIFICIAL not in self._runs:
            self._search_on(apart[0])
        self._context.changed()

    def _decide(self) -> None:
        """Start a batch if the serving process is idle and waiting does not pay."""
        self._decision += 1
        if not self.ready:
            return
        if (running := self._runs.serving) is not None:
            self._preempt(running)
            return
        searches = self._searches_in(RunPlace.SERVING)
        if searches and not (searches[0].deadly and self._healthy_first and len(self._waiting)):
            self._healthy_first = searches[0].deadly
            self._search_on(searches[0])
            return
        now_s = self._clock.monotonic_s()
        shared = self._turns.are_shared(now_s)
        least_s = self._waiting.least_target_s(self._objective.latency_s) if shared else math.inf
        device = Device(
            self.curve,
            self.limits,
            self._objective.level,
            transport_s=self._transport_s,
            draining=self._context.draining(),
            turn_s=TURN_RATIO * least_s,
        )
        tags = self._turns.tags(self._waiting.by_due(), device.row_s) if shared else None
        chosen = first_to_start(self._decided(device, tags, now_s), self.curve, now_s)
        if chosen is None:
            return
        if isinstance(chosen.found, Linger):
            self._context.call_later(chosen.found.until_s - now_s, self._timer(self._decision))
        else:
            self._flush(chosen, chosen.found, tags, device)

    def _decided(self, device: Device, tags: Tags | None, now_s: float) -> Iterator[Decided]:
        """Yield the decision on each group, in their order.

        A model that packs computes rows of all widths together. While tenants share the device it does not:
        short rows would wait for long ones of others.
        """
        mixes = self._model.packs and tags is None
        groups = self._waiting.mixed_groups(mixed_width) if mixes else self._waiting.groups(tags)
        for key, group in groups:
            expected = self._arrivals.expected(None if group.mixed else group.width, now_s)
            found = self._context.window.decide(group, device, expected, now_s)
            if self._context.telemetry is not None:
                self._context.telemetry.decided(width=group.width, linger_s=found.bound.linger_s)
            yield Decided(key, group, found, expected)

    def _timer(self, decision: int) -> Callable[[], None]:
        def due() -> None:
            if decision == self._decision:  # a later decision makes it void
                self._decide()

        return due

    def _flush(self, decided: Decided, found: Flush, tags: Tags | None, device: Device) -> None:
        group = decided.group
        chosen = self._select(decided.key, None if group.mixed else group.width, found.rows, tags)
        count, cut = fitting(chosen, self.limits)
        chosen, cause = chosen[:count], cut or found.cause
        width = mixed_width(mean_width(chosen)) if group.mixed else group.width
        if group.mixed:  # neighbours of one length are computed together
            chosen.sort(key=lambda row: self._live[row.number].length)
        rows = self._taken(chosen, width)
        window = window_of(width, found.bound, decided.expected, group.target_s)
        most_rows = device.rows_of(group)[0] if cut is None else count
        self._healthy_first = False
        self._runs.start(RunPlace.SERVING, rows, width, cause.value, window=window, most_rows=most_rows)

    def _preempt(self, running: BatchRun) -> None:
        """Run rows of other tenants between the layers of a batch, the least tag first, if that pays."""
        now_s = self._clock.monotonic_s()
        if not self._model.pauses or self._runs.has_between or running.search is not None:
            return
        own = {row.spec.tenant_id for row in running.rows}
        if now_s < running.look_s or own.issuperset(self._waiting.tenants):
            return
        whole_s = self.curve.mean_s(running.width, len(running.rows))
        left_s = running.began_s + running.paused_s + whole_s - now_s
        long_batch = LongBatch(len(running.rows), whole_s, left_s, running.lent_s)
        if not long_batch.most_s:
            return
        device = Device(self.curve, self.limits)
        tags = self._turns.tags(self._waiting.by_due(), device.row_s)
        for key, group in self._waiting.groups(tags):
            most, _ = device.rows_at(group.width)
            found = self._select(key, group.width, most, tags, without=own)
            others = len(running.rows)
            rest, _ = fitting(found, self.limits, others=others, other_tokens=others * running.width)
            if count := long_batch.rows_between(self.curve, width=group.width, rows=rest):
                rows = self._taken(found[:count], group.width)
                self._runs.start_between(rows, group.width, FlushCause.BETWEEN.value)
                return
        running.look_s = now_s + whole_s / _LOOKS

    def _select(
        self, key: BatchKey, width: int | None, most: int, tags: Tags | None, without: Collection[str] = ()
    ) -> list[WaitingRow]:
        """See ``WaitingRows.select``."""
        running = Counter(row.spec.tenant_id for run in self._runs for row in run.rows)
        leases = self._turns.leases
        return self._waiting.select(
            key, width, most, leases=leases, running=running, tags=tags, without=without
        )

    def _taken(self, chosen: Sequence[WaitingRow], width: int) -> list[LiveRow]:
        """Remove rows that start from those that wait, and charge their tenants' turns."""
        rows = [self._live[row.number] for row in chosen]
        self._waiting.remove(row.number for row in rows)
        self._charge_turns(rows, width)
        return rows

    def _charge_turns(self, rows: Sequence[LiveRow], width: int) -> None:
        row_s = self.curve.mean_s(width, len(rows)) / len(rows)
        self._turns.started(Counter(row.spec.tenant_id for row in rows), row_s, self._clock.monotonic_s())

    def _searches_in(self, place: RunPlace) -> list[RowSearch]:
        return [search for search in self._searches if search.place is place]

    def _search_on(self, search: RowSearch) -> None:
        assert search.place is not None, "the search is over"
        if self._context.telemetry is not None:
            self._context.telemetry.searched(search.place.value)
        # A part of a mixed batch may have longer rows than the whole: its time limit is that of its own rows.
        width = search.width
        if self._model.packs:
            width = max(width, mixed_width(sum(row.length for row in search.rows) / len(search.rows)))
        if search.place is RunPlace.SERVING:
            self._charge_turns(search.rows, width)
        self._runs.start(search.place, search.rows, width, search.cause, search=search)

    def _answer(self, run: BatchRun, event: BatchRan, now_s: float) -> None:
        ran = [row for place, row in enumerate(run.rows) if place not in event.problems]
        elapsed_s = now_s - run.began_s - run.paused_s
        self._context.charges.ran(ran, event.run_s)
        if ran:
            self._measure(run, ran, event.run_s, elapsed_s, now_s)
        explained: set[str] = set()  # requests that have the window
        for place, row in enumerate(run.rows):
            wait_s = max(0.0, run.began_s - row.accepted_s)
            if (problem := event.problems.get(place)) is not None:
                self._end(row, RowEnd(error=InvalidInput(problem), wait_s=wait_s), InvalidInput.reason)
                continue
            if self._context.telemetry is not None:
                self._context.telemetry.answered(wait_s=wait_s, run_s=elapsed_s)
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
            self._arrivals.ended(rows, now_s)
        self._batches += 1
        self._batch_s += run_s
        each_s = run_s / rows
        self._row_s = each_s if not self._row_s else self._row_s + 0.1 * (each_s - self._row_s)
        if self._context.telemetry is not None:
            self._context.telemetry.ran(
                lengths=[row.length for row in ran],
                width=run.width if self._has_tokens and not self._model.packs else 0,
                most_rows=run.most_rows or self.limits.rows_at(run.width)[0],
                cause=run.cause,
            )

    # --- failures -------------------------------------------------------------------------------

    def _failed(self, run: BatchRun, failure: RunFailure) -> None:
        """Search the rows of a batch without answers, or go on with the search."""
        log.warning("batch.lost", digest=self._digest, rows=len(run.rows), failure=failure.value)
        search = run.search
        if search is None:
            search = RowSearch(run.rows, run.width, run.cause, failure)
            self._searches.append(search)
        else:
            search.after(failure)
        self._settle(search)

    def _settle(self, search: RowSearch) -> None:
        """End the rows that a search condemned, and the search when it is over."""
        for row, deaths in search.take_condemned():
            now_s = self._clock.monotonic_s()
            error = self._condemned.add(row.spec.inputs, search.failure, deaths, now_s)
            request_id, failure = row.spec.request_id, search.failure.value
            log.error("row.condemned", request_id=request_id, failure=failure, deaths=deaths)
            self._end(row, RowEnd(error=error, device_s=row.device_s), error.reason)
        if search.place is None:
            self._searches.remove(search)
            self._lose(search.unanswered())

    def _lose(self, rows: Sequence[LiveRow]) -> None:
        self._waiting.remove(row.number for row in rows)
        for row in rows:
            self._end(row, RowEnd(lost=True, device_s=row.device_s), "LOST")
        self._context.changed()

    def _end(self, row: LiveRow, end: RowEnd, reason: str) -> None:
        del self._live[row.number]
        row.end(structs.replace(end, stay_s=self._clock.monotonic_s() - row.accepted_s))
        self._context.charges.ended(row)
        if self._context.telemetry is not None:
            self._context.telemetry.ended(reason.lower())
