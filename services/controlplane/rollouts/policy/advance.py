"""The next state of a rollout. Pure and level-triggered: it depends on states and times, not on what changed.

The order of what decides: a crash bound, a burn alert or a failed gate rolls back, also while paused; then
an operator's promotion; then the hold, the gate and the replicas of the next step. The soak is judged like a
step, by what the stable version did before it. ROLLING_BACK ends when no worker has a candidate, FINISHING
when every live worker refuses what was resolved before it: the old version may then stay warm. A revert of
what is final withdraws the candidates likewise, once the version before serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from services.controlplane.objectives.policy.gates import GateMetric, GateReport, Verdict
from services.controlplane.rollouts.policy.effects import (
    next_step_of,
    replicas_by_worker,
    replicas_for_weight,
    replicas_of_arm,
    step_name,
    weight_of_step,
)
from services.controlplane.rollouts.records import (
    FULL,
    STABLE,
    Inconclusive,
    Rollout,
    RolloutEvent,
    RolloutPhase,
    RolloutStrategy,
)
from services.core.records import AssignedVersion, Assignment, LoadedVersion, VersionState, Worker
from services.core.rollouts.routes import WHOLE_BP

Reports = Mapping[str, GateReport]
# Where all traffic moves at once: the longest wait for figures of the stable version to compare with.
BASELINE_S: Final = 60.0
# Reason of a version whose answers will not do, however often it is probed.
PROBE_FAILED: Final = "PROBE_FAILED"
_NAMED: Final = 8  # workers that a message names


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """One arm on the workers."""

    # Replicas that take requests.
    ready: int = 0
    # Workers that report it in any state.
    loaded: int = 0
    # Workers on which it failed for good; ``why`` is the reason of one of them.
    failed: int = 0
    why: str = ""
    engine_restarts: int = 0
    # The probe that its version fails on a worker.
    unanswered: str = ""
    # The objectives that its requests alone miss too fast.
    alarm: str = ""


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """What the fleet reports of a rollout."""

    replicas: int  # replicas of the deployment
    arms: Mapping[str, ArmFacts]  # arms on the workers, by name
    unplaced: Mapping[str, str] = field(default_factory=dict)  # why an arm lacks a worker, by name
    measured: bool = True  # completeness of the present step's sums, which a new leader lacks at first
    unmeasured: str = ""  # what the stable version has too little of for a comparison; empty: nothing
    route_revision: int = 0  # revision of the stored route; 0: none
    unfenced: tuple[str, ...] = ()  # live workers that have not confirmed it for a version that left
    version_digest: str = ""  # version of the deployment

    def arm(self, name: str) -> ArmFacts:
        return self.arms.get(name, ArmFacts())


def facts_of(
    rollout: Rollout,
    replicas: int,
    workers: Sequence[Worker],
    unplaced: Mapping[str, str],
    alarms: Mapping[str, str],
    *,
    of_pack: bool = False,
) -> RolloutFacts:
    """Return the facts of the stable version and of each candidate. ``alarms`` are by name.

    ``of_pack``: the versions are safety packs, which need no worker to be READY.
    """
    names = {rollout.stable_digest: STABLE, **{arm.version_digest: arm.name for arm in rollout.arms}}
    found = dict.fromkeys(names.values(), ArmFacts(ready=1)) if of_pack else dict[str, ArmFacts]()
    for worker in workers:
        for version in worker.versions:
            name = names.get(version.version_digest)
            if name is not None and version.deployment == rollout.deployment:
                found[name] = _with(found.get(name, ArmFacts()), version, draining=worker.draining)
    arms = {name: replace(facts, alarm=alarms.get(name, "")) for name, facts in found.items()}
    return RolloutFacts(replicas, arms, unplaced)


def _with(facts: ArmFacts, version: LoadedVersion, *, draining: bool) -> ArmFacts:
    ready = version.state is VersionState.READY and not draining
    # A version without a scheduled attempt, or after several, is not expected to load.
    lost = version.state is VersionState.FAILED and (not version.retry_unix_s or version.failed_attempts >= 3)
    why = f"{version.reason or 'FAILED'}: {version.message}" if lost else facts.why
    return ArmFacts(
        facts.ready + ready,
        facts.loaded + 1,
        facts.failed + lost,
        why,
        facts.engine_restarts + version.engine_restarts,
        version.message if version.reason == PROBE_FAILED else facts.unanswered,
    )


def unfenced_on(
    rollout: Rollout, workers: Sequence[Worker], assignments: Sequence[Assignment], route_revision: int
) -> tuple[str, ...]:
    """Return the live workers that have, or are assigned, a version that left and have not confirmed that
    they refuse the requests that were resolved for it before ``route_revision``.
    """
    is_back = rollout.phase is RolloutPhase.WITHDRAWING
    stays = rollout.stable_digest if is_back else rollout.final_arm.version_digest
    left = {rollout.stable_digest, *(arm.version_digest for arm in rollout.arms)} - {stays}

    def is_open(version: AssignedVersion | LoadedVersion) -> bool:
        mine = version.deployment == rollout.deployment and version.version_digest in left
        return mine and version.least_route_revision < route_revision

    assigned = {one.worker_id: one.versions for one in assignments}
    return tuple(
        worker.worker_id
        for worker in workers
        if any(map(is_open, worker.versions)) or any(map(is_open, assigned.get(worker.worker_id, ())))
    )


def advance(rollout: Rollout, facts: RolloutFacts, reports: Reports, now_unix_s: float) -> Rollout:
    """Return the rollout's next state, or the same one. ``reports`` has the present step's, by candidate."""
    match rollout.phase:
        case RolloutPhase.LOADING:
            return _loading(rollout, facts, now_unix_s)
        case RolloutPhase.RUNNING:
            return _running(rollout, facts, reports, now_unix_s)
        case RolloutPhase.SOAKING:
            return _soaking(rollout, facts, reports, now_unix_s)
        case RolloutPhase.FINISHING | RolloutPhase.WITHDRAWING:
            return _once_fenced(rollout, facts, now_unix_s)
        case RolloutPhase.RESTORING:
            return _once_restored(rollout, facts, now_unix_s)
        case RolloutPhase.ROLLING_BACK:
            return _once_gone(rollout, facts, now_unix_s)
        case _:
            return rollout


def rolled_back(rollout: Rollout, event: RolloutEvent) -> Rollout:
    """Return it with all new requests on the stable version."""
    return replace(_entered(rollout, RolloutPhase.ROLLING_BACK, event), paused=False, preparing_unix_s=0.0)


def _loading(rollout: Rollout, facts: RolloutFacts, now_unix_s: float) -> Rollout:
    waiting = _waiting(rollout, facts, 0)
    failed = _load_failure(rollout, facts, waiting, now_unix_s, since_unix_s=rollout.phase_unix_s)
    if failed is not None:
        return failed
    if waiting:
        return replace(rollout, message=waiting)
    if rollout.paused:
        return replace(rollout, message="paused before its first step")
    if rollout.strategy in FULL:
        left_s = min(BASELINE_S, rollout.gate.patience_s) - (now_unix_s - rollout.phase_unix_s)
        if facts.unmeasured and left_s > 0:
            return replace(rollout, message=f"{facts.unmeasured}; all traffic moves in {left_s:.0f} s anyway")
        return _soak(rollout, now_unix_s)
    event = RolloutEvent(now_unix_s, "STARTED", f"{_weights_text(rollout, 0)} of the sessions")
    if rollout.strategy is RolloutStrategy.CANARY and rollout.steps[0].weight_bp == WHOLE_BP:
        return _soak(rollout, now_unix_s)
    return replace(_entered(rollout, RolloutPhase.RUNNING, event), step=0, step_unix_s=now_unix_s)


def _running(rollout: Rollout, facts: RolloutFacts, reports: Reports, now_unix_s: float) -> Rollout:
    if (failed := _failed(rollout, facts, reports, now_unix_s)) is not None:
        return failed
    if rollout.strategy is not RolloutStrategy.CANARY:
        return _until_operator(rollout, facts, now_unix_s)
    if rollout.promote_to > rollout.step:
        return _next_step(rollout, facts, reports, now_unix_s, "promoted by an operator")
    if rollout.paused:
        return replace(rollout, message=f"paused at {_weights_text(rollout, rollout.step)}")
    step = rollout.steps[rollout.step]
    held_s = now_unix_s - rollout.step_unix_s
    report = reports.get(rollout.final_arm.name)
    if rollout.preparing:
        return _next_step(rollout, facts, reports, now_unix_s, _why_prepared(rollout, report))
    if report is not None and report.verdict is Verdict.PASS:
        if held_s >= step.hold_s:
            return _next_step(rollout, facts, reports, now_unix_s, "the gate passes")
        return replace(rollout, message=f"the gate passes; held for {step.hold_s:g} s")
    if held_s > step.hold_s + rollout.gate.patience_s and facts.measured:
        return _without_verdict(rollout, facts, reports, now_unix_s)
    waits = report.waits_for if report is not None else "no requests are reported yet"
    return replace(rollout, message=waits or "the gate is inconclusive so far")


def _without_verdict(rollout: Rollout, facts: RolloutFacts, reports: Reports, now_unix_s: float) -> Rollout:
    """Apply the policy of a step that its gate could not decide."""
    why = _no_verdict(rollout)
    match rollout.gate.inconclusive:
        case Inconclusive.PROMOTE:
            return _next_step(rollout, facts, reports, now_unix_s, why)
        case Inconclusive.ABORT:
            return rolled_back(rollout, _judged(rollout, "INCONCLUSIVE", why, reports, now_unix_s))
        case Inconclusive.WAIT:
            return replace(rollout, message=f"{why}: promote or abort it")


def _no_verdict(rollout: Rollout) -> str:
    return f"no verdict within {rollout.gate.patience_s:g} s after the hold"


def _why_prepared(rollout: Rollout, report: GateReport | None) -> str:
    """Return why the next step's replicas are loaded, by the gate as it is now."""
    if report is not None and report.verdict is Verdict.PASS:
        return "the gate passes"
    undecided = rollout.gate.inconclusive is Inconclusive.PROMOTE
    return _no_verdict(rollout) if undecided else "the gate passed"


