"""Worker health: which workers that report are barred from requests, for slow steps or for failures.

Reports contain step times and ended sequences; re-submissions show which workers lost sequences. The owner
calls ``tick`` about once a second and applies its changes. Single writer: the task that owns the fleet view.
Time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.core.generation import PlaceSpec
from services.scheduler.policy.health.breaker import BreakerPolicy, CircuitChange, Circuits, CircuitState
from services.scheduler.policy.health.ejection import (
    Ejection,
    EjectionChange,
    EjectionPolicy,
    EjectionState,
    WorkerHealth,
)
from services.scheduler.policy.step_time import StepModel, WorkerKind

EJECTED: Final = "ejected"
PROBED: Final = "probed"  # the result of its probe is not judged yet
WORKER_FAILING: Final = "worker_failing"
ZONE_FAILING: Final = "zone_failing"
_MAX_LOSSES_KNOWN: Final = 8192


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Settings of ejection and circuit breakers."""

    ejection: EjectionPolicy = field(default_factory=EjectionPolicy)  # ejection of slow workers
    worker: BreakerPolicy = field(default_factory=BreakerPolicy)  # circuit of a worker
    # Circuit of a version.
    version: BreakerPolicy = field(default_factory=lambda: BreakerPolicy(min_failures=10, failure_ratio=0.6))
    # Circuit of a zone.
    zone: BreakerPolicy = field(default_factory=lambda: BreakerPolicy(min_failures=10, failure_ratio=0.6))
    # At most this share of a pool's serving workers is barred; one always may be, and one always stays.
    max_barred_ratio: float = 0.5
    min_samples: float = 8.0  # a step-time model with fewer samples is no measure by itself
    tick_s: float = 1.0
    forget_s: float = 600.0  # a worker that reported nothing for so long is removed
    max_workers: int = 16384  # more workers than these are removed at a tick


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    """Health of one pool of one worker, for operators. Times are on the caller's monotonic clock."""

    worker_id: str
    digest: str
    state: str  # healthy, ejected, probing, failing or trial
    slowness_ratio: float  # step time over its reference, nan while not judged
    since_s: float
    next_probe_s: float  # 0: no probe is scheduled
    # Why it gets no requests now, empty while it may. A probing worker gets no further request after the
    # grant until its next probe: the reason is then ``probed``, not ``ejected``.
    why: str


@dataclass(frozen=True, slots=True)
class Barring:
    """The worker's pool gets no requests from now on, for ``reason``; with an empty reason, it gets them
    again."""

    digest: str
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PoolHealthChange:
    digest: str
    change: EjectionChange


@dataclass(frozen=True, slots=True)
class Ticked:
    """The changes of one tick: pools barred or readmitted, and health changes to log."""

    barrings: tuple[Barring, ...] = ()
    ejections: tuple[PoolHealthChange, ...] = ()
    circuits: tuple[CircuitChange, ...] = ()


@dataclass(slots=True, eq=False)
class _Pool:
    ejection: Ejection
    barred: dict[str, str] = field(default_factory=dict)
    most_barred: int = 0


@dataclass(slots=True, eq=False)
class _Seen:
    """The last report of a worker."""

    incarnation: int
    zone: str
    draining: bool
    reported_s: float
    pools: dict[str, PoolSnapshot]


