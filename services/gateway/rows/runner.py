"""Runs rows of fixed-cost models on leased slots, without a call to the scheduler for each.

A request's rows wait in a local queue. Each starts as soon as a leased slot of its version and tenant is
free, on the worker whose slots are used least. What waits or runs is the demand; the leader answers it
with leases (``leases``).

A lost row runs once more, on another worker if one takes it soon: a forward pass has no effect but its
outputs. One that was not admitted never ran, and waits again. While no leader answers, rows start on a part
of the slots of the workers in the last list.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import structlog
from msgspec.structs import replace

from services.core.errors import (
    DeadlineUnmeetable,
    FairwayError,
    InternalError,
    IsolationUnavailable,
    NoWorkerAvailable,
    Overloaded,
    QueueFull,
    QueueTimeout,
    ShareExceeded,
    StaleRoute,
    StreamBroken,
    retry_in,
)
from services.core.estimates.sketch import Sketch
from services.core.fixed_cost.explained import MAX_TRIPS, RowsExplanation, RowTrip
from services.core.fixed_cost.rows import RowEnd, RowSpec, RowsRequest
from services.core.fixed_cost.slots import SlotRefusal
from services.core.generation import NotAdmittedReason
from services.core.limits import share_of
from services.core.records import Priority
from services.gateway.catalog import Waking
from services.gateway.policy.retry import EXCLUDED_S
from services.gateway.rows.leases import RISE_S, GatewayLeases, SlotDemands, SlotsHere
from services.gateway.rows.row_queue import NewRows, QueuedRow, RowQueue, late_answer_s, order_of
from services.ports.clock import Clock
from services.ports.rows import SlotClient
from services.ports.worker import RowClient, RunningRow
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

_TURN_S: Final = 0.02
_SHED_RETRY_S: Final = 2.0
_EXPIRE_S: Final = 0.1  # between two looks for rows that have waited for too long
_MOST_EXPLAINED: Final = 4096  # requests
_TRANSPORT_LEVEL: Final = 0.99
_WINDOW: Final = 512.0  # rows of a worker, after which they weigh half
_REFRESH: Final = 32  # rows after which the level is computed again
_MOST_WORKERS: Final = 4096  # the least recently used goes first


class RowExplanations:
    """How the newest requests ran, by id, for operators: each as it ran last."""

    def __init__(self, max_requests: int = _MOST_EXPLAINED) -> None:
        self._most = max_requests
        self._found: OrderedDict[str, RowsExplanation] = OrderedDict()

    def add(self, request_id: str, found: RowsExplanation) -> None:
        self._found[request_id] = found
        self._found.move_to_end(request_id)
        if len(self._found) > self._most:
            self._found.popitem(last=False)

    def find(self, request_id: str) -> RowsExplanation | None:
        return self._found.get(request_id)


@dataclass(slots=True)
class _Observed:
    seconds: Sketch = field(default_factory=lambda: Sketch(error_ratio=0.05, floor=1e-6, max_buckets=64))
    level_s: float = 0.0
    unrefreshed: int = 0


class WorkerTransport:
    """The time of rows between this gateway and each worker, both ways, which batches leave to them."""

    def __init__(self) -> None:
        self._workers: dict[str, _Observed] = {}

    def note(self, worker_id: str, seconds: float) -> None:
        """Count a row that took ``seconds`` longer here than its stay on the worker."""
        found = self._workers.pop(worker_id, None) or _Observed()
        while len(self._workers) >= _MOST_WORKERS:
            del self._workers[next(iter(self._workers))]
        self._workers[worker_id] = found
        found.seconds.add(max(1e-6, seconds))
        found.unrefreshed += 1
        if found.unrefreshed >= _REFRESH:
            found.unrefreshed = 0
            found.level_s = found.seconds.quantile(_TRANSPORT_LEVEL) or 0.0
            if found.seconds.count > _WINDOW:
                found.seconds.keep(0.5)

    def level_s(self, worker_id: str) -> float:
        """Return the seconds that 99 of 100 rows stay within; 0 while too few were seen."""
        found = self._workers.get(worker_id)
        return 0.0 if found is None else found.level_s


@dataclass(frozen=True, slots=True)
class RowLimits:
    """``max_rows``: waiting and in flight. ``queue_ttl_s``: the longest wait for a slot."""

    max_rows: int = 16384
    queue_ttl_s: float = 30.0


@dataclass(slots=True, eq=False)
class _Run:
    """One call of ``run``."""

    rows: list[QueuedRow]
    ends: list[RowEnd | None]
    left: int
    done: asyncio.Future[None]
    sinks: dict[int, _InFlight] = field(default_factory=dict)  # by row
    trips: list[RowTrip] = field(default_factory=list)  # of the first rows

    def note(self, sink: _InFlight, end: RowEnd, now_s: float) -> None:
        """Keep how a row ran, of the first ones."""
        if len(self.trips) >= MAX_TRIPS:
            return
        lease = sink.slots.lease
        outcome = "LOST" if end.lost else "ANSWERED" if end.error is None else end.error.reason
        self.trips.append(
            RowTrip(
                row=sink.row.row,
                worker_id=lease.worker_id,
                epoch=lease.epoch,
                lease_number=lease.number,
                lease_slots=lease.slots,
                slot_wait_s=sink.started_s - sink.row.queued_s,
                stay_s=now_s - sink.started_s,
                batch_wait_s=end.wait_s,
                batch_rows=end.batch_rows,
                batch_cause=end.batch_cause,
                window=end.window,
                outcome=outcome,
            )
        )


class LeasedRows:
    """Implements ``ports.rows.RowRunner``. Rows are bounded; ``close`` ends what is left."""

    def __init__(
        self,
        workers: RowClient,
        slots: SlotClient,
        leases: GatewayLeases,
        clock: Clock,
        supervisor: Supervisor,
        limits: RowLimits | None = None,
        *,
        waking: Callable[[str], Waking | None] = lambda _model: None,
        explanations: RowExplanations | None = None,
    ) -> None:
        """``leases`` is the listener of ``slots``; ``waking`` returns how rows of a model wait for its first
        replica; ``explanations`` receives how requests ran.
        """
        self._waking = waking
        self._workers = workers
        self._slots = slots
        self._leases = leases
        self._clock = clock
        self._supervisor = supervisor
        self._limits = limits if limits is not None else RowLimits()
        self._explanations = explanations if explanations is not None else RowExplanations()
        self._queues: defaultdict[str, RowQueue] = defaultdict(RowQueue)
        self._demands = SlotDemands(slots, clock)
        self._runs: dict[QueuedRow, _Run] = {}
        self._of_tenant: Counter[str] = Counter()
        self._of_class: dict[Priority, dict[_Run, None]] = {each: {} for each in Priority}  # the oldest first
        self._transport = WorkerTransport()
        self._numbers = 0
        self._expire_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def rows(self) -> int:
        """Rows that wait or are in flight."""
        return len(self._runs)

    async def run(self, request: RowsRequest) -> tuple[RowEnd, ...]:
        """See ``ports.rows.RowRunner.run``."""
        if self._task is None:
            self._task = self._supervisor.spawn("rows.turns", self._turns(), shared=True)
        if not request.rows:
            return ()
        self._check_deadline(request)
        self._make_room(request)
        run = self._enter(request)
        self._start_rows(request.version_digest, request.tenant_id)
        try:
            await run.done
        finally:
            self._withdraw(run)
            self._explain(request, run)
            if run.done.done() and not run.done.cancelled():
                run.done.exception()  # it was retrieved, whoever cancelled meanwhile
        return tuple(end for end in run.ends if end is not None)

    async def close(self) -> None:
        """Stop; rows that are left end with StreamBroken."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,), timeout=5.0)
        for run in list(self._runs.values()):
            _fail(run, StreamBroken("the gateway is stopping", retry_after_s=1.0))

    # --- requests ---------------------------------------------------------------------------------

    def _make_room(self, request: RowsRequest) -> None:
        """Shed rows of lower classes where there is no room, or raise and shed none."""
        rows, most = len(request.rows), self._limits.max_rows
        lacking = self._of_tenant[request.tenant_id] + rows - share_of(most)
        victims = self._victims(request, lacking, (request.tenant_id,), [])
        if victims is None:
            raise ShareExceeded(
                f"more than {share_of(most)} rows of this tenant would be pending at this gateway; "
                f"{retry_in(1.0)}",
                retry_after_s=1.0,
                limit=share_of(most),
            )
        lacking = len(self._runs) + rows - most - sum(run.left for run in victims)
        victims = self._victims(request, lacking, tuple(self._of_tenant), victims)
        if victims is None:
            text = f"this gateway's queue is full: {len(self._runs)} rows are pending; {retry_in(1.0)}"
            raise QueueFull(text, retry_after_s=1.0)
        for run in victims:
            self._withdraw(run)
            shed = f"rows of the class {request.priority.value} need the room of this request"
            _fail(run, Overloaded(shed, retry_after_s=_SHED_RETRY_S))

    def _victims(
        self, request: RowsRequest, rows: int, tenants: Collection[str], victims: list[_Run]
    ) -> list[_Run] | None:
        """Return the victims and requests of lower classes of these tenants with at least so many more rows.

        As the scheduler sheds placements: the lowest class first, of a class the newest request. None where
        there are too few.
        """
        victims, chosen = [*victims], set(map(id, victims))
        for priority in sorted(Priority, key=lambda each: each.rank):
            if priority.rank >= request.priority.rank:
                break
            for run in reversed(self._of_class[priority]):
                if rows <= 0:
                    break
                if run.rows[0].request.tenant_id in tenants and id(run) not in chosen:
                    victims.append(run)
                    rows -= run.left
        return None if rows > 0 else victims

    def _check_deadline(self, request: RowsRequest) -> None:
        """Raise DeadlineUnmeetable if the rows ahead take longer than the request has."""
        queue, tenant = self._queues.get(request.version_digest), request.tenant_id
        if queue is None or (rate := queue.rate(tenant)) is None or queue.first(tenant) is None:
            return
        now_s = self._clock.monotonic_s()
        new = NewRows(len(request.rows), request.priority, request.deadline_s - now_s)
        ahead = queue.ahead(tenant, order_of(request, self._numbers), now_s)
        answer_s = late_answer_s(new, ahead, rate, now_s)
        if answer_s is not None:
            raise DeadlineUnmeetable(
                f"{ahead.rows} rows are ahead: the answer would take about {answer_s:.3g} s; "
                f"the deadline is in {new.left_s:.3g} s",
                retry_after_s=min(self._limits.queue_ttl_s, max(1.0, answer_s - new.left_s)),
            )

    def _enter(self, request: RowsRequest) -> _Run:
        now_s = self._clock.monotonic_s()
        waking, longest_s = self._waking(request.model), self._limits.queue_ttl_s
        if waking is not None:
            longest_s = max(longest_s, waking.hold_s)
        until_s = min(request.deadline_s, now_s + longest_s)
        rows = [
            QueuedRow(request, row, self._numbers + row, now_s, until_s) for row in range(len(request.rows))
        ]
        self._numbers += len(rows)
        run = _Run(rows, [None] * len(rows), len(rows), asyncio.get_running_loop().create_future())
        queue = self._queues[request.version_digest]
        rests, rose = not len(self._demands), self._demands.rises
        self._demands.enter(request)
        if rests or (self._demands.rises and not rose):
            self._leases.changed.set()  # the turns are at rest, or the next one would come late
        self._of_tenant[request.tenant_id] += len(rows)
        self._of_class[request.priority][run] = None
        for row in rows:
            self._runs[row] = run
            queue.push(row)
        return run

    def _withdraw(self, run: _Run) -> None:
        """End the rows that have not ended: those that wait, and at their worker those in no batch.

        Idempotent.
        """
        self._of_class[run.rows[0].request.priority].pop(run, None)
        for row in run.rows:
            if (sink := run.sinks.pop(row.row, None)) is not None:
                sink.running.cancel()
                self._leases.ended(sink.slots)
            if not row.over:
                self._leave(row)

    def _explain(self, request: RowsRequest, run: _Run) -> None:
        took_s = self._clock.monotonic_s() - run.rows[0].queued_s
        found = RowsExplanation(
            tenant=request.tenant_id,
            model=request.model,
            version_digest=request.version_digest,
            priority=request.priority,
            queued_unix_s=self._clock.unix_s() - took_s,
            rows=len(run.rows),
            took_s=took_s,
            trips=tuple(run.trips),
            target_s=request.target_s,
        )
        self._explanations.add(request.request_id, found)

    def _leave(self, row: QueuedRow) -> None:
        row.over = True
        del self._runs[row]
        self._demands.leave(row.request)
        tenant = row.request.tenant_id
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    # --- rows -------------------------------------------------------------------------------------

    def _start_rows(self, digest: str, tenant: str) -> None:
        """Start the tenant's rows in order while it has free slots."""
        queue = self._queues.get(digest)
        while queue is not None and (row := queue.first(tenant)) is not None:
            slots = self._leases.choose(digest, tenant, row.excluded)
            if slots is None:
                return
            queue.pop(tenant)
            self._start(row, slots)

    def _start_alone(self, digest: str, queue: RowQueue) -> None:
        """Start rows without a leader, in the turns of their tenants."""
        started = True
        while started:
            started = False
            for tenant in queue.by_turn():
                row = queue.first(tenant)
                if row is None:
                    continue
                slots = self._leases.choose_alone(digest, row.request.node_group, row.excluded)
                if slots is None:
                    continue
                queue.pop(tenant)
                queue.turns.started({tenant: 1 / row.request.tenant_weight})
                self._start(row, slots)
                started = True
                break

    def _start(self, row: QueuedRow, slots: SlotsHere) -> None:
        request, lease = row.request, slots.lease
        now_s = self._clock.monotonic_s()
        time_left_s = request.deadline_s - now_s
        spec = RowSpec(
            request_id=request.request_id,
            row=row.row,
            tenant_id=request.tenant_id,
            version_digest=request.version_digest,
            inputs=request.rows[row.row],
            priority=request.priority,
            route_revision=request.route_revision,
            incarnation=lease.incarnation,
            epoch=lease.epoch,
            time_left_s=0.0 if time_left_s == float("inf") else max(0.001, time_left_s),
            traceparent=request.traceparent,
            transport_s=self._transport.level_s(lease.worker_id),
            target_s=request.target_s,
            waited_s=now_s - request.received_s if request.target_s else 0.0,
            tenant_weight=request.tenant_weight,
            node_group=request.node_group,
        )
        sink = _InFlight(self, row, slots, now_s)
        self._leases.started(slots)
        self._runs[row].sinks[row.row] = sink
        sink.running = self._workers.start_row(lease.address, spec, sink)

    def ended(self, sink: _InFlight, end: RowEnd) -> None:
        """Store the end of a row; a lost one runs once more."""
        row, worker_id = sink.row, sink.slots.lease.worker_id
        now_s = self._clock.monotonic_s()
        self._runs[row].note(sink, end, now_s)
        if end.stay_s:
            self._transport.note(worker_id, now_s - sink.started_s - end.stay_s)
        self._landed(sink)
        if not end.lost:
            self._count(sink, now_s)
            self._settle(row, replace(end, worker_id=worker_id))
        elif row.lost_on:
            text = f"the row was lost on {row.lost_on} and on {worker_id}"
            error = StreamBroken(text, retry_after_s=1.0)
            self._settle(row, RowEnd(error=error))
        else:
            row.lost_on, row.lost_s, row.excluded = worker_id, self._clock.monotonic_s(), (worker_id,)
            self._queues[row.request.version_digest].push(row)
        self._start_rows(row.request.version_digest, row.request.tenant_id)
        queue = self._queues.get(row.request.version_digest)
        if queue is not None and self._leases.is_alone:
            self._start_alone(row.request.version_digest, queue)

    def refused(self, sink: _InFlight, reason: NotAdmittedReason) -> None:
        """Queue a row that its worker did not admit again, unless it can never start."""
        row = sink.row
        self._landed(sink, reason)
        if reason is NotAdmittedReason.STALE_ROUTE:
            text = f"{row.request.model} withdrew version {row.request.version_digest}; send it again"
            _fail(self._runs[row], StaleRoute(text, retry_after_s=1.0, model=row.request.model))
        elif reason is NotAdmittedReason.INVALID:
            worker_id = sink.slots.lease.worker_id
            _fail(self._runs[row], InternalError(f"{worker_id} took the row for out of bounds"))
        else:
            self._queues[row.request.version_digest].push(row)

    def _count(self, sink: _InFlight, now_s: float) -> None:
        """Count an end for the predictions of those that wait."""
        request = sink.row.request
        queue = self._queues.get(request.version_digest)
        if queue is not None and (rate := queue.rate(request.tenant_id)) is not None:
            rate.ended(request.priority, now_s - sink.started_s, now_s)

    def _landed(self, sink: _InFlight, refusal: NotAdmittedReason | None = None) -> None:
        del self._runs[sink.row].sinks[sink.row.row]
        self._leases.ended(sink.slots, refusal)

    def _settle(self, row: QueuedRow, end: RowEnd) -> None:
        run = self._runs[row]
        self._leave(row)
        run.ends[row.row] = end
        run.left -= 1
        if not run.left and not run.done.done():
            run.done.set_result(None)

    # --- turns ------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        """Start what new leases allow, send demands and returns, and end what has waited for too long."""
        while True:
            turn_s = RISE_S if self._demands.rises else _TURN_S if len(self._demands) else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(turn_s):
                    await self._leases.changed.wait()
            self._leases.changed.clear()
            self._turn(self._clock.monotonic_s())

    def _turn(self, now_s: float) -> None:
        expires = now_s >= self._expire_s
        for refused in self._leases.take_refused():
            self._refuse(refused)
        for digest, queue in list(self._queues.items()):
            for tenant in queue.tenants:
                self._start_rows(digest, tenant)
            if self._leases.is_alone:
                self._start_alone(digest, queue)
            if expires:
                self._expire(queue.rows(), now_s)
            if not queue.tenants:
                del self._queues[digest]
        if expires:
            self._expire_s = now_s + _EXPIRE_S
            self._leases.sweep()
        for found in self._leases.take_returns():
            self._slots.slots_returned(found)
        self._demands.send_due()

    def _refuse(self, refused: SlotRefusal) -> None:
        """Give up the tenant's rows that are not to wait for a node of its group."""
        queue = self._queues.get(refused.digest)
        for row in () if queue is None else queue.rows():
            request = row.request
            if request.tenant_id != refused.tenant:
                continue
            row.lacks_node = True
            if not request.isolation_waits:
                self._give_up(row, IsolationUnavailable.of(request.model, request.node_group))

    def _give_up(self, row: QueuedRow, error: FairwayError) -> None:
        """End a row that waits. A lost one ends alone: others of its request may be answered."""
        if row.over:
            return
        if row.lost_on:
            self._settle(row, RowEnd(error=error))
        else:
            _fail(self._runs[row], error)

    def _expire(self, rows: Iterable[QueuedRow], now_s: float) -> None:
        for row in rows:
            if row.excluded and now_s - row.lost_s > EXCLUDED_S:
                row.excluded = ()  # its worker may be the only one
            if (error := self._overdue(row, now_s)) is not None:
                self._give_up(row, error)

    def _overdue(self, row: QueuedRow, now_s: float) -> FairwayError | None:
        """Return why a row that waits is given up, None while it is not."""
        request = row.request
        late = now_s >= request.deadline_s
        if not late and now_s <= row.until_s:
            waking = self._waking(request.model)
            return None if waking is None else waking.failure
        if row.lacks_node and not self._leases.has_lease(request.version_digest, request.tenant_id):
            return IsolationUnavailable.of(request.model, request.node_group)
        if late:
            return DeadlineUnmeetable("no slot was free before the deadline", retry_after_s=1.0)
        within = f"within {row.until_s - row.queued_s:g} s"
        if not self._leases.is_served(request.version_digest):
            text = f"no worker served {request.model} {within}"
            return NoWorkerAvailable(text, retry_after_s=1.0, model=request.model)
        text = f"no slot of {request.model} was free {within}; {retry_in(1.0)}"
        return QueueTimeout(text, retry_after_s=1.0, model=request.model)


class _InFlight:
    """Implements ``ports.worker.RowSink`` for one row on one worker."""

    __slots__ = ("_runner", "row", "running", "slots", "started_s")

    running: RunningRow

    def __init__(self, runner: LeasedRows, row: QueuedRow, slots: SlotsHere, started_s: float) -> None:
        self._runner = runner
        self.row = row
        self.slots = slots
        self.started_s = started_s

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self._runner.refused(self, reason)

    def on_row_ended(self, end: RowEnd) -> None:
        self._runner.ended(self, end)

    def on_lost(self, message: str) -> None:
        self._runner.ended(self, RowEnd(lost=True))


def _fail(run: _Run, error: FairwayError) -> None:
    """End a request with an error; ``run`` withdraws its rows that are left."""
    if not run.done.done():
        run.done.set_exception(error)