def _next_step(
    rollout: Rollout, facts: RolloutFacts, reports: Reports, now_unix_s: float, why: str
) -> Rollout:
    """Return the next step once its replicas are READY."""
    step = next_step_of(rollout)
    weight_bp = weight_of_step(rollout, step)
    since_unix_s = rollout.preparing_unix_s or now_unix_s
    waiting = _waiting(rollout, facts, weight_bp)
    failed = _load_failure(rollout, facts, waiting, now_unix_s, since_unix_s=since_unix_s)
    if failed is not None:
        return failed
    if waiting:
        return replace(rollout, preparing_unix_s=since_unix_s, message=waiting)
    event = _judged(rollout, "STEP", f"{weight_bp / 100:g} %: {why}", reports, now_unix_s)
    if weight_bp == WHOLE_BP:
        return _soak(rollout.noted(event), now_unix_s)
    return replace(rollout.noted(event), step=step, step_unix_s=now_unix_s, preparing_unix_s=0.0)


def _until_operator(rollout: Rollout, facts: RolloutFacts, now_unix_s: float) -> Rollout:
    """An A/B test runs until it is promoted or aborted, a shadow until it is aborted."""
    if rollout.strategy is RolloutStrategy.SHADOW:
        return replace(rollout, message="copies run until an operator aborts it")
    if not rollout.target:
        return replace(rollout, message="until an operator promotes an arm or aborts it")
    if waiting := _waiting(rollout, facts, WHOLE_BP):
        return replace(rollout, message=waiting)
    return _soak(rollout, now_unix_s)