class FleetHealth:
    """Health of all workers. ``model`` returns the fitted step-time model of a kind of worker."""

    def __init__(self, policy: HealthPolicy, model: Callable[[WorkerKind], StepModel]) -> None:
        self.policy: Final = policy
        self._model = model
        self._pools: dict[str, _Pool] = {}
        self._seen: dict[str, _Seen] = {}
        self._workers: Circuits[str] = Circuits("worker", policy.worker)
        self._versions: Circuits[str] = Circuits("version", policy.version)
        self._zones: Circuits[str] = Circuits("zone", policy.zone)
        self._circuits = self._workers, self._versions, self._zones
        self._losses: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        self._news: list[CircuitChange] = []
        self._ticked_s = -math.inf
        self._all_well = True  # no worker was on trial at the last tick, so no grant is a trial

    # --- observations -----------------------------------------------------------------------------

    def reported(self, report: ReportSnapshot, now_s: float) -> None:
        """Apply the steps and ended sequences of a report that the fleet view has accepted."""
        seen = self._seen.get(report.worker_id)
        same_life = seen is not None and seen.incarnation == report.incarnation
        before = seen.pools if seen is not None and same_life else {}
        for pool in report.pools:
            self._steps(report, before.get(pool.digest), pool, same_life=same_life, now_s=now_s)
        for use in report.usage:
            if use.ended:
                self._succeeded(report.worker_id, use.digest, report.zone, now_s)
        pools = {pool.digest: pool for pool in report.pools}
        self._seen[report.worker_id] = _Seen(report.incarnation, report.zone, report.draining, now_s, pools)

    def resubmitted(self, spec: PlaceSpec, now_s: float) -> None:
        """Count a failure of each worker that the placement excludes, once per lost or refused sequence."""
        for worker_id in spec.excluded_workers:
            loss = spec.request_id, spec.choice, worker_id
            if loss in self._losses:
                continue
            self._losses[loss] = None
            if len(self._losses) > _MAX_LOSSES_KNOWN:
                self._losses.popitem(last=False)
            seen = self._seen.get(worker_id)
            if seen is not None and not seen.draining:  # a draining worker refuses on purpose
                self._failed(worker_id, spec.version_digest, seen.zone, now_s)

    def disconnected(self, worker_id: str, now_s: float) -> None:
        """Count a failure of a worker whose stream broke."""
        seen = self._seen.get(worker_id)
        if seen is not None and not seen.draining:
            self._note(self._workers, self._workers.failed(worker_id, now_s), worker_id)

    def granted(self, worker_id: str, digest: str, now_s: float) -> bool:
        """Count a grant; return whether the worker is barred again because its trial has started."""
        pool = self._pools.get(digest)
        if pool is None:
            return False
        if self._all_well:
            pool.ejection.granted(worker_id, now_s)
            return False
        reason = self._reason(pool, worker_id, now_s)
        pool.ejection.granted(worker_id, now_s)
        self._workers.passed(worker_id, now_s)
        seen = self._seen.get(worker_id)
        if seen is not None and seen.zone:
            self._zones.passed(seen.zone, now_s)
        if reason or not (reason := self._reason(pool, worker_id, now_s)):
            return False
        if reason != EJECTED and len(pool.barred) >= pool.most_barred:
            return False
        pool.barred[worker_id] = reason
        return True

    # --- queries ----------------------------------------------------------------------------------

    def failing_s(self, digest: str, now_s: float) -> float | None:
        """Return the seconds until a failing version accepts requests again, None when this request may pass.

        A request that passes while the version is half-open is a trial, and no other passes for a while.
        """
        circuit = self._versions.get(digest)
        if circuit is None:
            return None
        if circuit.lets_through(now_s):
            circuit.passed(now_s)
            return None
        return max(self.policy.version.trial_interval_s, circuit.until_s - now_s)

    def due_s(self) -> float:
        """Return when ``tick`` is next needed."""
        return self._ticked_s + self.policy.tick_s if self._seen else math.inf

    def worker_health(self) -> tuple[WorkerStanding, ...]:
        """Return the health of each pool of each worker, by worker and version."""
        found = [
            self._standing(digest, pool, health)
            for digest, pool in self._pools.items()
            for health in pool.ejection.health()
        ]
        return tuple(sorted(found, key=lambda one: (one.worker_id, one.digest)))

    def pools_by_state(self) -> dict[str, int]:
        """Return how many worker pools are ejected, probing, failing or on trial."""
        found = dict.fromkeys(("ejected", "probing", "failing", "trial"), 0)
        for standing in self.worker_health():
            if standing.state in found:
                found[standing.state] += 1
        return found

    # --- decisions --------------------------------------------------------------------------------

    def tick(self, serving: Callable[[str], Collection[str]], now_s: float) -> Ticked:
        """Judge the pools. ``serving`` returns a version's workers that get requests unless barred."""
        self._ticked_s = now_s
        self._prune(now_s)
        for circuits in self._circuits:
            self._news += [circuits.change(key) for key in circuits.advance(now_s)]
        barrings: list[Barring] = []
        ejections: list[PoolHealthChange] = []
        for digest, pool in self._pools.items():
            members = serving(digest)
            ejections += [PoolHealthChange(digest, found) for found in pool.ejection.tick(members, now_s)]
            barred = self._barred(pool, members, now_s)
            for worker_id in {**pool.barred, **barred}:
                if barred.get(worker_id) != pool.barred.get(worker_id):
                    barrings.append(Barring(digest, worker_id, barred.get(worker_id, "")))
            pool.barred = barred
        self._all_well = not any(len(found.not_closed()) for found in self._circuits) and all(
            pool.ejection.all_healthy for pool in self._pools.values()
        )
        circuits_news, self._news = tuple(self._news), []
        return Ticked(tuple(barrings), tuple(ejections), circuits_news)

    def _barred(self, pool: _Pool, members: Collection[str], now_s: float) -> dict[str, str]:
        """Return the barred workers with reasons. Ejection has its own limit; circuits use the rest of the
        common one."""
        reasons = {worker_id: self._reason(pool, worker_id, now_s) for worker_id in members}
        barred = {worker_id: reason for worker_id, reason in reasons.items() if reason == EJECTED}
        allowed = max(1, math.floor(len(members) * self.policy.max_barred_ratio))
        pool.most_barred = min(allowed, len(members) - 1)
        for wanted in (WORKER_FAILING, ZONE_FAILING):
            for worker_id, reason in reasons.items():
                if reason == wanted and len(barred) < pool.most_barred:
                    barred[worker_id] = reason
        return barred

    def _reason(self, pool: _Pool, worker_id: str, now_s: float) -> str:
        if pool.ejection.barred(worker_id, now_s):
            return EJECTED
        if not self._workers.lets_through(worker_id, now_s):
            return WORKER_FAILING
        seen = self._seen.get(worker_id)
        if seen is not None and seen.zone and not self._zones.lets_through(seen.zone, now_s):
            return ZONE_FAILING
        return ""

    # --- inside -----------------------------------------------------------------------------------

    def _steps(
        self,
        report: ReportSnapshot,
        before: PoolSnapshot | None,
        now: PoolSnapshot,
        *,
        same_life: bool,
        now_s: float,
    ) -> None:
        pool = self._pools.get(now.digest)
        if pool is None:
            pool = self._pools[now.digest] = _Pool(Ejection(self.policy.ejection))
        if not same_life:
            pool.ejection.restarted(report.worker_id, now_s)
        if before is not None and now.steps < before.steps:  # its engine restarted
            pool.ejection.restarted(report.worker_id, now_s)
            if not report.draining:
                self._failed(report.worker_id, now.digest, report.zone, now_s)
            before = None
        model = self._model(WorkerKind(report.device_type, now.digest))
        base = before if before is not None else now  # work before the first report is no evidence
        pool.ejection.observe(
            report.worker_id,
            kind=report.device_type,
            steps=now.steps - base.steps,
            measured_s=now.step_seconds - base.step_seconds,
            predicted_s=model.seconds(
                now.steps - base.steps,
                now.prefill_tokens - base.prefill_tokens,
                now.decode_tokens - base.decode_tokens,
                now.attended_tokens - base.attended_tokens,
            ),
            trusted=model.samples >= self.policy.min_samples,
            now_s=now_s,
        )

    def _failed(self, worker_id: str, digest: str, zone: str, now_s: float) -> None:
        known = self._workers.get(worker_id)
        self._note(self._workers, self._workers.failed(worker_id, now_s), worker_id)
        if known is not None and known.state is not CircuitState.CLOSED:
            return  # further failures of a failing worker do not count against its version and its zone
        self._note(self._versions, self._versions.failed(digest, now_s), digest)
        if zone:
            self._note(self._zones, self._zones.failed(zone, now_s), zone)

    def _succeeded(self, worker_id: str, digest: str, zone: str, now_s: float) -> None:
        self._note(self._workers, self._workers.succeeded(worker_id, now_s), worker_id)
        self._note(self._versions, self._versions.succeeded(digest, now_s), digest)
        if zone:
            self._note(self._zones, self._zones.succeeded(zone, now_s), zone)

    def _note(self, circuits: Circuits[str], changed: bool, key: str) -> None:
        if changed:
            self._news.append(circuits.change(key))

    def _standing(self, digest: str, pool: _Pool, health: WorkerHealth) -> WorkerStanding:
        state, why = health.standing.value, pool.barred.get(health.worker_id, "")
        since_s, next_probe_s = health.since_s, health.next_probe_s
        circuit = self._workers.get(health.worker_id)
        if health.standing is EjectionState.PROBING and why == EJECTED:
            why = PROBED
        if health.standing is EjectionState.HEALTHY and circuit is not None:
            if circuit.state is not CircuitState.CLOSED:
                state = "failing" if circuit.state is CircuitState.OPEN else "trial"
                since_s, next_probe_s, why = circuit.since_s, circuit.until_s, why or WORKER_FAILING
            elif why:
                state = "failing"
        return WorkerStanding(health.worker_id, digest, state, health.ratio, since_s, next_probe_s, why)

    def _prune(self, now_s: float) -> None:
        """Remove workers without reports for a long time, and the oldest ones beyond the limit."""
        by_age = sorted(self._seen, key=lambda worker_id: self._seen[worker_id].reported_s)
        too_many = len(by_age) - self.policy.max_workers
        for number, worker_id in enumerate(by_age):
            if number >= too_many and now_s - self._seen[worker_id].reported_s <= self.policy.forget_s:
                break
            del self._seen[worker_id]
            for pool in self._pools.values():
                pool.ejection.forget(worker_id)
        used = {digest for seen in self._seen.values() for digest in seen.pools}
        for digest in [digest for digest in self._pools if digest not in used]:
            del self._pools[digest]
