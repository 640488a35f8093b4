"""One term of leadership: the task that owns the fleet view and the queue.

Streams put commands into an inbox and are woken when they have something to send; only the task touches the
state. The task sleeps until a command arrives or the next deadline passes, takes all waiting commands, and
makes one pass over the changed versions, so the grants of one pass reach a gateway as one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import structlog

from services.core.errors import Conflict, FairwayError, OverQuota
from services.core.fleet import Granted, ReportSnapshot
from services.core.records import Priority
from services.ports.clock import Clock
from services.scheduler.explain.decision_log import DecisionLog
from services.scheduler.fleet.limits import FleetLimits
from services.scheduler.fleet.view import FleetView
from services.scheduler.health.review import HealthReview, ServingCount
from services.scheduler.health.worker_health import FleetHealth, HealthPolicy, WorkerStanding
from services.scheduler.heartbeat import MAX_LISTED, Fleet, members_of, sample_of
from services.scheduler.overload.pool_load import Overload
from services.scheduler.policy.overload.shedding import SheddingPolicy
from services.scheduler.policy.placement.choose import PlacementProfile
from services.scheduler.policy.queue.order import OrderPolicy
from services.scheduler.policy.step_time import StepModel, WorkerKind
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.pool import QueueLimits
from services.scheduler.queue.report import counter_gaps
from services.scheduler.queue.rules import PRODUCTION, QueueDiscipline
from services.scheduler.telemetry import CompositeObserver, SchedulerTelemetry
from services.scheduler.term_streams import (
    CancelPlacements,
    Command,
    GatewayDisconnected,
    GatewaySession,
    Report,
    SubmitPlacements,
    WorkerDisconnected,
    WorkerSession,
)

log = structlog.get_logger()

_COMMANDS_PER_PASS: Final = 1024
_MIN_SLEEP_S: Final = 0.001
_MEMBERS_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class TermSettings:
    fleet: FleetLimits = field(default_factory=FleetLimits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    order: OrderPolicy = field(default_factory=OrderPolicy)
    discipline: QueueDiscipline = PRODUCTION
    profile: PlacementProfile = field(default_factory=PlacementProfile)
    health: HealthPolicy = field(default_factory=HealthPolicy)
    shedding: SheddingPolicy = field(default_factory=SheddingPolicy)
    max_gateways: int = 1024
    beat_s: float = 1.0
    max_inbox: int = 65536


class Term:
    """The full state of one leader. Each epoch starts with a new term."""

    def __init__(
        self,
        epoch: int,
        settings: TermSettings,
        clock: Clock,
        rng: Random,
        *,
        telemetry: SchedulerTelemetry | None = None,
        decisions: DecisionLog | None = None,
    ) -> None:
        """``decisions`` outlives the term and records the decisions of this term from now on."""
        if decisions is None:
            decisions = DecisionLog(clock, settings.profile)
        decisions.term_started(epoch)
        self.decisions = decisions
        self._known_prefixes: dict[str, int] = {}
        # By worker: its incarnation, and the number of the last deltas applied.
        self._told: dict[str, tuple[int, int]] = {}
        self.epoch = epoch
        self.settings = settings
        self.fleet = FleetView(epoch, settings.fleet)
        serving = ServingCount(self.fleet)
        self.health = FleetHealth(settings.health, self._step_model)
        self.fleet.on_granted = self.health.granted
        self.overload = Overload(settings.shedding, rng, serving.of, failing_s=self.health.failing_s)
        self._decision = None if telemetry is None else telemetry.decision
        observed = decisions if telemetry is None else CompositeObserver(telemetry, decisions)
        self.queue = FlowQueue(
            self.fleet,
            settings.queue,
            settings.order,
            settings.profile,
            rng,
            discipline=settings.discipline,
            observer=observed,
            gate=self.overload,
            decisions=decisions,
        )
        self.overload.settle = self.queue.run_pass
        self._health_review = HealthReview(
            self.fleet, self.queue, self.health, self.overload, serving, telemetry=telemetry
        )
        self._clock = clock
        self._rng = rng
        self._beat_s = clock.monotonic_s() + settings.beat_s
        self._inbox: deque[Command] = deque()
        self._arrived = asyncio.Event()
        self._sessions: dict[int, GatewaySession] = {}
        self._reporters: dict[int, WorkerSession] = {}
        self._numbers = 0
        self._members: Fleet = {}
        self._members_until_s = -math.inf
        self._stepped_s = self._arrived_s = clock.monotonic_s()

    # --- levels -----------------------------------------------------------------------------------

    @property
    def workers_by_state(self) -> dict[str, int]:
        return self.fleet.workers_by_state

    @property
    def grants_outstanding(self) -> int:
        return self.fleet.outstanding

    @property
    def gateways(self) -> int:
        return len(self._sessions)

    @property
    def inbox(self) -> int:
        return len(self._inbox)

    @property
    def prefixes_by_worker(self) -> Mapping[str, int]:
        """Number of prefix blocks that each worker reported."""
        return self._known_prefixes

    @property
    def pressure_by_model(self) -> dict[str, float]:
        return self.overload.pressure_by_model()

    @property
    def pools_out_by_state(self) -> dict[str, int]:
        return self.health.pools_by_state()

    @property
    def counter_gaps(self) -> dict[tuple[str, Priority], float]:
        """Spread of the counters of waiting tenants, by model and class."""
        return counter_gaps(self.queue)

    def worker_health(self) -> tuple[WorkerStanding, ...]:
        """Return the health of each pool of each worker that is judged."""
        return self.health.worker_health()

    @property
    def prompt_tokens(self) -> dict[str, int]:
        """Prompt tokens since the term began, by kind."""
        return self.fleet.prefix_tokens.by_kind()

    @property
    def indexed_blocks(self) -> int:
        return len(self.fleet.prefixes)

    def view_age_s(self) -> float:
        """Return the age of the oldest last report of a connected worker; 0 without workers."""
        return self.fleet.view_age_s(self._clock.monotonic_s())

    def stalled_s(self) -> float:
        """Return how long commands have waited for a turn of the owner; 0 while none wait."""
        if not self._inbox:
            return 0.0
        return self._clock.monotonic_s() - max(self._stepped_s, self._arrived_s)

    # --- for the streams --------------------------------------------------------------------------

    def open_session(self, gateway_id: str, wake: Callable[[], None], *, zone: str = "") -> GatewaySession:
        """Return a new session; an earlier one of the same gateway is ended. Raises OverQuota."""
        for old in [found for found in self._sessions.values() if found.gateway_id == gateway_id]:
            old.end(Conflict("this gateway opened another stream", gateway_id=gateway_id))
            self._leave(old)
        if len(self._sessions) >= self.settings.max_gateways:
            raise OverQuota(f"{len(self._sessions)} gateways are connected, which is the limit")
        self._numbers += 1
        session = GatewaySession(self._numbers, wake, gateway_id, zone)
        self._sessions[session.number] = session
        if members := sample_of(self._members_now(), self._rng):
            session.members, session.told_s = members, self._clock.monotonic_s()
            wake()
        log.info("scheduler.gateway_connected", gateway_id=gateway_id, epoch=self.epoch)
        return session

    def close_session(self, session: GatewaySession) -> None:
        """Withdraw the placements of the session. Idempotent."""
        if not session.closed:
            session.closed = True
            self._leave(session)

    def open_reporter(self, wake: Callable[[], None]) -> WorkerSession:
        """Return a worker's stream. Later streams have larger numbers."""
        if len(self._reporters) >= 2 * self.settings.fleet.max_workers:
            raise OverQuota(f"{len(self._reporters)} workers are connected, which is the limit")
        self._numbers += 1
        reporter = WorkerSession(self._numbers, wake)
        self._reporters[reporter.number] = reporter
        return reporter

    def close_reporter(self, reporter: WorkerSession) -> None:
        """Stop placements on its worker. Idempotent."""
        if not reporter.closed:
            reporter.closed = True
            self._reporters.pop(reporter.number, None)
            self._put(WorkerDisconnected(reporter))

    def send(self, command: SubmitPlacements | CancelPlacements | Report) -> None:
        """Queue a command. Raises OverQuota when the inbox is full."""
        if len(self._inbox) >= self.settings.max_inbox:
            raise OverQuota("the scheduler is behind with its work", retry_after_s=1.0)
        self._put(command)

    def end(self, error: FairwayError) -> None:
        """End every stream with this error; the term is over."""
        for session in list(self._sessions.values()):
            session.end(error)
        for reporter in list(self._reporters.values()):
            reporter.end(error)

    # --- the owner --------------------------------------------------------------------------------

    async def run(self, leads: Callable[[], bool]) -> None:
        """Own the state until cancelled or until ``leads`` returns False; it is called before every pass."""
        while True:
            await self._wait()
            if not leads():
                return
            began_s = self._clock.monotonic_s()
            self.step()
            self._stepped_s = now_s = self._clock.monotonic_s()
            if self._decision is not None:
                self._decision.observe(now_s - began_s)

    def step(self) -> None:
        """Run one turn of the owner: apply commands, expire, grant, deliver."""
        now_s = self._clock.monotonic_s()
        for _ in range(min(len(self._inbox), _COMMANDS_PER_PASS)):
            self._apply(self._inbox.popleft(), now_s)
        self.queue.touch(self.fleet.expire(now_s))
        if now_s >= self.health.due_s():
            self._health_review.run(now_s)
        self.queue.run_pass(now_s)
        self.queue.expire(now_s)
        self.queue.run_pass(now_s)  # expired placements may have blocked others
        self._deliver(now_s)
        if now_s >= self._beat_s:
            self._beat(now_s)

    def check_integrity(self) -> None:
        self.fleet.check_integrity()
        self.queue.check_integrity()

    # --- inside -----------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Return when there is a command or a deadline has passed."""
        if self._inbox:
            await self._clock.sleep(0)  # let the streams run
            return
        self._arrived.clear()
        beat_s = self._beat_s if self._sessions else math.inf
        waiting_s = self.queue.waiting.next_deadline_s()
        due_s = min(self.fleet.next_deadline_s(), waiting_s, self.health.due_s(), beat_s)
        if due_s == math.inf:
            await self._arrived.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(_MIN_SLEEP_S, due_s - self._clock.monotonic_s())):
                await self._arrived.wait()

    def _put(self, command: Command) -> None:
        if not self._inbox:
            self._arrived_s = self._clock.monotonic_s()
        self._inbox.append(command)
        self._arrived.set()

    def _members_now(self) -> Fleet:
        """Return the workers for fallback placement, cached for a short time: many gateways connect to a new
        leader at once, and reading the whole fleet for each would delay it."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._members_until_s:
            self._members, self._members_until_s = members_of(self.fleet), now_s + _MEMBERS_S
        return self._members

    def _leave(self, session: GatewaySession) -> None:
        if self._sessions.pop(session.number, None) is not None:
            unsent = [found.placement_id for found in session.outbox if isinstance(found, Granted)]
            session.outbox.clear()
            self._put(GatewayDisconnected(session, unsent))
            log.info("scheduler.gateway_disconnected", gateway_id=session.gateway_id, epoch=self.epoch)

    def _apply(self, command: Command, now_s: float) -> None:
        match command:
            case SubmitPlacements(session, places):
                if session.number in self._sessions:
                    for placement_id, spec, arrival_unix_us in places:
                        if spec.excluded_workers:
                            self.health.resubmitted(spec, now_s)
                        self.queue.submit(
                            session.number, placement_id, spec, arrival_unix_us, now_s, zone=session.zone
                        )
                        for victim, error in self.overload.take_victims():
                            self.queue.evict(victim, error, now_s)
            case CancelPlacements(session, placement_ids):
                for placement_id in placement_ids:
                    self.queue.cancel(session.number, placement_id, now_s)
            case GatewayDisconnected(session, unsent):
                for placement_id in unsent:
                    self.queue.cancel(session.number, placement_id, now_s)
                self.queue.withdraw_all(session.number, now_s)
            case Report(reporter, number, snapshot):
                self._report(reporter, number, snapshot, now_s)
            case WorkerDisconnected(reporter):
                changed = self.fleet.close_stream(reporter.number)
                self.queue.touch(changed)
                if changed:
                    self.health.disconnected(reporter.worker_id, now_s)
                if reporter.worker_id:
                    log.info("scheduler.worker_disconnected", worker_id=reporter.worker_id, epoch=self.epoch)

    def _report(self, reporter: WorkerSession, number: int, snapshot: ReportSnapshot, now_s: float) -> None:
        if reporter.closed or reporter.error is not None:
            return
        snapshot = self._without_known(snapshot)
        try:
            changed = self.fleet.apply(reporter.number, snapshot, now_s)
        except FairwayError as error:
            reporter.end(error)
            return
        self._note_told(snapshot)
        if not reporter.worker_id:
            reporter.worker_id = snapshot.worker_id
            self.decisions.found_running(snapshot.worker_id, snapshot.live)
            self._known_prefixes.pop(snapshot.worker_id, None)
            log.info(
                "scheduler.worker_connected",
                worker_id=snapshot.worker_id,
                incarnation=snapshot.incarnation,
                epoch=self.epoch,
                live=len(snapshot.live),
            )
        self.decisions.found_ended(snapshot.worker_id, snapshot.usage)
        self.health.reported(snapshot, now_s)
        self.overload.worked(snapshot.tenants, now_s)
        for counter in self.queue.reported(snapshot):
            reporter.counters[counter.tenant, counter.digest, counter.priority] = counter
        self._count_prefixes(snapshot)
        self.queue.touch(changed)
        reporter.applied = number
        reporter.wake()

    def _without_known(self, snapshot: ReportSnapshot) -> ReportSnapshot:
        """Return the report without deltas that were applied before: the answer to that report was lost."""
        life, number = self._told.get(snapshot.worker_id, (0, 0))
        if life == snapshot.incarnation and 0 < snapshot.deltas_number <= number:
            return replace(snapshot, tenants=(), usage=())
        return snapshot

    def _note_told(self, snapshot: ReportSnapshot) -> None:
        life, number = self._told.pop(snapshot.worker_id, (0, 0))
        number = number if life == snapshot.incarnation else 0
        self._told[snapshot.worker_id] = snapshot.incarnation, max(number, snapshot.deltas_number)
        if len(self._told) > 2 * self.settings.fleet.max_workers:
            del self._told[next(iter(self._told))]

    def _count_prefixes(self, snapshot: ReportSnapshot) -> None:
        known = self._known_prefixes.get(snapshot.worker_id, 0)
        known += sum(len(pool.prefix_added) - len(pool.prefix_removed) for pool in snapshot.pools)
        self._known_prefixes[snapshot.worker_id] = max(0, known)
        while len(self._known_prefixes) > 2 * self.settings.fleet.max_workers:
            del self._known_prefixes[next(iter(self._known_prefixes))]

    def _beat(self, now_s: float) -> None:
        """Send every gateway the pressures of the pools, and the worker list to the gateways with the oldest
        lists: to all, unless they are many. Before the first worker reports, no list is sent."""
        self._beat_s = now_s + self.settings.beat_s
        pressures = self.overload.pressures()
        fleet = self._members_now() if self._sessions else {}
        left = MAX_LISTED
        for session in sorted(self._sessions.values(), key=lambda found: found.told_s):
            session.pressures = pressures
            if left > 0 and (members := sample_of(fleet, self._rng)):
                session.members, session.told_s = members, now_s
                left -= len(members)
            session.wake()

    def _step_model(self, digest: str, device_type: str) -> StepModel:
        return self.fleet.step_times.model(WorkerKind(device_type, digest))

    def _deliver(self, now_s: float) -> None:
        for number, outcome in self.queue.take_outcomes():
            session = self._sessions.get(number)
            if session is None:
                # Its stream ended meanwhile: the gateway did not receive the grant.
                if isinstance(outcome, Granted):
                    self.queue.cancel(number, outcome.placement_id, now_s)
                continue
            if not session.outbox:
                session.wake()
            session.outbox.append(outcome)
