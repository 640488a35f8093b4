"""Rollouts and their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import not_
from typing import Final, TypeVar

from fairway.mirror import Mirror, Pair, enum_pair, numbers_of
from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.objectives.policy.gates import GateMetric, MetricEvidence
from services.controlplane.rollouts.fit import ArmFit
from services.controlplane.rollouts.policy.operate import Promotion
from services.controlplane.rollouts.records import (
    GateSettings,
    Inconclusive,
    Rollout,
    RolloutArm,
    RolloutEvent,
    RolloutPhase,
    RolloutStep,
    RolloutStrategy,
)
from services.controlplane.rollouts.resource import RolloutView
from services.core.errors import InvalidInput
from services.core.records import Priority
from services.core.rollouts.routes import WHOLE_BP, RouteArm, Shadow, SplitRules
from services.rpc.convert.controlplane import META, resource_to_proto
from services.rpc.convert.inference import duration_of, seconds_of, timestamp

Kind = TypeVar("Kind", GateMetric, Priority)


def _named(kind: type[Kind], name: str, field: str) -> Kind:
    try:
        return kind(name)
    except ValueError:
        raise InvalidInput(
            f"{name!r} is none of {', '.join(_values(kind))}", field=field, value=name
        ) from None


def _values(kind: Iterable[Kind]) -> list[str]:
    return [one.value for one in kind]


def _bp(ratio: float) -> int:
    return round(ratio * WHOLE_BP)


def _ratio(name: str) -> Pair:
    return Pair(name, lambda bp: bp / WHOLE_BP, _bp)


def _span(name: str) -> Pair:
    return Pair(name, duration_of, seconds_of)


def _accepted_from(accepted: Mapping[str, str], field: str) -> dict[GateMetric, str]:
    return {_named(GateMetric, name, field): reason for name, reason in accepted.items()}


def _caps_from(caps: Mapping[str, float]) -> dict[Priority, int]:
    return {_named(Priority, name, "rollout.rules.class_caps"): _bp(ratio) for name, ratio in caps.items()}


_STEP: Final = Mirror(
    RolloutStep,
    pb.RolloutStep,
    {
        "weight_bp": _ratio("weight_ratio"),
        "hold_s": _span("hold"),
        "min_requests": Pair("min_requests", zero=True),
    },
)
_ARM: Final = Mirror(
    RolloutArm,
    pb.RolloutArm,
    {"version_digest": Pair("version_digest", unread=True), "weight_bp": _ratio("weight_ratio")},
)
_RULES: Final = Mirror(
    SplitRules,
    pb.RolloutRules,
    {
        "pins": Pair("refuse_pins", not_, not_),
        "allow": Pair("allowed_tenants"),
        "deny": Pair("denied_tenants"),
        "class_caps_bp": Pair(
            "class_caps", lambda caps: {kind.value: bp / WHOLE_BP for kind, bp in caps.items()}, _caps_from
        ),
    },
)
_SHADOW: Final = Mirror(
    Shadow,
    pb.RolloutShadow,
    {"fraction_bp": _ratio("fraction_ratio"), "max_concurrency": Pair("max_concurrency", zero=True)},
)
_GATE: Final = Mirror(
    GateSettings,
    pb.RolloutGate,
    {
        "metrics": Pair(
            "metrics",
            _values,
            lambda names: tuple(_named(GateMetric, name, "rollout.gate.metrics") for name in names),
        ),
        "min_sessions": Pair("min_sessions", zero=True),
        "patience_s": _span("patience"),
        "inconclusive": enum_pair(
            "inconclusive", numbers_of(Inconclusive, pb.InconclusivePolicy), Inconclusive.WAIT
        ),
        "accepted": Pair(
            "accepted",
            lambda accepted: {metric.value: reason for metric, reason in accepted.items()},
            lambda accepted: _accepted_from(accepted, "rollout.gate.accepted"),
        ),
    },
)
_EVIDENCE: Final = Mirror(MetricEvidence, pb.GateEvidence)
_EVENT: Final = Mirror(
    RolloutEvent,
    pb.RolloutHistoryEntry,
    {"time_unix_s": Pair("time", timestamp, seconds_of), "evidence": _EVIDENCE.each("evidence")},
)
_ROLLOUT: Final = Mirror(
    Rollout,
    pb.Rollout,
    {
        "meta": META,
        "strategy": enum_pair(
            "strategy", numbers_of(RolloutStrategy, pb.RolloutStrategy), RolloutStrategy.CANARY
        ),
        "arms": _ARM.each("arms"),
        "steps": _STEP.each("steps"),
        "rules": _RULES.one("rules"),
        "shadow": _SHADOW.one("shadow", unset=True),
        "gate": _GATE.one("gate"),
        "soak_s": _span("soak"),
        "keep_warm_s": _span("keep_warm"),
        "load_timeout_s": _span("load_timeout"),
        "phase": Pair("phase", numbers_of(RolloutPhase, pb.RolloutPhase).__getitem__, unread=True),
        "history": Pair("history", _EVENT.each("history").write, unread=True),
        **{
            name: Pair(name, unread=True)
            for name in (
                *("stable_version", "stable_digest", "step", "target", "paused", "message"),
                "cutover_revision",
            )
        },
    },
    apart=(
        *("salt", "phase_unix_s", "step_unix_s", "preparing_unix_s", "promote_to", "baseline"),
        *("gates",),
    ),
)
_FIT: Final = Mirror(
    ArmFit,
    pb.RolloutFit,
    {
        "missing": Pair("missing_replicas"),
        "rejected": Pair("rejected", lambda rejected: [f"{worker}: {why}"[:512] for worker, why in rejected]),
    },
    apart=("version_digest",),
)
rollout_from_proto: Final = _ROLLOUT.from_proto  # the operator's part; raises InvalidInput


def rollout_to_proto(view: RolloutView) -> pb.Rollout:
    """Return a rollout as it is now."""
    found = stored_to_proto(view.stored.record, view.stored.etag)
    rollout = view.stored.record
    found.route_revision = view.route_revision
    arms = view.route.arms if view.route is not None else ()
    found.arm_status.extend(_arm_status(rollout, view, arm) for arm in arms)
    found.fits.extend(map(_FIT.to_proto, view.fits))
    return found


def stored_to_proto(rollout: Rollout, etag: str) -> pb.Rollout:
    """Return a rollout as it is stored, without what the fleet reports."""
    return resource_to_proto(_ROLLOUT, rollout, etag)


def promotion_from_proto(message: pb.PromoteRolloutRequest) -> Promotion:
    return Promotion(message.to_end, message.arm, _accepted_from(message.accepted, "accepted"))


def _arm_status(rollout: Rollout, view: RolloutView, arm: RouteArm) -> pb.RolloutArmStatus:
    facts, gate = view.facts.arm(arm.name), rollout.gates.get(arm.name)
    status = pb.RolloutArmStatus(
        name=arm.name,
        version_digest=arm.version_digest,
        weight_ratio=arm.weight_bp / WHOLE_BP,
        ready_replicas=facts.ready,
        wanted_replicas=0 if arm.closed else arm.replicas,
        loaded_replicas=facts.loaded,
        engine_restarts=facts.engine_restarts,
    )
    if gate is not None:
        status.verdict, status.waits_for = gate.verdict.value, gate.waits_for
        status.evidence.extend(map(_EVIDENCE.to_proto, gate.evidence))
    return status