def _soaking(rollout: Rollout, facts: RolloutFacts, reports: Reports, now_unix_s: float) -> Rollout:
    """Return the rollout as final after its soak, an instant one once its gate passes.

    A gate that did not decide meanwhile does not hold it: the soak is its patience.
    """
    if (failed := _failed(rollout, facts, reports, now_unix_s)) is not None:
        return failed
    left_s = rollout.soak_s - (now_unix_s - rollout.phase_unix_s)
    if rollout.paused:
        return replace(rollout, message="paused with all traffic; the version before is warm")
    report = reports.get(rollout.final_arm.name)
    passed = report is not None and report.verdict is Verdict.PASS
    if rollout.promote_to <= rollout.step and not (passed and rollout.strategy is RolloutStrategy.INSTANT):
        if left_s > 0 or not facts.measured:
            gate = "the gate passes" if passed else "the gate is inconclusive so far"
            return replace(rollout, message=f"the version before is warm for {rollout.soak_s:g} s; {gate}")
        if not passed and rollout.gate.inconclusive is Inconclusive.ABORT:
            why = f"no verdict within the soak of {rollout.soak_s:g} s"
            return rolled_back(rollout, _judged(rollout, "INCONCLUSIVE", why, reports, now_unix_s))
    text = f"{rollout.final_arm.name} is the deployment's version"
    return _entered(rollout, RolloutPhase.FINISHING, _judged(rollout, "FINAL", text, reports, now_unix_s))


