"""Moves the open rollouts on, as leader. Every write is fenced by the epoch and by the revisions that were
read.

Nothing is remembered between two rounds: a new leader continues from the stored states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Final, Protocol

import structlog

from services.controlplane.fleet import FleetRecord, fleet_of
from services.controlplane.objectives.policy.gates import (
    DEFAULT_BOUNDS,
    PACK_BOUNDS,
    GateMetric,
    GatePlan,
    GateReport,
    MetricBounds,
    judge,
    missing,
)
from services.controlplane.policy.assign import Unplaced
from services.controlplane.resources.status import unplaced_in, unplaced_message
from services.controlplane.rollouts.policy.advance import advance, facts_of, unfenced_on
from services.controlplane.rollouts.policy.effects import (
    MOST_LOAD_RATIO,
    load_ratio,
    measured_ratio,
    step_name,
)
from services.controlplane.rollouts.records import (
    FULL,
    STABLE,
    Rollout,
    RolloutPhase,
    RolloutStrategy,
)
from services.controlplane.rollouts.writes import context_in, effects
from services.core.arms import ArmKey, ArmWindow, GateWindow
from services.core.errors import NoLeader, StoreUnavailable
from services.core.records import ROLLOUTS, BurnAlert, Priority, Sli, dump
from services.core.rollouts.routes import WHOLE_BP, ModelRoute
from services.ports.clock import Clock
from services.ports.store import Committed, LeaseLost, ModRevisionIs, Put, Store
from services.runtime.audit import deciding
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Leadership
from services.runtime.idempotent_writes import WriteSet

log = structlog.get_logger()

ROUND_S: Final = 0.25  # interval of rounds while a rollout is open
IDLE_S: Final = 5.0
_RETRY_S: Final = 0.5
# An alert that pages also rolls back.
_PAGING: Final = frozenset({BurnAlert.FAST, BurnAlert.ACUTE})
_LARGEST: Final = 1e6
_EQUAL_LOAD: Final = (1 / MOST_LOAD_RATIO, MOST_LOAD_RATIO)
# Copies are batched in another class and at other moments than the requests that they are compared with.
# Measured on two cores, copies of one version took 0.6 to 0.8 of the device time of its requests.
_OF_COPIES: Final = {GateMetric.COST: MetricBounds(2.0, 3.0)}
_LATENCIES: Final = (GateMetric.TTFT_P95, GateMetric.ITL_P95)
_JUDGED: Final = frozenset({RolloutPhase.RUNNING, RolloutPhase.SOAKING})
_MESSAGE_S: Final = 2.0  # interval of writes that change only a message
# A new leader has the sums since the last snapshot only once the gateways have sent them again.
_COMPLETE_S: Final = 15.0


class ArmSlis(Protocol):
    """What gateways measured of the arms: ``objectives.store.SliStore``. Each raises NoLeader."""

    def arms_of(self, window: GateWindow) -> Mapping[str, ArmWindow]:
        """Return what was measured in a step so far, by version digest."""

    def lasted_s(self, window: GateWindow) -> float:
        """Return for how long requests of a step ended so far."""

    def arm_alerts(self, arm: ArmKey, since_unix_s: float) -> Mapping[tuple[Priority, Sli], BurnAlert]:
        """Return the burn alerts of one arm alone by the events since then, without those that are NONE."""

    def counting_s(self) -> float:
        """Return for how long this leader has taken reports."""


class RolloutController:
    """Runs in every control plane; acts only while it leads.

    ``informer`` contains everything under the root by ``fleet.decode``.
    """

    def __init__(
        self,
        store: Store,
        informer: Informer[FleetRecord | None],
        leadership: Leadership,
        clock: Clock,
        *,
        slis: ArmSlis,
    ) -> None:
        self._store = store
        self._informer = informer
        self._leadership = leadership
        self._clock = clock
        self._slis = slis
        self._message_s: dict[str, float] = {}  # time of the last message of each open rollout

    async def run(self) -> None:
        """Make a round on each change, and every ``ROUND_S`` while a rollout is open, until cancelled."""
        while True:
            epoch = await self._leadership.wait_leading()
            revision, period_s = self._informer.revision, _RETRY_S
            try:
                if self._informer.synced:
                    period_s = ROUND_S if await self.round(epoch) else IDLE_S
            except (StoreUnavailable, LeaseLost, NoLeader) as error:
                log.info("rollouts.round_failed", error=repr(error))
            await self._informer.wait_changed(revision, period_s)

    async def round(self, epoch: int) -> int:
        """Move every open rollout on once. Returns how many are open."""
        view = self._informer.view
        open_ = [
            (key, held)
            for key, held in sorted(view.items())
            if isinstance(held.record, Rollout) and not held.record.ended
        ]
        if not open_:
            self._message_s.clear()
            return 0
        fleet = fleet_of(held.record for held in view.values())
        unplaced = unplaced_in(fleet)
        for key, held in open_:
            assert isinstance(held.record, Rollout)
            context = context_in(view, held.record.deployment)
            if context is None:
                log.error("rollout.without_deployment", rollout=held.record.meta.name)
                continue
            facts = facts_of(
                held.record,
                context.wanted.replicas,
                fleet.workers,
                _shortages(held.record, unplaced),
                self.alarms(held.record),
                of_pack=context.deployment.of_pack,
            )
            facts = replace(
                facts,
                measured=self._is_measured(held.record),
                unmeasured=self._unmeasured(held.record),
                route_revision=context.route_revision,
                unfenced=unfenced_on(held.record, fleet.workers, fleet.assignments, context.route_revision),
                version_digest=context.deployment.version_digest,
            )
            reports = self.reports(held.record, context.route)
            after = advance(held.record, facts, reports, self._clock.unix_s())
            after = self._without_chatter(held.record, replace(after, gates=reports))
            writes = effects(after, context)
            if self._leadership.epoch != epoch:
                break
            if after != held.record or writes.operations:
                fence = self._leadership.fence(epoch)
                unchanged = ModRevisionIs(key, held.mod_revision)
                write = WriteSet([fence, unchanged, *writes.conditions], writes.operations)
                moved = (after.phase, after.step) != (held.record.phase, held.record.step)
                name = f"Rollouts/{after.phase.name.title()}"
                with deciding(name, after.meta.name) if moved else nullcontext():
                    await self._write(after, write)
        return len(open_)

    async def _write(self, rollout: Rollout, writes: WriteSet) -> None:
        key, name = ROLLOUTS + rollout.meta.name, rollout.meta.name
        done = await self._store.commit([Put(key, dump(rollout)), *writes.operations], writes.conditions)
        if isinstance(done, Committed):
            log.info("rollout.written", rollout=name, phase=rollout.phase, step=rollout.step)
        else:  # deposed, or the view is old
            log.info("rollout.refused", rollout=name, phase=rollout.phase, step=rollout.step)

    def reports(self, rollout: Rollout, route: ModelRoute | None) -> dict[str, GateReport]:
        """Return the gates of the present step or the soak, by candidate; none without traffic.

        Raises NoLeader.
        """
        if rollout.phase not in _JUDGED or route is None:
            return {}
        here = GateWindow(rollout.deployment, step_name(rollout))
        windows, lasted_ratio = dict(self._slis.arms_of(here)), 1.0
        if rollout.phase is RolloutPhase.SOAKING:
            before = GateWindow(rollout.deployment, rollout.baseline)
            stable = rollout.stable_digest
            windows[stable] = self._slis.arms_of(before).get(stable, ArmWindow())
            lasted_ratio = self._slis.lasted_s(before) / max(self._slis.lasted_s(here), 1.0)
        return judged(rollout, route, windows, lasted_ratio=lasted_ratio)

    def alarms(self, rollout: Rollout) -> dict[str, str]:
        """Return the candidates that burn an error budget while the stable version does not. Raises
        NoLeader.

        What a version did in an earlier rollout does not count.
        """
        if rollout.phase not in _JUDGED:
            return {}
        stable = self._paging(rollout, rollout.stable_digest)
        found = {arm.name: self._paging(rollout, arm.version_digest) for arm in rollout.arms}
        return {name: ", ".join(sorted(paging - stable)) for name, paging in found.items() if paging - stable}

    def _is_measured(self, rollout: Rollout) -> bool:
        """Whether the sums of the present step are complete. Raises NoLeader."""
        return rollout.phase not in _JUDGED or self._slis.counting_s() >= _COMPLETE_S

    def _unmeasured(self, rollout: Rollout) -> str:
        """Return what the soak's baseline lacks before all traffic moves at once. Raises NoLeader."""
        if rollout.phase is not RolloutPhase.LOADING or rollout.strategy not in FULL:
            return ""
        arms = self._slis.arms_of(GateWindow(rollout.deployment, step_name(rollout)))
        return missing(gate_plan(rollout, 1.0), STABLE, arms.get(rollout.stable_digest, ArmWindow()))

    def _paging(self, rollout: Rollout, digest: str) -> set[str]:
        alerts = self._slis.arm_alerts(ArmKey(rollout.deployment, digest), rollout.meta.create_unix_s)
        return {f"{sli} of {priority}" for (priority, sli), alert in alerts.items() if alert in _PAGING}

    def _without_chatter(self, before: Rollout, after: Rollout) -> Rollout:
        """Return the state; unchanged where only what it shows differs and that was written a moment ago."""
        name, now_s = before.meta.name, self._clock.monotonic_s()
        if after == before or replace(after, message=before.message, gates=before.gates) != before:
            return after
        if now_s - self._message_s.get(name, -_MESSAGE_S) < _MESSAGE_S:
            return before
        self._message_s[name] = now_s
        return after


