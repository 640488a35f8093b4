"""One term of leadership: the task that owns the fleet view and the queue.

Streams put commands into an inbox and are woken when they have something to send; only the task touches the
state. The task sleeps until a command arrives or the next deadline passes, takes all waiting commands, and
makes one pass over the changed versions, so the grants of one pass reach a gateway as one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

import structlog

from services.core.errors import FairwayError
from services.core.fixed_cost.slots import SlotDemand, SlotRefusal
from services.core.fleet import Granted, PoolMember, ReportSnapshot
from services.ports.clock import Clock
from services.scheduler.explain.decision_log import DecisionLog
from services.scheduler.fleet.roster import AppliedReports
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.health.worker_health import FleetHealth, HealthPolicy, Ticked
from services.scheduler.overload.pool_load import Overload
from services.scheduler.policy.overload.shedding import SheddingPolicy
from services.scheduler.policy.placement.choose import PlacementProfile
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.policy.step_time import StepTimes
from services.scheduler.queue.flow_queue import FlowQueue
from services.scheduler.queue.index import QueueLimits
from services.scheduler.queue.rules import PRODUCTION, QueueDiscipline
from services.scheduler.queue.waiting import CompositeObserver
from services.scheduler.slots.leases import LeaseTerms
from services.scheduler.slots.pools import SlotPools
from services.scheduler.telemetry import SchedulerTelemetry
from services.scheduler.term_streams import (
    CancelPlacements,
    Command,
    DemandSlots,
    GatewayDisconnected,
    GatewaySession,
    Report,
    StreamLimits,
    SubmitPlacements,
    TermStreams,
    WorkerDisconnected,
    WorkerSession,
)

log = structlog.get_logger()

_COMMANDS_PER_PASS: Final = 1024
_MAX_SHED: Final = 1024  # most placements of a version that one review sheds
_MEMBERS_S: Final = 0.25  # age up to which a read of the fleet is used again
PER_POOL: Final = 64
MAX_MEMBERS: Final = 1024  # most members of one frame, over all pools
MAX_LISTED: Final = 8192  # most members of one heartbeat, over all gateways: about 25 ms of the leader's core


class Members(NamedTuple):
    """The serving workers of a version in a node group: with room, and without room now."""

    roomy: list[PoolMember]
    full: list[PoolMember]


Fleet = Mapping[tuple[str, str], Members]


class LeaderHeartbeat:
    """Sends the pressures of the pools, and the worker list for fallback placement, to the gateways.

    It is sent once a second, or less often when gateways and pools are so many that it would take most of the
    leader's time. Each gateway gets a random sample, so that gateways in fallback do not all place on the
    same workers. Workers with room come first. Workers without room are included too: their sequences end
    while there is no leader, and a gateway can place only on workers in its list.
    """

    def __init__(
        self, fleet: FleetView, overload: Overload, clock: Clock, rng: Random, period_s: float
    ) -> None:
        self._fleet = fleet
        self._overload = overload
        self._clock = clock
        self._rng = rng
        self._period_s = period_s
        self._members: Fleet = {}
        self._members_until_s = -math.inf
        self.due_s = clock.monotonic_s() + period_s  # time of the next ``send``

    def greet(self, session: GatewaySession) -> None:
        """Send the worker list to a new session. Before the first worker reports, no list is sent."""
        if members := sample_of(self._members_now(), self._rng):
            session.members, session.listed_s = members, self._clock.monotonic_s()
            session.wake()

    def send(self, sessions: Collection[GatewaySession], now_s: float) -> None:
        """Send every gateway the pressures, and the worker list to the gateways with the oldest lists: to
        all, unless they are many."""
        self.due_s = now_s + self._period_s
        pressures = self._overload.pressures()
        fleet = self._members_now() if sessions else {}
        left = MAX_LISTED
        for session in sorted(sessions, key=lambda found: found.listed_s):
            session.pressures = pressures
            if left > 0 and (members := sample_of(fleet, self._rng)):
                session.members, session.listed_s = members, now_s
                left -= len(members)
            session.wake()

    def _members_now(self) -> Fleet:
        """Return the workers for fallback placement, cached for a short time: many gateways connect to a new
        leader at once, and reading the whole fleet for each would delay it."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._members_until_s:
            self._members, self._members_until_s = members_of(self._fleet), now_s + _MEMBERS_S
        return self._members