def _soak(rollout: Rollout, now_unix_s: float) -> Rollout:
    event = RolloutEvent(now_unix_s, "ALL_TRAFFIC", f"{rollout.final_arm.name} has all traffic")
    hold_s = next((one.hold_s for one in rollout.steps if one.weight_bp == WHOLE_BP), 0.0)
    return replace(
        _entered(rollout, RolloutPhase.SOAKING, event),
        baseline=step_name(rollout),
        soak_s=max(rollout.soak_s, hold_s),
        step=max(rollout.step, rollout.promote_to),
        step_unix_s=now_unix_s,
    )


def _once_fenced(rollout: Rollout, facts: RolloutFacts, now_unix_s: float) -> Rollout:
    """Return the rollout as cut over or reverted once every live worker refuses what was resolved before."""
    is_back, revision = rollout.phase is RolloutPhase.WITHDRAWING, facts.route_revision
    name, what = (STABLE, "serves again") if is_back else (rollout.final_arm.name, "is final")
    if facts.unfenced or not revision:
        some = ", ".join(facts.unfenced[:_NAMED])
        message = f"{name} {what}; not yet confirmed by {len(facts.unfenced)} workers: {some}"
        return replace(rollout, message=message)
    message = f"from route revision {revision} on every new request is answered by {name}"
    if is_back:
        event = RolloutEvent(now_unix_s, RolloutPhase.REVERTED.name, message)
        return _entered(rollout, RolloutPhase.REVERTED, event)
    event = RolloutEvent(now_unix_s, "CUT_OVER", f"cut over: {message}")
    return replace(_entered(rollout, RolloutPhase.COMPLETED, event), cutover_revision=revision)


def _once_restored(rollout: Rollout, facts: RolloutFacts, now_unix_s: float) -> Rollout:
    """Return the rollout as withdrawing its candidates once the version before serves in their place.

    It ends where the deployment got yet another version: nothing is to be restored then.
    """
    if facts.version_digest != rollout.stable_digest:
        message = "the deployment got another version meanwhile"
        event = RolloutEvent(now_unix_s, RolloutPhase.REVERTED.name, message)
        return _entered(rollout, RolloutPhase.REVERTED, event)
    before = max((facts.arm(arm.name).ready for arm in rollout.arms), default=0)
    ready, needed = facts.arm(STABLE).ready, min(max(1, facts.replicas), before)
    if ready < needed:
        return replace(rollout, message=f"{ready} of {needed} replicas of the version before are READY")
    event = RolloutEvent(now_unix_s, "RESTORED", "the version before serves every new request")
    return _entered(rollout, RolloutPhase.WITHDRAWING, event)


def _once_gone(rollout: Rollout, facts: RolloutFacts, now_unix_s: float) -> Rollout:
    """Return the rollout as aborted once no worker has a candidate."""
    message = "every request is on the stable version"
    if left := sum(facts.arm(arm.name).loaded for arm in rollout.arms):
        return replace(rollout, message=f"{message}; {left} replicas end their requests")
    return _entered(
        rollout, RolloutPhase.ABORTED, RolloutEvent(now_unix_s, RolloutPhase.ABORTED.name, message)
    )


def _failed(rollout: Rollout, facts: RolloutFacts, reports: Reports, now_unix_s: float) -> Rollout | None:
    """Return the rollback of a candidate that crashes, fails its probe or gate, or burns an error budget."""
    lost = _crashed(rollout, facts, now_unix_s) or _unanswered(rollout, facts, now_unix_s)
    if lost is not None:
        return lost
    for name, found in sorted(reports.items()):
        if found.verdict is Verdict.FAIL:
            failed = ", ".join(found.failed)
            event = RolloutEvent(now_unix_s, "GATE_FAILED", f"{name} fails {failed}", name, found.evidence)
            return rolled_back(rollout, event)
    return None


def _judged(rollout: Rollout, what: str, message: str, reports: Reports, now_unix_s: float) -> RolloutEvent:
    """Return an event of the final arm with the evidence of its gate."""
    name = rollout.final_arm.name
    report = reports.get(name)
    return RolloutEvent(now_unix_s, what, message, name, report.evidence if report is not None else ())


