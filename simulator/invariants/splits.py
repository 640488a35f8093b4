"""The stored split of a rollout at each of its writes: whole, by one writer, never larger after an abort, and
never final after a failed gate.
"""

from __future__ import annotations

from typing import Final

from services.controlplane.rollouts.records import Rollout, RolloutPhase
from services.core.records import DEPLOYMENTS, EVENTS, ROLLOUTS, Deployment, load
from services.core.rollouts.routes import ROUTES, WHOLE_BP, ModelRoute
from services.ports.store import Delete, Operation, Put
from simulator.fleet.assembly import SimFleet
from simulator.fleet.invariant import Invariant
from simulator.fleet.rollout_watch import LEADER_KEY, AppliedWrite, RolloutListener
from simulator.fleet.spec import MODEL

SPLIT: Final = "split"
WRITERS: Final = "two-writers"
OUTCOME: Final = "rollout-outcome"
FAILED_GATE: Final = "failed-gate"

_NEXT: Final = {
    RolloutPhase.LOADING: {RolloutPhase.RUNNING, RolloutPhase.SOAKING, RolloutPhase.ROLLING_BACK},
    RolloutPhase.RUNNING: {RolloutPhase.SOAKING, RolloutPhase.ROLLING_BACK},
    RolloutPhase.SOAKING: {RolloutPhase.FINISHING, RolloutPhase.ROLLING_BACK},
    RolloutPhase.FINISHING: {RolloutPhase.COMPLETED},
    RolloutPhase.ROLLING_BACK: {RolloutPhase.ABORTED},
}


class SplitHistory(RolloutListener, Invariant):
    """The one rollout of a run as it is stored. ``expected``: the phase in which it has to end."""

    def __init__(self, stable: str, candidate: str, expected: RolloutPhase) -> None:
        self.stable, self.candidate = stable, candidate
        self._expected = expected
        self.rollout: Rollout | None = None
        self.phases: list[RolloutPhase] = []
        self.writers: dict[str, int] = {}  # how many writes of the rollout each made
        self.aborted_s: float | None = None
        self.aborted_revision = 0
        self._failed = set[str]()  # metrics of its gates
        # Of a soak that ended without a baseline: a gateway and the leader were lost before a snapshot.
        self._unjudged = False
        self._route: ModelRoute | None = None
        self._weight_bp = 0
        self._digest = stable  # the deployment's version

    def watch(self, fleet: SimFleet) -> None:
        self._fleet = fleet
        fleet.routes.listeners.append(self)

    def written(self, written: AppliedWrite) -> None:
        keys = [one.key for one in written.operations]
        if LEADER_KEY in keys or all(key.startswith(EVENTS) for key in keys):
            return
        self._check_writer(written)
        puts = {one.key: one for one in written.operations if isinstance(one, Put)}
        rollout = next(
            (load(put.value, Rollout) for key, put in puts.items() if key.startswith(ROLLOUTS)), None
        )
        self._apply(written.operations)
        if rollout is None:
            if any(key.startswith((ROUTES, DEPLOYMENTS)) for key in keys):
                self._add(SPLIT, f"{written.writer} wrote {', '.join(keys)} without the rollout")
            return
        self.writers[written.writer] = self.writers.get(written.writer, 0) + 1
        self._advanced(rollout, written.revision)
        self._check_split(rollout)

    def at_rest(self, fleet: SimFleet) -> None:
        ended = None if self.rollout is None else self.rollout.phase
        if ended is not self._expected and not (self._unjudged and ended is RolloutPhase.COMPLETED):
            why = "" if self.rollout is None else self.rollout.message
            self._add(OUTCOME, f"it ended {ended}, not {self._expected}: {why}")

    def _apply(self, operations: tuple[Operation, ...]) -> None:
        for one in operations:
            if one.key == ROUTES + MODEL:
                self._route = None if isinstance(one, Delete) else load(one.value, ModelRoute)
            elif one.key == DEPLOYMENTS + MODEL and isinstance(one, Put):
                self._digest = load(one.value, Deployment).version_digest

    def _check_writer(self, written: AppliedWrite) -> None:
        """A control plane writes only while the store has its leader key."""
        leader, life = written.leader, f"{written.writer}/{written.life}"
        if written.writer in self._fleet.planes and (leader is None or leader.leader_id != life):
            keys = ", ".join(one.key for one in written.operations)
            who = "nobody" if leader is None else leader.leader_id
            self._add(WRITERS, f"{life} wrote {keys} while {who} led")

    def _advanced(self, rollout: Rollout, revision: int) -> None:
        before, self.rollout = self.rollout, rollout
        if before is None or before.phase is not rollout.phase:
            if before is not None and rollout.phase not in _NEXT.get(before.phase, ()):
                self._add(SPLIT, f"from {before.phase} to {rollout.phase}")
            self.phases.append(rollout.phase)
            self._fleet.trace.note("rollout", rollout.phase.value, rollout.message)
        self._failed.update(one for report in rollout.gates.values() for one in report.failed)
        if self._failed and rollout.phase in (RolloutPhase.FINISHING, RolloutPhase.COMPLETED):
            self._add(FAILED_GATE, f"{rollout.phase} although {', '.join(sorted(self._failed))} failed")
        if rollout.phase is RolloutPhase.FINISHING:
            lacks = [report.waits_for for report in rollout.gates.values()]
            self._unjudged |= any(one.startswith("the baseline") for one in lacks)
        if rollout.phase is RolloutPhase.ROLLING_BACK and self.aborted_s is None:
            self.aborted_s, self.aborted_revision = self._fleet.loop.now_s, revision

    def _check_split(self, rollout: Rollout) -> None:
        route, wanted = self._route, _weight_of(rollout)
        if route is not None:
            self._fleet.violations.integrity(SPLIT, "route", route.check_integrity)
        arms = () if route is None else route.arms
        has_bp = sum(arm.weight_bp for arm in arms if arm.version_digest == self.candidate)
        if rollout.ended:
            if route is not None:
                self._add(SPLIT, f"{rollout.phase} with a route")
        elif has_bp != wanted:
            self._add(SPLIT, f"{rollout.phase} with {has_bp} for the candidate, not {wanted}")
        elif has_bp < self._weight_bp and rollout.phase is not RolloutPhase.ROLLING_BACK:
            self._add(SPLIT, f"{rollout.phase} shrank the candidate from {self._weight_bp} to {has_bp}")
        elif has_bp and self.aborted_s is not None:
            self._add(SPLIT, f"{has_bp} for the candidate after the abort")
        self._weight_bp = max(self._weight_bp, has_bp)
        final = rollout.phase in (RolloutPhase.FINISHING, RolloutPhase.COMPLETED)
        if (self._digest == self.candidate) is not final:
            self._add(SPLIT, f"{rollout.phase} with the deployment at {self._digest}")

    def _add(self, invariant: str, text: str) -> None:
        self._fleet.violations.add(invariant, text)


def _weight_of(rollout: Rollout) -> int:
    """Return the candidate's weight that the state's phase and step allow."""
    match rollout.phase:
        case RolloutPhase.RUNNING:
            return rollout.steps[rollout.step].weight_bp
        case RolloutPhase.SOAKING | RolloutPhase.FINISHING:
            return WHOLE_BP
        case _:
            return 0
