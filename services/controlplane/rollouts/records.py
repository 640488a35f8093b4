"""Rollouts as they are stored: what the operator wants, how far it is, and its history with evidence.

Key: ``ROLLOUTS`` and the name. The route and the deployment's version follow from the record
(``policy.effects``) and are written with it in one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from services.controlplane.objectives.policy.gates import (
    PACK_BOUNDS,
    GateMetric,
    GateReport,
    MetricEvidence,
)
from services.core.errors import InvalidInput
from services.core.records import Meta
from services.core.rollouts.routes import WHOLE_BP, Shadow, SplitRules

MAX_HISTORY: Final = 64
STABLE: Final = "stable"
MAX_STEPS = 32
MAX_ARMS = 4


class RolloutStrategy(StrEnum):
    CANARY = "canary"  # growing weights, each judged
    AB = "ab"  # fixed weights until an operator decides
    SHADOW = "shadow"  # copies of requests, whose results are dropped
    BLUE_GREEN = "blue_green"  # all replicas are added to the stable ones, then all traffic moves
    INSTANT = "instant"  # a blue_green that is final as soon as its gate passes


# All traffic changes at once.
FULL: Final = (RolloutStrategy.BLUE_GREEN, RolloutStrategy.INSTANT)


class RolloutPhase(StrEnum):
    LOADING = "loading"  # the candidates are loaded; no traffic
    RUNNING = "running"  # traffic by the present step
    SOAKING = "soaking"  # all traffic on the candidate, which is judged; the version before is warm
    FINISHING = "finishing"  # the deployment has the candidate; workers confirm the fence of the others
    ROLLING_BACK = "rolling_back"  # new requests are stable; the candidates end their requests
    COMPLETED = "completed"  # cut over: no new request is answered by the version before
    ABORTED = "aborted"
    RESTORING = "restoring"  # reverted once final; the candidate serves until the version before is READY
    WITHDRAWING = "withdrawing"  # new requests are stable; workers confirm the fence of the candidates
    REVERTED = "reverted"  # no new request is answered by a candidate


ENDED: Final = frozenset({RolloutPhase.COMPLETED, RolloutPhase.ABORTED, RolloutPhase.REVERTED})
# New requests can still get a candidate.
ABORTABLE: Final = frozenset({RolloutPhase.LOADING, RolloutPhase.RUNNING, RolloutPhase.SOAKING})
# Aborted, rolled back or reverted, or on the way there.
UNDONE: Final = frozenset(
    {
        RolloutPhase.ROLLING_BACK,
        RolloutPhase.ABORTED,
        RolloutPhase.RESTORING,
        RolloutPhase.WITHDRAWING,
        RolloutPhase.REVERTED,
    }
)


class Inconclusive(StrEnum):
    """What happens to a step that was held and is not judged within its patience."""

    WAIT = "wait"
    PROMOTE = "promote"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """A weight, held at least ``hold_s`` and until ``min_requests`` of each arm are judged."""

    weight_bp: int
    hold_s: float = 60.0
    min_requests: int = 100


@dataclass(frozen=True, slots=True)
class RolloutArm:
    """A candidate. ``version`` is what the operator named; ``weight_bp`` is the arm's weight in an A/B
    test."""

    name: str
    version: str
    version_digest: str = ""
    weight_bp: int = 0


@dataclass(frozen=True, slots=True)
class GateSettings:
    """How candidates are judged. ``metrics`` empty: all. ``accepted``: metrics that do not count, and why.

    ``max_engine_restarts``: crashes of a candidate's engines that roll it back, more than one request may
    cause until it is quarantined; 0: no bound.
    """

    metrics: tuple[GateMetric, ...] = ()
    min_sessions: int = 30
    patience_s: float = 600.0
    inconclusive: Inconclusive = Inconclusive.WAIT
    max_engine_restarts: int = 7
    accepted: dict[GateMetric, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutEvent:
    """One entry of the history. ``what`` is a stable word; ``evidence`` is of the arm in ``arm``."""

    time_unix_s: float
    what: str
    message: str
    arm: str = ""
    evidence: tuple[MetricEvidence, ...] = ()


DEFAULT_STEPS: Final = tuple(RolloutStep(bp) for bp in (100, 500, 2500, 5000, WHOLE_BP))


@dataclass(frozen=True, slots=True)
class Rollout:
    """The passage of a deployment's traffic to other versions."""

    meta: Meta
    deployment: str
    strategy: RolloutStrategy
    arms: tuple[RolloutArm, ...]
    steps: tuple[RolloutStep, ...] = ()
    rules: SplitRules = field(default_factory=SplitRules)
    shadow: Shadow | None = None
    gate: GateSettings = field(default_factory=GateSettings)
    # All traffic is on the candidate for this long before the rollout is final; of an instant one, at most.
    soak_s: float = 300.0
    # The version before stays loaded for this long after the cutover, where no other needs its memory.
    keep_warm_s: float = 600.0
    # Longest time to load the candidates, and those of the next step.
    load_timeout_s: float = 900.0
    # Its version takes workers of the stable one, one at a time: no worker has two.
    by_worker: bool = False

    # Set by the server. What makes the drawing of sessions its own.
    salt: str = ""
    # The version before, as the deployment names it.
    stable_version: str = ""
    stable_digest: str = ""
    phase: RolloutPhase = RolloutPhase.LOADING
    phase_unix_s: float = 0.0
    # The step whose weight applies, and since when.
    step: int = 0
    step_unix_s: float = 0.0
    # Since when the replicas of the next step are loaded, its gate having passed; 0: they are not.
    preparing_unix_s: float = 0.0
    # An operator asked for at least this step, without waiting for its predecessors' gates.
    promote_to: int = 0
    # The window in which the stable version served before all traffic moved: what the soak is compared with.
    baseline: str = ""
    # The route revision of the cutover, once every live worker has confirmed it; 0: not cut over.
    cutover_revision: int = 0
    # The arm that gets all traffic in the end.
    target: str = ""
    paused: bool = False
    # What it waits for, and the gates of the present step by arm, as of the last write.
    message: str = ""
    gates: dict[str, GateReport] = field(default_factory=dict)
    history: tuple[RolloutEvent, ...] = ()

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def preparing(self) -> bool:
        return self.preparing_unix_s > 0.0

    @property
    def weight_bp(self) -> int:
        """The weight of the present step; of a canary."""
        return self.steps[min(self.step, len(self.steps) - 1)].weight_bp if self.steps else 0

    def arm(self, name: str) -> RolloutArm | None:
        return next((one for one in self.arms if one.name == name), None)

    @property
    def final_arm(self) -> RolloutArm:
        """The arm that gets all traffic: the operator's choice, otherwise the first."""
        return self.arm(self.target) or self.arms[0]

    def noted(self, event: RolloutEvent) -> Rollout:
        """Return it with one more entry; the start and the newest are kept."""
        history = (*self.history, event)
        if len(history) > MAX_HISTORY:
            history = (history[0], *history[len(history) - MAX_HISTORY + 1 :])
        return replace(self, history=history, message=event.message)


