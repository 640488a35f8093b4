"""What operators do to a rollout. Pure; each is refused in a phase where it means nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.controlplane.objectives.policy.gates import GateMetric
from services.controlplane.rollouts.policy.advance import accepted, rolled_back
from services.controlplane.rollouts.records import (
    ABORTABLE,
    UNDONE,
    Rollout,
    RolloutEvent,
    RolloutPhase,
    RolloutStrategy,
)
from services.core.errors import FailedPrecondition, InvalidInput
from services.core.rollouts.routes import WHOLE_BP


@dataclass(frozen=True, slots=True)
class Promotion:
    """``to_end`` moves all traffic at once. ``arm`` names one of an A/B test. ``accepted`` has the metrics
    that no longer count, and why.

    The step does not change if only ``accepted`` is set.
    """

    to_end: bool = False
    arm: str = ""
    accepted: Mapping[GateMetric, str] = field(default_factory=dict)


def abort(rollout: Rollout, reason: str, now_unix_s: float) -> Rollout:
    """Return it with all new requests on the stable version. Raises FailedPrecondition once it is final."""
    if rollout.phase in UNDONE:
        return rollout
    _require(rollout, rollout.phase in ABORTABLE, "aborted")
    message = f"aborted by an operator: {reason}" if reason else "aborted by an operator"
    return rolled_back(rollout, RolloutEvent(now_unix_s, "ABORTED_BY_OPERATOR", message))


def revert(rollout: Rollout, reason: str, now_unix_s: float) -> Rollout:
    """Return it with all new requests on the stable version, in any phase.

    Once the candidate is the deployment's version, an update brings the version before back: what is still
    loaded of it serves at once, and the candidate until then.
    """
    if rollout.phase in UNDONE:
        return rollout
    if rollout.phase in ABORTABLE:
        return abort(rollout, reason, now_unix_s)
    message = f"reverted by an operator: {reason}" if reason else "reverted by an operator"
    event = RolloutEvent(now_unix_s, "REVERTED_BY_OPERATOR", message)
    return replace(rollout.noted(event), phase=RolloutPhase.RESTORING, phase_unix_s=now_unix_s)


def pause(rollout: Rollout, now_unix_s: float) -> Rollout:
    """Return it staying at its step; failures still roll it back. A promotion not yet done is withdrawn."""
    _require(rollout, rollout.phase in ABORTABLE, "paused")
    target = rollout.target if rollout.phase is RolloutPhase.SOAKING else ""
    promoted = rollout.promote_to > rollout.step or rollout.target != target
    if rollout.paused and not promoted:
        return rollout
    withdrawn = "; its promotion is withdrawn" if promoted else ""
    noted = rollout.noted(RolloutEvent(now_unix_s, "PAUSED", f"paused by an operator{withdrawn}"))
    if not promoted:
        return replace(noted, paused=True)
    return replace(noted, paused=True, promote_to=rollout.step, target=target, preparing_unix_s=0.0)


def resume(rollout: Rollout, now_unix_s: float) -> Rollout:
    """Return it going on; the hold of its step begins anew."""
    _require(rollout, rollout.phase in ABORTABLE, "resumed")
    if not rollout.paused:
        return rollout
    event = RolloutEvent(now_unix_s, "RESUMED", "resumed by an operator")
    return replace(
        rollout.noted(event),
        paused=False,
        step_unix_s=now_unix_s,
        preparing_unix_s=now_unix_s if rollout.preparing else 0.0,
        phase_unix_s=now_unix_s if rollout.phase is RolloutPhase.SOAKING else rollout.phase_unix_s,
    )


def promote(rollout: Rollout, promotion: Promotion, now_unix_s: float) -> Rollout:
    """Return it going to its next step without waiting for the gate; a failed gate still rolls it back."""
    _require(rollout, rollout.phase in ABORTABLE, "promoted")
    for metric, reason in promotion.accepted.items():
        if not reason.strip():
            raise InvalidInput("an accepted metric needs a reason", field="accepted", metric=metric)
    found = accepted(rollout, promotion.accepted)
    if promotion.accepted:
        text = "; ".join(f"{metric}: {reason}" for metric, reason in sorted(promotion.accepted.items()))
        found = found.noted(RolloutEvent(now_unix_s, "ACCEPTED", f"an operator accepts {text}"[:512]))
        if not promotion.to_end and not promotion.arm:
            return found
    match rollout.strategy:
        case RolloutStrategy.SHADOW:
            raise FailedPrecondition(
                "a shadow takes no traffic and cannot be promoted: abort it and start a canary",
                name=rollout.meta.name,
            )
        case RolloutStrategy.AB:
            return _choose_arm(found, promotion, now_unix_s)
        case _:
            _require(rollout, rollout.phase is not RolloutPhase.LOADING, "promoted")
    last = next((at for at, one in enumerate(found.steps) if one.weight_bp == WHOLE_BP), len(found.steps))
    to_end = promotion.to_end or rollout.phase is RolloutPhase.SOAKING
    step = max(last, found.step + 1) if to_end else found.step + 1
    event = RolloutEvent(now_unix_s, "PROMOTED", "promoted by an operator")
    return replace(found.noted(event), promote_to=step, paused=False)


def _choose_arm(rollout: Rollout, promotion: Promotion, now_unix_s: float) -> Rollout:
    if rollout.phase is RolloutPhase.SOAKING:
        return replace(rollout, promote_to=rollout.step + 1)
    arm = rollout.arm(promotion.arm)
    if arm is None:
        names = ", ".join(one.name for one in rollout.arms)
        raise InvalidInput(f"name the arm that gets all traffic: {names}", field="arm", arm=promotion.arm)
    event = RolloutEvent(now_unix_s, "PROMOTED", f"an operator chose {arm.name}", arm.name)
    return replace(rollout.noted(event), target=arm.name)


def _require(rollout: Rollout, holds: bool, verb: str) -> None:
    if not holds:
        name = rollout.meta.name
        final = rollout.phase in (RolloutPhase.FINISHING, RolloutPhase.COMPLETED)
        hint = f": `fairway rollouts revert {name}` brings the version before back" if final else ""
        raise FailedPrecondition(
            f"rollout {name} is {rollout.phase} and cannot be {verb}{hint}", name=name, phase=rollout.phase
        )