def members_of(fleet: FleetView) -> Fleet:
    """Return the serving workers by version and node group."""
    found: dict[tuple[str, str], Members] = {}
    for digest in fleet.versions[:MAX_MEMBERS]:
        for candidate in fleet.candidates(digest).values():
            if not candidate.serving:
                continue
            members = found.setdefault((digest, candidate.node_group), Members([], []))
            row_slots = fleet.pool_of(candidate.worker_id, digest).row_slots
            has_room = row_slots > 0 or (candidate.kv_tokens_room > 0 and candidate.slots > 0)
            address, incarnation = fleet.life_of(candidate.worker_id)
            (members.roomy if has_room else members.full).append(
                PoolMember(
                    worker_id=candidate.worker_id,
                    address=address,
                    incarnation=incarnation,
                    digest=digest,
                    kv_tokens_room=max(0, candidate.kv_tokens_room),
                    kv_tokens_total=candidate.kv_tokens_total,
                    block_size=candidate.block_size,
                    slots=max(0, candidate.slots),
                    max_model_len=candidate.max_model_len,
                    row_slots=row_slots,
                    node_group=candidate.node_group,
                )
            )
    return found


def sample_of(fleet: Fleet, rng: Random, *, per_pool: int = PER_POOL) -> tuple[PoolMember, ...]:
    """Return a sample of at most ``per_pool`` of each version, and ``MAX_MEMBERS`` in all."""
    per_pool = max(1, min(per_pool, MAX_MEMBERS // max(1, len(fleet))))
    found: list[PoolMember] = []
    for members in fleet.values():
        roomy = _some(members.roomy, per_pool, rng)
        found += roomy
        found += _some(members.full, per_pool - len(roomy), rng)
    return tuple(found)


def _some(members: list[PoolMember], most: int, rng: Random) -> list[PoolMember]:
    return rng.sample(members, most) if len(members) > most else members


class ServingCount:
    """How many workers of each version serve, as of the last review."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._counts: dict[str, int] = {}

    def of(self, digest: str) -> int:
        """Return the count of the last review, at most about a second old; the number of workers that report
        the version while none was found to serve."""
        return self._counts.get(digest, 0) or len(self._fleet.candidates(digest))

    def run(self) -> None:
        """Count again."""
        self._counts = {
            digest: sum(one.serving for one in self._fleet.candidates(digest).values())
            for digest in self._fleet.versions
        }


class HealthReview:
    """Bars slow and failing workers, readmits others, and sheds overdue placements, about once a second.

    ``health`` and ``overload`` decide; this applies their decisions to the fleet view and the queue, and logs
    them.
    """

    def __init__(
        self,
        fleet: FleetView,
        queue: FlowQueue,
        health: FleetHealth,
        overload: Overload,
        serving: ServingCount,
        *,
        telemetry: SchedulerTelemetry | None = None,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._health = health
        self._overload = overload
        self._serving = serving
        self._telemetry = telemetry

    def run(self, now_s: float) -> None:
        """Run one review."""
        found = self._health.tick(self._reachable_workers, now_s)
        for barring in found.barrings:
            if self._fleet.bar(barring.worker_id, barring.digest, barred=bool(barring.reason)):
                self._queue.touch((barring.digest,))
        self._shed_overdue(now_s)
        self._overload.keep(self._fleet.versions)
        self._serving.run()
        self._report(found)

    def _shed_overdue(self, now_s: float) -> None:
        """Refuse placements that can no longer be served in time."""
        for digest in self._overload.versions:
            for _ in range(_MAX_SHED):
                victim = self._overload.overdue(digest, now_s)
                if victim is None:
                    break
                self._queue.evict(*victim, now_s)

    def _report(self, found: Ticked) -> None:
        """Log and count each change."""
        for changed in found.ejections:
            log.warning(
                "worker.health_changed",
                worker_id=changed.change.worker_id,
                version_digest=changed.digest,
                state=changed.change.after.value,
                before=changed.change.before.value,
                slowness_ratio=round(changed.change.ratio, 2),
                why=changed.change.why,
            )
            if self._telemetry is not None:
                self._telemetry.health_changed("ejection", changed.change.after.value)
        for change in found.circuits:
            log.warning("circuit.changed", kind=change.kind, name=change.name, state=change.state.value)
            if self._telemetry is not None:
                self._telemetry.health_changed(f"{change.kind}_circuit", change.state.value)

    def _reachable_workers(self, digest: str) -> list[str]:
        """Return the workers that serve or would serve if they were not barred."""
        return [
            worker_id
            for worker_id, found in self._fleet.candidates(digest).items()
            if found.ready and found.reporting and not found.draining
        ]


@dataclass(frozen=True, slots=True)
class TermSettings:
    fleet: FleetLimits = field(default_factory=FleetLimits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    order: OrderPolicy = field(default_factory=OrderPolicy)
    discipline: QueueDiscipline = PRODUCTION
    profile: PlacementProfile = field(default_factory=PlacementProfile)
    health: HealthPolicy = field(default_factory=HealthPolicy)
    shedding: SheddingPolicy = field(default_factory=SheddingPolicy)
    leases: LeaseTerms = field(default_factory=LeaseTerms)
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
        self.epoch = epoch
        self.settings = settings
        step_times = StepTimes()
        self.health = FleetHealth(settings.health, step_times.model)
        self.fleet = FleetView(epoch, settings.fleet, step_times, ends_trial=self.health.granted)
        serving = ServingCount(self.fleet)
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
        self.slots = SlotPools(self.fleet, self.queue.ledger.shares, settings.leases)
        self._health_review = HealthReview(
            self.fleet, self.queue, self.health, self.overload, serving, telemetry=telemetry
        )
        self._clock = clock
        self._heartbeat = LeaderHeartbeat(self.fleet, self.overload, clock, rng, settings.beat_s)
        self.applied = AppliedReports(2 * settings.fleet.max_workers)
        limits = StreamLimits(settings.max_gateways, 2 * settings.fleet.max_workers, settings.max_inbox)
        self.streams = TermStreams(epoch, limits, clock, self._heartbeat.greet)

    async def run(self, leads: Callable[[], bool]) -> None:
        """Own the state until cancelled or until ``leads`` returns False; it is called before every pass."""
        while True:
            await self._wait()
            if not leads():
                return
            began_s = self._clock.monotonic_s()
            self.step()
            now_s = self._clock.monotonic_s()
            self.streams.served_s = now_s
            if self._decision is not None:
                self._decision.observe(now_s - began_s)

    def step(self) -> None:
        """Run one turn of the owner: apply commands, expire, grant, deliver."""
        now_s = self._clock.monotonic_s()
        for command in self.streams.take(_COMMANDS_PER_PASS):
            self._apply(command, now_s)
        self._touch(self.fleet.expire(now_s))
        if now_s >= self.health.due_s():
            self._health_review.run(now_s)
        self.queue.run_pass(now_s)
        self.queue.expire(now_s)
        self.queue.run_pass(now_s)  # expired placements may have blocked others
        self._deliver(now_s)
        self.slots.run(now_s)
        self._deliver_slots(now_s)
        if now_s >= self._heartbeat.due_s:
            self._heartbeat.send(self.streams.sessions.values(), now_s)

    def check_integrity(self) -> None:
        self.fleet.check_integrity()
        self.queue.check_integrity()
        self.slots.check_integrity()

    async def _wait(self) -> None:
        """Return when there is a command or a deadline has passed."""
        waiting_s = self.queue.waiting.next_deadline_s()
        due_s = min(self.fleet.next_deadline_s(), waiting_s, self.health.due_s(), self.slots.due_s())
        if self.streams.sessions:
            due_s = min(due_s, self._heartbeat.due_s)
        await self.streams.wait_command(due_s)

    def _apply(self, command: Command, now_s: float) -> None:
        match command:
            case SubmitPlacements(session, places):
                if session.number in self.streams.sessions:
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
            case DemandSlots(session, demands, returned):
                if session.number in self.streams.sessions:
                    self.slots.demand(session.gateway_id, session.zone, demands, returned, now_s)
                    self._refuse_slots(session, demands, now_s)
            case GatewayDisconnected(session, unsent):
                self.slots.disconnect(session.gateway_id)
                for placement_id in unsent:
                    self.queue.cancel(session.number, placement_id, now_s)
                self.queue.withdraw_all(session.number, now_s)
            case Report(reporter, number, snapshot):
                self._report(reporter, number, snapshot, now_s)
            case WorkerDisconnected(reporter):
                changed = self.fleet.close_stream(reporter.number)
                self._touch(changed)
                if changed:
                    self.health.disconnected(reporter.worker_id, now_s)
                if reporter.worker_id:
                    log.info("scheduler.worker_disconnected", worker_id=reporter.worker_id, epoch=self.epoch)

    def _report(self, reporter: WorkerSession, number: int, snapshot: ReportSnapshot, now_s: float) -> None:
        if reporter.closed or reporter.error is not None:
            return
        snapshot = self.applied.without_applied(snapshot)
        try:
            changed = self.fleet.apply(reporter.number, snapshot, now_s)
        except FairwayError as error:
            reporter.end(error)
            return
        self.applied.note(snapshot, first=not reporter.worker_id)
        self.slots.reported(snapshot, now_s)
        if not reporter.worker_id:
            reporter.worker_id = snapshot.worker_id
            self.decisions.found_running(snapshot.worker_id, snapshot.live)
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
        self.overload.ended(snapshot.usage)
        for counter in self.queue.reported(snapshot):
            reporter.counters[counter.tenant, counter.digest, counter.priority] = counter
        self._touch(changed)
        reporter.applied = number
        reporter.wake()

    def _refuse_slots(self, session: GatewaySession, demands: Collection[SlotDemand], now_s: float) -> None:
        """Report demands that no node of their tenants' groups can serve: their gateway decides who waits."""
        for wanted in demands:
            if wanted.rows and self.fleet.lacks_group(wanted.digest, wanted.node_group, now_s):
                session.slot_refusals[SlotRefusal(wanted.digest, wanted.tenant)] = None
                session.wake()

    def _deliver(self, now_s: float) -> None:
        for number, outcome in self.queue.take_outcomes():
            session = self.streams.sessions.get(number)
            if session is None:
                # Its stream ended meanwhile: the gateway did not receive the grant.
                if isinstance(outcome, Granted):
                    self.queue.cancel(number, outcome.placement_id, now_s)
                continue
            if not session.outbox:
                session.wake()
            session.outbox.append(outcome)

    def _deliver_slots(self, now_s: float) -> None:
        for gateway_id in self.slots.take_gateways():
            if (session := self.streams.session_of(gateway_id)) is None:
                continue
            for lease in self.slots.take_leases(gateway_id, now_s):
                session.leases[lease.worker_id, lease.digest, lease.tenant] = lease
            session.wake()

    def _touch(self, digests: Collection[str]) -> None:
        """Look again at the placements and leases of these versions: their workers changed."""
        self.queue.touch(digests)
        self.slots.changed(digests)
