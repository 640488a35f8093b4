"""A rollout driven against the planner and workers that load, retire and unload; time is the test's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from services.controlplane.objectives.policy.gates import GateReport, Verdict
from services.controlplane.policy.assign import Unplaced
from services.controlplane.rollouts.policy.advance import (
    RolloutFacts,
    advance,
    facts_of,
    unfenced_on,
)
from services.controlplane.rollouts.policy.effects import deployment_of, kept_versions, route_of
from services.controlplane.rollouts.records import (
    Rollout,
    RolloutArm,
    RolloutPhase,
    RolloutStep,
    RolloutStrategy,
)
from services.core.records import Meta
from services.core.rollouts.routes import ModelRoute, RevisedRoute
from tests.unit.controlplane.policy.test_update import NEW, OLD, Fleet

STEPS = tuple(RolloutStep(bp, hold_s=10.0) for bp in (100, 500, 2500, 5000, 10_000))


def report(verdict: Verdict, waits_for: str = "") -> GateReport:
    return GateReport(verdict, (), 40, 40, waits_for)


def rollout(strategy: RolloutStrategy = RolloutStrategy.CANARY, **fields: object) -> Rollout:
    values: dict[str, object] = {
        "arms": (RolloutArm("canary", "v2", NEW),),
        "steps": STEPS if strategy is RolloutStrategy.CANARY else (),
        "soak_s": 20.0,
        "load_timeout_s": 100.0,
        "stable_version": "v1",
        "stable_digest": OLD,
        **fields,
    }
    return Rollout(Meta("r", create_unix_s=1.0), "d", strategy, **values)  # type: ignore[arg-type]


class Driven:
    """Each tick is a second: the rollout advances, its effects apply, the planner plans and the workers
    step.
    """

    def __init__(self, found: Rollout, rooms: tuple[int, ...] = (2, 2)) -> None:
        self.fleet = Fleet(list(rooms))
        self.fleet.run(10)
        self.rollout = found
        self.now_s = 0.0
        self.verdict: Verdict | None = Verdict.PASS
        self.alarms: dict[str, str] = {}
        self.measured = True
        self.unmeasured = ""
        self.routes: list[ModelRoute | None] = []
        self.apply()

    @property
    def phase(self) -> RolloutPhase:
        return self.rollout.phase

    @property
    def facts(self) -> RolloutFacts:
        workers = [worker.record(name) for name, worker in self.fleet.workers.items()]
        missing = [one.deployment for one in self.fleet.actions if isinstance(one, Unplaced)]
        unplaced = {"canary": "no room"} if f"d@{NEW}" in missing else {}
        found = facts_of(self.rollout, self.fleet.wanted.replicas, workers, unplaced, self.alarms)
        revision = self.fleet.routes[0].revision if self.fleet.routes else 0
        unfenced = unfenced_on(self.rollout, workers, list(self.fleet.assignments.values()), revision)
        return replace(
            found,
            measured=self.measured,
            unmeasured=self.unmeasured,
            route_revision=revision,
            unfenced=unfenced,
            version_digest=self.fleet.wanted.version_digest,
        )

    @property
    def reports(self) -> Mapping[str, GateReport]:
        if self.verdict is None or self.phase not in (RolloutPhase.RUNNING, RolloutPhase.SOAKING):
            return {}
        return {arm.name: report(self.verdict) for arm in self.rollout.arms}

    def apply(self) -> None:
        """Apply what follows from the state, as one write would."""
        self.fleet.wanted = deployment_of(self.rollout, self.fleet.wanted)
        route = route_of(self.rollout, self.fleet.wanted.replicas)
        if route is not None:
            route.check_integrity()
        if route is None or not self.routes or route != self.routes[-1]:
            self.fleet.routes = [] if route is None else [RevisedRoute(route, round(self.now_s) + 1)]
        self.fleet.kept = kept_versions([self.rollout], [self.fleet.wanted])
        self.routes.append(route)

    def operate(self, change: Callable[[Rollout], Rollout]) -> None:
        self.rollout = change(self.rollout)
        self.apply()

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_s += 1.0
            self.rollout = advance(self.rollout, self.facts, self.reports, self.now_s)
            self.apply()
            self.fleet.step()

    def until(self, phase: RolloutPhase, most: int = 300) -> None:
        for _ in range(most):
            if self.phase is phase:
                return
            self.tick()
        raise AssertionError(f"still {self.phase}: {self.rollout.message}")

    def weight_bp(self) -> int:
        """The candidate's share of new requests now."""
        route = self.routes[-1]
        if route is None:
            return 10_000 if self.fleet.wanted.version_digest == NEW else 0
        return sum(arm.weight_bp for arm in route.arms if arm.version_digest == NEW)

    def whats(self) -> list[str]:
        return [event.what for event in self.rollout.history]


def at(found: Rollout, phase: RolloutPhase) -> Rollout:
    return replace(found, phase=phase)