def judged(
    rollout: Rollout, route: ModelRoute, windows: Mapping[str, ArmWindow], *, lasted_ratio: float = 1.0
) -> dict[str, GateReport]:
    """Return the gate of each candidate. ``windows`` has what was measured in the step, by version digest.

    ``lasted_ratio``: how long the stable version was measured, over how long the candidates were.
    """
    baseline = windows.get(rollout.stable_digest, ArmWindow())
    found = {}
    for arm in rollout.arms:
        candidate = windows.get(arm.version_digest, ArmWindow())
        if not route.stable.replicas:  # A safety pack loads no worker.
            load = 1.0
        elif rollout.shadow is None and rollout.phase is RolloutPhase.RUNNING:
            load = load_ratio(route, arm.name)
        else:
            load = measured_ratio(route, arm.name, baseline.requests, candidate.requests * lasted_ratio)
        found[arm.name] = storable(judge(gate_plan(rollout, load), baseline, candidate))
    return found


def storable(report: GateReport) -> GateReport:
    """Return the report with finite numbers: a bound is infinite until enough was measured, 0 as stored."""
    evidence = tuple(
        replace(
            one,
            statistic=_finite(one.statistic),
            bound=_finite(one.bound) if math.isfinite(one.bound) else 0.0,
        )
        for one in report.evidence
    )
    return replace(report, evidence=evidence)


