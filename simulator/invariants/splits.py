"""The stored split of a rollout at each of its writes: whole, by one writer, never larger after an abort, and
never final after a failed gate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from services.controlplane.rollouts.records import Rollout, RolloutPhase
from services.core.generation import StartSpec
from services.core.records import DEPLOYMENTS, EVENTS, ROLLOUTS, Deployment, VersionState, load
from services.core.rollouts.routes import ROUTES, WHOLE_BP, ModelRoute, SplitCaller
from services.gateway.catalog import Route
from services.gateway.events import Accepted
from services.gateway.splits import MAX_AGE_S
from services.ports.store import Delete, Operation, Put
from simulator.fleet.assembly import STORE, SimFleet
from simulator.fleet.clients.client import RequestRecord, request_number
from simulator.fleet.grant_watch import GrantListener
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
    RolloutPhase.FINISHING: {RolloutPhase.COMPLETED, RolloutPhase.RESTORING},
    RolloutPhase.COMPLETED: {RolloutPhase.RESTORING},
    RolloutPhase.RESTORING: {RolloutPhase.WITHDRAWING},
    RolloutPhase.WITHDRAWING: {RolloutPhase.REVERTED},
    RolloutPhase.ROLLING_BACK: {RolloutPhase.ABORTED},
}
_TAKEN_BACK: Final = (RolloutPhase.ROLLING_BACK, RolloutPhase.RESTORING)


class SplitHistory(RolloutListener, Invariant):
    """The one rollout of a run as it is stored. ``expected``: the phase in which it has to end."""

    def __init__(self, stable: str, candidate: str, expected: RolloutPhase) -> None:
        self.stable, self.candidate = stable, candidate
        self._expected = expected
        self.rollout: Rollout | None = None
        self.phases: list[RolloutPhase] = []
        self.writers: dict[str, int] = {}  # how many writes of the rollout each made
        # When the candidate was taken back: by an abort, or by a revert once it was final.
        self.aborted_s: float | None = None
        self.aborted_revision = 0
        self.withdrawn = ""  # the version whose end of service is acknowledged
        self._failed = set[str]()  # metrics of its gates
        # Of a soak that ended without a baseline: a gateway and the leader were lost before a snapshot.
        self._unjudged = False
        self._route: ModelRoute | None = None
        self._weight_bp = 0
        self._digest = stable  # the deployment's version

    def watch(self, fleet: SimFleet) -> None:
        super().watch(fleet)
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
        ends = {RolloutPhase.COMPLETED: self.stable, RolloutPhase.REVERTED: self.candidate}
        self.withdrawn = ends.get(rollout.phase, "")
        if rollout.phase in _TAKEN_BACK and self.aborted_s is None:
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
        elif has_bp < self._weight_bp and self.aborted_s is None:
            self._add(SPLIT, f"{rollout.phase} shrank the candidate from {self._weight_bp} to {has_bp}")
        elif has_bp and self.aborted_s is not None:
            self._add(SPLIT, f"{has_bp} for the candidate after the abort")
        self._weight_bp = max(self._weight_bp, has_bp)
        final = rollout.phase in (RolloutPhase.FINISHING, RolloutPhase.COMPLETED)
        if (self._digest == self.candidate) is not final:
            self._add(SPLIT, f"{rollout.phase} with the deployment at {self._digest}")


def _weight_of(rollout: Rollout) -> int:
    """Return the candidate's weight that the state's phase and step allow."""
    match rollout.phase:
        case RolloutPhase.RUNNING:
            return rollout.steps[rollout.step].weight_bp
        case RolloutPhase.SOAKING | RolloutPhase.FINISHING:
            return WHOLE_BP
        case _:
            return 0


ONE_ARM: Final = "one-arm"
STICKY: Final = "sticky"
LATE: Final = "late-start"
STALE: Final = "stale-view"
FENCE: Final = "route-fence"
PROBE: Final = "unprobed-start"
CUTOVER: Final = "after-cutover"
ACTUATION_S: Final = 5.0
_PLANE: Final = "the leading control plane"
# The store confirms a view every 2 s.
_FRESH_S: Final = 3.0
_SERVES: Final = (VersionState.READY, VersionState.RESTARTING)


@dataclass(slots=True)
class _Seen:
    """A session: the first route revision that gave it the candidate, and the last that gave it the stable
    version although the candidate could be had."""

    moved: int = 1 << 62
    stayed: int = -1


@dataclass(slots=True)
class _Request:
    """A request as it was accepted last, and the version and route revision of its last start."""

    request_id: str
    accepted: str
    started: str = ""
    revision: int = 0


class Arms(RolloutListener, GrantListener, Invariant):
    """``reached`` counts what requests went through: accepted for the candidate; accepted again for another
    version; resolved by a view beyond its age."""

    def __init__(self, history: SplitHistory, *, answers: bool = True) -> None:
        """``answers``: whether the candidate answers its probe."""
        self._history = history
        self._answers = answers
        self._sessions: dict[tuple[str, str], _Seen] = {}
        self._requests: dict[int, _Request] = {}
        self._disturbed_s: dict[str, float] = {}
        self.reached: Counter[str] = Counter({"on candidate": 0, "rerouted": 0, "stale view": 0})

    def watch(self, fleet: SimFleet) -> None:
        super().watch(fleet)
        fleet.routes.listeners.append(self)
        fleet.grants.listeners.append(self)
        fleet.clients.on_accepted = self.accepted

    def sample(self, fleet: SimFleet) -> None:
        """Note which parts of the fleet cannot receive or send a change now."""
        now_s = fleet.loop.now_s
        if not fleet.processes[STORE].running:
            self._disturbed_s[STORE] = now_s
        if fleet.plane is None:
            self._disturbed_s[_PLANE] = now_s
        for name, worker in fleet.workers.items():
            if not worker.process.running:
                self._disturbed_s[name] = now_s
        for name, gateway in fleet.gateways.items():
            if not gateway.process.running or gateway.routes.age_s() > _FRESH_S:
                self._disturbed_s[name] = now_s

    # --- resolutions --------------------------------------------------------------------------------

    def resolved(self, gateway: str, caller: SplitCaller, route: Route) -> None:
        history, node = self._history, self._fleet.gateways[gateway]
        is_candidate = route.version_digest == history.candidate
        if route.arm and node.routes.age_s() > MAX_AGE_S:
            self.reached["stale view"] += 1
            held = node.catalog.resolve(route.model)
            if route.version_digest != held.version_digest:
                self._add(STALE, f"{gateway} gave {route.arm} by a view of {node.routes.age_s():.1f} s ago")
            return
        if is_candidate and self._is_aborted(route.route_revision) and self._is_late(STORE, gateway):
            self._add(LATE, f"{gateway} gave the candidate by revision {route.route_revision}")
        seen = self._sessions.setdefault((caller.tenant, caller.session_key), _Seen())
        if is_candidate:
            seen.moved = min(seen.moved, route.route_revision)
        elif self._could_move(route, gateway):
            seen.stayed = max(seen.stayed, route.route_revision)
        if seen.stayed >= seen.moved:
            self._add(STICKY, f"{caller.session_key} had the candidate by {seen.moved}, not by {seen.stayed}")
            seen.stayed = -1

    def _could_move(self, route: Route, gateway: str) -> bool:
        """Whether the candidate was open by that route and served by that gateway's view."""
        history = self._history
        aborted = history.aborted_revision
        if aborted and route.route_revision >= aborted:
            return False
        view = self._fleet.gateways[gateway].versions.view
        return any(
            one.version_digest == history.candidate and one.state in _SERVES
            for held in view.values()
            for one in held.record.versions
        )

    # --- requests -----------------------------------------------------------------------------------

    def accepted(self, record: RequestRecord, accepted: Accepted) -> None:
        history, digest = self._history, accepted.version_digest
        before = self._requests.get(record.number)
        found = _Request(accepted.request_id, digest)
        if before is not None and before.accepted != digest:
            self.reached["rerouted"] += before.request_id == accepted.request_id
            if record.output_tokens:
                self._add(ONE_ARM, f"request {record.number} has output and is accepted for another version")
        if before is not None and before.request_id == accepted.request_id:
            found.started, found.revision = before.started, before.revision
        if digest not in (history.stable, history.candidate):
            self._add(ONE_ARM, f"request {record.number} is accepted for {digest}")
        self.reached["on candidate"] += digest == history.candidate
        self._requests[record.number] = found

    def started(self, worker_id: str, spec: StartSpec) -> None:
        generation = spec.generation
        number, digest = request_number(generation.sampling.seed), spec.grant.version_digest
        revision, host = generation.route_revision, self._fleet.workers[worker_id].host
        if digest == self._history.candidate and not self._answers:
            self._add(PROBE, f"{worker_id} started request {number} on a version that failed its probe")
        request = self._requests.get(number)
        if request is not None and request.request_id == generation.request_id:
            if digest != request.accepted:
                self._add(ONE_ARM, f"request {number} started on another version than it was accepted for")
            moved = request.started not in ("", digest)
            # An abort removes the split: the stable version has the older revision of the deployment again.
            returned = bool(self._history.aborted_revision) and digest == self._history.stable
            if moved and (spec.produced_ids or (revision <= request.revision and not returned)):
                self._add(ONE_ARM, f"request {number} went on on another version")
            request.started, request.revision = digest, revision
        if spec.produced_ids:
            return
        if revision < host.least_route_revision(digest):
            self._add(FENCE, f"{worker_id} started request {number} by revision {revision}")
        if digest == self._history.withdrawn:
            self._add(CUTOVER, f"{worker_id} started request {number} on a version that was withdrawn")
        aborted = digest == self._history.candidate and self._is_aborted(revision)
        if aborted and self._is_late(STORE, _PLANE, worker_id):
            self._add(LATE, f"{worker_id} started request {number} on the aborted version")

    def closed(self, record: RequestRecord) -> None:
        """A client's request ended."""
        request = self._requests.pop(record.number, None)
        if record.finished and (request is None or request.started not in ("", request.accepted)):
            self._add(ONE_ARM, f"request {record.number} ended on another version than it was accepted for")

    # --- abort ----------------------------------------------------------------------------------------

    def _is_aborted(self, revision: int) -> bool:
        return revision < self._history.aborted_revision

    def _is_late(self, *needed: str) -> bool:
        """Whether the abort, and what kept it from the needed parts, is longer ago than allowed."""
        assert self._history.aborted_s is not None
        since_s = max(self._history.aborted_s, *(self._disturbed_s.get(name, 0.0) for name in needed))
        return self._fleet.loop.now_s - since_s > ACTUATION_S