def _unanswered(rollout: Rollout, facts: RolloutFacts, now_unix_s: float) -> Rollout | None:
    """Return the rollback of a candidate that fails its probe on a worker, also on one that loads it again.

    One worker is enough: it is the version, or it was not proven that it is not.
    """
    for arm in rollout.arms:
        if why := facts.arm(arm.name).unanswered:
            event = RolloutEvent(now_unix_s, PROBE_FAILED, f"{arm.name}: {why}"[:512], arm.name)
            return rolled_back(rollout, event)
    return None


def _crashed(rollout: Rollout, facts: RolloutFacts, now_unix_s: float) -> Rollout | None:
    most = rollout.gate.max_engine_restarts
    for arm in rollout.arms:
        restarts = facts.arm(arm.name).engine_restarts
        if most and restarts >= most:
            message = f"the engines of {arm.name} crashed {restarts} times"
            return rolled_back(rollout, RolloutEvent(now_unix_s, "ENGINE_CRASHES", message, arm.name))
        if alarm := facts.arm(arm.name).alarm:
            message = f"{arm.name} burns the error budget of {alarm}"
            return rolled_back(rollout, RolloutEvent(now_unix_s, "BURN_RATE", message, arm.name))
    return None


def _load_failure(
    rollout: Rollout, facts: RolloutFacts, waiting: str, now_unix_s: float, *, since_unix_s: float
) -> Rollout | None:
    """Return the rollback of candidates that do not load. ``waiting``: see ``_waiting``, since then."""
    if (unanswered := _unanswered(rollout, facts, now_unix_s)) is not None:
        return unanswered
    for arm in rollout.arms:
        found = facts.arm(arm.name)
        if found.failed and found.failed == found.loaded:
            event = RolloutEvent(now_unix_s, "LOAD_FAILED", f"{arm.name}: {found.why}"[:512], arm.name)
            return rolled_back(rollout, event)
    waited_s = now_unix_s - since_unix_s
    if waited_s <= rollout.load_timeout_s or not waiting:
        return None
    message = f"{waiting} after {waited_s:.0f} s"
    return rolled_back(rollout, RolloutEvent(now_unix_s, "LOAD_TIMEOUT", message))


def _waiting(rollout: Rollout, facts: RolloutFacts, weight_bp: int) -> str:
    """Return which candidate lacks READY replicas for a weight, empty if none does."""
    for arm in rollout.arms:
        needed = _needed(rollout, arm.name, weight_bp, facts.replicas)
        ready = facts.arm(arm.name).ready
        if ready < needed:
            why = facts.unplaced.get(arm.name, "")
            return f"{arm.name}: {ready} of {needed} replicas are READY" + (f" ({why})" if why else "")
    return ""


def _needed(rollout: Rollout, name: str, weight_bp: int, replicas: int) -> int:
    if rollout.strategy in FULL:
        return max(1, replicas)
    if rollout.strategy in (RolloutStrategy.AB, RolloutStrategy.SHADOW):
        return replicas_of_arm(rollout, name, replicas)
    if weight_bp == 0 and rollout.steps and rollout.strategy is RolloutStrategy.CANARY:
        weight_bp = rollout.steps[0].weight_bp
    find = replicas_by_worker if rollout.by_worker else replicas_for_weight
    return find(weight_bp, replicas)


def _weights_text(rollout: Rollout, step: int) -> str:
    if rollout.strategy is RolloutStrategy.AB:
        return ", ".join(f"{arm.name} {arm.weight_bp / 100:g} %" for arm in rollout.arms)
    if rollout.strategy is RolloutStrategy.SHADOW:
        return "copies" if rollout.shadow is None else f"copies of {rollout.shadow.fraction_bp / 100:g} %"
    return f"{rollout.final_arm.name} {rollout.steps[step].weight_bp / 100:g} %"


def _entered(rollout: Rollout, phase: RolloutPhase, event: RolloutEvent) -> Rollout:
    return replace(rollout.noted(event), phase=phase, phase_unix_s=event.time_unix_s)


def accepted(rollout: Rollout, metrics: Mapping[GateMetric, str]) -> Rollout:
    """Return it with metrics that an operator accepts, each with its reason."""
    return replace(rollout, gate=replace(rollout.gate, accepted={**rollout.gate.accepted, **metrics}))
