"""The decision of one deployment: the scaler's, within its bounds, and its starts from zero.

A start from zero that does not become READY within ``Scaled.start_limit_s``, or whose every replica failed
for good, ends at zero again, and the next is made after a time that doubles with each failure. One that
another deployment displaced while it was idle ends at zero too. Pure: times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from services.controlplane.scaling.policy.residency import Resident, Visits, stay_s
from services.controlplane.scaling.policy.scaler import (
    PoolScaler,
    ReplicaBounds,
    ReplicaDecision,
    ScalerTuning,
    Supply,
    Zone,
    spread,
)
from services.core.errors import DoesNotFit
from services.core.estimates.pool_load import PoolLoad
from services.core.records import Deployment, LoadedVersion, VersionState, Worker
from services.core.scaling import IDLE_S, START_S, Scaled, Scaling, ScalingReason

_LEARN_RATIO: Final = 0.3  # weight of a start in the mean
_FIRST_RETRY_S: Final = 60.0
_MAX_RETRY_S: Final = 1800.0
_SERVES: Final = (VersionState.READY, VersionState.RETIRING, VersionState.RESTARTING)

_IDLE: Final = ScalingReason("idle", 0, "no request needs a replica")

# The assigned replicas by worker and version digest; None: no worker has reported it.
Replicas = Mapping[tuple[str, str], LoadedVersion | None]


@dataclass(frozen=True, slots=True)
class Situation:
    """What one decision is made from. ``load`` None: no scheduler reports."""

    deployment: Deployment
    decided: Scaled | None  # the stored decision
    replicas: Replicas
    load: PoolLoad | None
    epoch: int  # epoch of the leader that decides
    unix_s: float
    now_s: float
    replica_cost: float = 0.0  # the most that a node costs per hour that may run it; 0: unknown
    in_rollout: bool = False
    zones: tuple[Zone, ...] = ()  # zones with a node that may get a replica
    leaving: str = ""  # why it leaves a full pool now, while it is idle; empty: it does not

    @property
    def before(self) -> Scaled:
        """The decision that holds."""
        name, replicas = self.deployment.meta.name, self.deployment.replicas
        return self.decided if self.decided is not None else Scaled(name, replicas)


@dataclass(slots=True)
class StartTimes:
    """The mean time from an assignment until READY, and how long each present start has lasted."""

    mean_s: float = START_S
    _began_s: dict[tuple[str, str], float | None] | None = None  # None: begun before this leader

    def supply(self, replicas: Replicas, wanted: int, now_s: float) -> Supply:
        """Observe the replicas and return the supply. A replica without a worker starts when it has one."""
        starting: list[float] = []
        known, self._began_s = self._began_s, {}
        for key, loaded in replicas.items():
            began_s = known.get(key, now_s) if known is not None else None
            if loaded is not None and loaded.state in _SERVES:
                if known is not None and key in known and began_s is not None:
                    ratio = 1.0 if self.mean_s == START_S else _LEARN_RATIO  # the default is no observation
                    self.mean_s += ratio * (now_s - began_s - self.mean_s)
                continue
            self._began_s[key] = began_s
            waited_s = 0.0 if began_s is None else now_s - began_s
            starting.append(max(0.0, self.mean_s - waited_s))
        ready = min(wanted, ready_workers(replicas))
        starting = sorted(starting)[: wanted - ready]
        starting += [self.mean_s] * (wanted - ready - len(starting))
        return Supply(ready, tuple(starting), self.mean_s)


def ready_workers(replicas: Replicas) -> int:
    """Return how many workers serve, in any version."""
    return len({worker for (worker, _), one in replicas.items() if one is not None and one.state in _SERVES})


def replica_cost(deployment: Deployment, workers: Iterable[Worker]) -> float:
    """Return the most that a live node costs per hour of those with the labels that it requires; 0: none."""
    labels = deployment.node_selector.items()
    return max((one.cost_per_hour for one in workers if labels <= one.labels.items()), default=0.0)


@dataclass(slots=True)
class DeploymentScaler:
    """Decides for one deployment while this process leads."""

    tuning: ScalerTuning = field(default_factory=ScalerTuning)
    starts: StartTimes = field(default_factory=StartTimes)
    reasons: tuple[ScalingReason, ...] = ()  # reasons of the last decision, changed or not
    zones: tuple[tuple[str, int], ...] = ()  # its replicas by zone
    load: PoolLoad | None = None  # the latest report
    load_unix_s: float = 0.0
    visits: Visits = field(default_factory=Visits)
    _scaler: PoolScaler | None = None
    _rate: float | None = None
    _woken_s: float | None = None  # when the present start from zero began

    @property
    def start_work(self) -> float:
        """Work, in replicas, that arrives while another replica starts: how much a start costs its users."""
        return self.starts.mean_s * (self._scaler.busy if self._scaler is not None else 0.0)

    @property
    def growth_variance(self) -> float:
        """Variance of the replicas by which its work grows while a replica starts."""
        return self._scaler.growth_variance if self._scaler is not None else 0.0

    def decide(self, now: Situation) -> Scaled:
        """Return the decision that holds from now on: the present one, unless it changes."""
        before, scaling = now.before, now.deployment.scaling
        assert scaling is not None, "a deployment without bounds is not scaled"
        if self._scaler is None:
            self._scaler, self._rate = PoolScaler(self.tuning), before.rate or None
            self.starts.mean_s = before.start_s
            if before.replicas and before.reasons and before.reasons[0].signal == "held":
                self._woken_s = now.now_s
        if now.load is not None:
            self.load, self.load_unix_s = now.load, now.unix_s
            self._rate = now.load.rate or self._rate
            self.visits.note(now.load, now.now_s, apart_s=stay_s(self.starts.mean_s))
        supply = replace(self.starts.supply(now.replicas, before.replicas, now.now_s), zones=now.zones)
        bounds = _bounds(scaling, now)
        calm = before
        if supply.ready:
            self._woken_s, calm = None, replace(before, failed_wakes=0, retry_unix_s=0.0, failure="")
        free = bounds.pinned is None and not bounds.frozen and not scaling.min_replicas
        if free and self._woken_s is not None and (failure := self._failure(now)):
            after = self._given_up(before, failure, now.unix_s)
        elif free and not before.replicas and now.unix_s < before.retry_unix_s:
            self.reasons, after = (_waits(before, now.unix_s),), before
        elif free and self._displaced(now):
            self.reasons = (ScalingReason("displaced", 0, now.leaving),)
            after = replace(calm, replicas=0)
        else:
            found = self._decision(now, supply, bounds)
            if free and not before.replicas and not (now.load and now.load.held):
                found = ReplicaDecision(0, (_IDLE,))  # what earlier requests needed starts nothing
            if found.replicas and not now.replicas and bounds.pinned is None and self._woken_s is None:
                self._woken_s = now.now_s
            self.reasons = found.reasons or (_IDLE,)
            after = replace(calm, replicas=found.replicas)
        self.zones = spread(after.replicas, now.zones)
        if after == now.decided:
            return after
        return replace(
            after,
            reasons=self.reasons,
            decided_unix_s=now.unix_s,
            epoch=now.epoch,
            start_s=self.starts.mean_s,
            rate=self._rate or 0.0,
        )

    def _displaced(self, now: Situation) -> bool:
        """Whether it left its last worker while it was idle, and no request has come since."""
        idle = now.load is not None and self.visits.active_s < now.now_s
        return bool(now.leaving) and not now.replicas and idle

    def resident(self, now: Situation, wanted: int) -> Resident | None:
        """Return its claim on the memory of workers after a decision, if it may be at zero and is not.

        It yields where its replicas all serve its present version, or have left, and no operator holds it.
        """
        scaling, name = now.deployment.scaling, now.deployment.meta.name
        if scaling is None or scaling.min_replicas or not wanted:
            return None
        idle_s, load_s = now.now_s - self.visits.active_s, self.starts.mean_s
        held = scaling.frozen or scaling.pinned(now.unix_s) is not None or now.in_rollout
        serves = all(
            digest == now.deployment.version_digest and one is not None and one.state is VersionState.READY
            for (_, digest), one in now.replicas.items()
        )
        rests = self._woken_s is None and now.load is not None and idle_s >= stay_s(load_s)
        return Resident(
            name,
            now.deployment.owner,
            sum(one.granted_bytes for one in now.replicas.values() if one is not None),
            load_s,
            self.visits.hazard,
            idle_s,
            yields=rests and serves and not held,
        )

    def _decision(self, now: Situation, supply: Supply, bounds: ReplicaBounds) -> ReplicaDecision:
        assert self._scaler is not None
        if now.load is None:
            return _unobserved(supply.replicas, bounds)
        found = self._scaler.decide(replace(now.load, rate=self._rate), supply, bounds, now.now_s)
        scaling = now.deployment.scaling
        if scaling is None or bounds.most == scaling.max_replicas:
            return found
        cost = (
            f"the nodes of {bounds.most} replicas cost up to {bounds.most * now.replica_cost:g} per hour, "
            f"{scaling.max_cost_per_hour:g} is allowed"
        )
        reasons = (
            ScalingReason("budget", one.replicas, f"{one.text}; {cost}") if one.signal == "maximum" else one
            for one in found.reasons
        )
        return replace(found, reasons=tuple(reasons))

    def _failure(self, now: Situation) -> str:
        """Return why the present start from zero has failed; empty while it has not."""
        reported = [one for one in now.replicas.values() if one is not None]
        failed = [one for one in reported if one.state is VersionState.FAILED]
        why = f"{failed[0].reason} {failed[0].message}".strip() if failed else ""
        final = [one for one in failed if not one.retry_unix_s and one.reason != DoesNotFit.reason]
        if failed and len(final) == len(now.replicas):  # what does not fit loads once idle ones have left
            return why
        limit_s = Scaled("", 0, start_s=self.starts.mean_s).start_limit_s
        if self._woken_s is None or now.now_s - self._woken_s < limit_s:
            return ""
        why = why or ("" if now.replicas else "no worker took it")
        return f"no replica was READY within {limit_s:.0f} s{f': {why}' if why else ''}"

    def _given_up(self, before: Scaled, failure: str, unix_s: float) -> Scaled:
        self._woken_s, failures = None, before.failed_wakes + 1
        retry_s = min(_MAX_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(failures - 1, 16))
        after = replace(
            before, replicas=0, failed_wakes=failures, retry_unix_s=unix_s + retry_s, failure=failure[:512]
        )
        self.reasons = (_waits(after, unix_s),)
        return after


def _bounds(scaling: Scaling, now: Situation) -> ReplicaBounds:
    """Return the bounds of this moment. A minimum holds whatever its nodes cost now."""
    least, most = scaling.min_replicas, scaling.max_replicas
    if scaling.max_cost_per_hour and now.replica_cost:
        affordable = math.floor(scaling.max_cost_per_hour / now.replica_cost + 1e-9)
        most = min(most, max(least, affordable))
    if now.in_rollout:
        least = max(least, min(now.before.replicas, most))  # the candidates' numbers follow from it
    idle_s = math.inf if scaling.min_replicas else scaling.idle_s or IDLE_S
    if not now.before.replicas:
        idle_s = 0.0  # what is at zero stays there: a new leader has not seen when its last request was
    return ReplicaBounds(
        least,
        most,
        idle_s,
        scaling.pinned(now.unix_s),
        scaling.frozen,
    )


def _unobserved(replicas: int, bounds: ReplicaBounds) -> ReplicaDecision:
    """Return the decision without a report: only what operators ask for changes the replicas."""
    if bounds.frozen:
        return ReplicaDecision(
            replicas, (ScalingReason("frozen", replicas, "an operator froze the deployment"),)
        )
    if bounds.pinned is not None:
        text = f"an operator set {bounds.pinned} replicas"
        return ReplicaDecision(bounds.pinned, (ScalingReason("override", bounds.pinned, text),))
    kept = min(max(replicas, bounds.least), max(bounds.least, bounds.most))
    text = "no scheduler reports, so the replicas stay as they are within the bounds"
    return ReplicaDecision(kept, (ScalingReason("unobserved", kept, text),))


def _waits(failed: Scaled, unix_s: float) -> ScalingReason:
    left_s = max(0.0, failed.retry_unix_s - unix_s)
    text = f"start {failed.failed_wakes} from zero failed, the next is in {left_s:.0f} s: {failed.failure}"
    return ScalingReason("failed", 0, text)