def with_defaults(rollout: Rollout, *, of_pack: bool = False) -> Rollout:
    """Return it with the steps of its strategy, the last one at all traffic, and a safety pack's metrics."""
    if of_pack and not rollout.gate.metrics:
        rollout = replace(rollout, gate=replace(rollout.gate, metrics=tuple(PACK_BOUNDS)))
    if rollout.strategy is RolloutStrategy.CANARY:
        return replace(rollout, steps=rollout.steps or DEFAULT_STEPS)
    return rollout


def check_by_worker(rollout: Rollout, replicas: int) -> str:
    """Return why a rollout cannot go worker by worker, empty if it can."""
    if rollout.strategy is not RolloutStrategy.CANARY:
        return "only a canary goes worker by worker: the workers follow its steps"
    if replicas < 2:
        return "worker by worker needs two replicas: the only one would stop to serve"
    if len(rollout.steps) > MAX_STEPS:
        return f"worker by worker, {replicas} replicas need more than {MAX_STEPS} steps"
    return ""


def check_rollout(rollout: Rollout) -> None:
    """Return for terms that can be carried out. Raises InvalidInput that names the field."""
    names = [arm.name for arm in rollout.arms]
    if not names or len(names) > MAX_ARMS:
        raise InvalidInput(f"a rollout has 1 to {MAX_ARMS} arms beside the stable one", field="rollout.arms")
    if STABLE in names or len(set(names)) != len(names):
        raise InvalidInput(f"arms have names of their own, other than {STABLE}", field="rollout.arms")
    if rollout.strategy is not RolloutStrategy.AB and len(names) != 1:
        raise InvalidInput(f"a {rollout.strategy} rollout has one arm", field="rollout.arms")
    _check_weights(rollout)
    _check_rules(rollout, names)
    if (rollout.strategy is RolloutStrategy.SHADOW) != (rollout.shadow is not None):
        raise InvalidInput("a shadow rollout has a shadow, and no other has one", field="rollout.shadow")
    if rollout.shadow is not None and rollout.shadow.arm not in names:
        raise InvalidInput("the shadow names no arm", field="rollout.shadow.arm")
    for metric, reason in rollout.gate.accepted.items():
        if not reason.strip():
            raise InvalidInput(
                "an accepted metric needs a reason", field="rollout.gate.accepted", metric=metric
            )


def _check_weights(rollout: Rollout) -> None:
    if rollout.strategy is RolloutStrategy.AB:
        total = sum(arm.weight_bp for arm in rollout.arms)
        if any(arm.weight_bp <= 0 for arm in rollout.arms) or total >= WHOLE_BP:
            raise InvalidInput(
                "the arms of an A/B test have weights above 0 that leave something to the stable one",
                field="rollout.arms",
            )
    elif any(arm.weight_bp for arm in rollout.arms):
        raise InvalidInput("only arms of an A/B test have weights", field="rollout.arms")
    weights = [step.weight_bp for step in rollout.steps]
    if rollout.strategy is not RolloutStrategy.CANARY and weights not in ([], [WHOLE_BP]):
        raise InvalidInput(f"a {rollout.strategy} rollout has one step, of 100 %", field="rollout.steps")
    if len(weights) > MAX_STEPS or weights != sorted(set(weights)) or any(bp <= 0 for bp in weights):
        raise InvalidInput(f"at most {MAX_STEPS} steps have growing weights above 0", field="rollout.steps")


def _check_rules(rollout: Rollout, names: list[str]) -> None:
    for tenant, arm in rollout.rules.overrides.items():
        if arm not in (STABLE, *names):
            some = ", ".join((STABLE, *names))
            raise InvalidInput(
                f"the override of {tenant} leads to no arm: name one of {some}",
                field="rollout.rules.overrides",
                arm=arm,
            )