def _finite(value: float) -> float:
    return 0.0 if math.isnan(value) else max(-_LARGEST, min(_LARGEST, value))


def gate_plan(rollout: Rollout, load: float) -> GatePlan:
    """Return how an arm is compared in the present step. ``load`` is its replica's over a stable one's.

    With less load, whole engine steps are compared instead of shares of them: smaller batches have larger
    shares. What more load makes worse does not count. Nor do the latencies of copies, which run in another
    class than the requests that they are compared with.
    """
    metrics = rollout.gate.metrics or tuple(DEFAULT_BOUNDS)
    shadow = rollout.strategy is RolloutStrategy.SHADOW
    bounds = {**PACK_BOUNDS, **DEFAULT_BOUNDS, **(_OF_COPIES if shadow else {})}
    of_arms = shadow or rollout.strategy is RolloutStrategy.AB
    gates = len(rollout.arms) if of_arms else sum(step.weight_bp < WHOLE_BP for step in rollout.steps)
    step = rollout.steps[rollout.step] if rollout.step < len(rollout.steps) else None
    plan_ = GatePlan(
        bounds={metric: bounds[metric] for metric in metrics},
        gates=gates if shadow else gates + 1,  # the soak is one more
        min_sessions=rollout.gate.min_sessions,
        accepted={**_unequal(load, rollout), **rollout.gate.accepted},
        whole_steps=load < _EQUAL_LOAD[0] and not shadow,
    )
    return plan_ if step is None else replace(plan_, min_requests=step.min_requests)


def _unequal(load: float, rollout: Rollout) -> dict[GateMetric, str]:
    """Return the metrics that the load, or being a copy, makes incomparable, and why."""
    text = f"a replica has {load:.2f} times the traffic of a stable one"
    if load > _EQUAL_LOAD[1]:
        return dict.fromkeys((GateMetric.COST, *_LATENCIES), text)
    if rollout.shadow is None:
        return {}
    of_copies = dict.fromkeys(_LATENCIES, "copies run in the lowest class")
    return of_copies | ({GateMetric.COST: text} if load < _EQUAL_LOAD[0] else {})


def _shortages(rollout: Rollout, unplaced: Mapping[str, Unplaced]) -> dict[str, str]:
    found = {arm.name: unplaced.get(f"{rollout.deployment}@{arm.version_digest}") for arm in rollout.arms}
    return {name: unplaced_message(one) for name, one in found.items() if one is not None}
