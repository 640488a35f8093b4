"""Rollouts and their messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

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
    RolloutStep,
    RolloutStrategy,
)
from services.controlplane.rollouts.resource import RolloutView
from services.core.errors import InvalidInput
from services.core.records import Meta, Priority
from services.core.rollouts.routes import WHOLE_BP, RouteArm, Shadow, SplitRules
from services.rpc.convert.inference import timestamp
from services.rpc.convert.times import duration_of, seconds_of

Kind = TypeVar("Kind", GateMetric, Priority)
_DEFAULT_STEP: Final = RolloutStep(0)
_DEFAULT_GATE: Final = GateSettings()


def rollout_from_proto(message: pb.Rollout) -> Rollout:
    """Return the operator's part of a rollout. Raises InvalidInput."""
    default = Rollout(Meta(""), "", RolloutStrategy.CANARY, ())
    return Rollout(
        meta=Meta(message.metadata.name, dict(message.metadata.labels)),
        deployment=message.deployment,
        strategy=_strategy_from(message.strategy),
        arms=tuple(RolloutArm(arm.name, arm.version, "", _bp(arm.weight_ratio)) for arm in message.arms),
        steps=tuple(map(_step_from, message.steps)),
        rules=_rules_from(message.rules),
        shadow=_shadow_from(message.shadow) if message.HasField("shadow") else None,
        gate=_gate_from(message.gate),
        soak_s=seconds_of(message.soak) if message.HasField("soak") else default.soak_s,
        load_timeout_s=seconds_of(message.load_timeout)
        if message.HasField("load_timeout")
        else default.load_timeout_s,
        by_worker=message.by_worker,
    )


def rollout_to_proto(view: RolloutView) -> pb.Rollout:
    """Return a rollout as it is now."""
    found = stored_to_proto(view.stored.record, view.stored.etag)
    rollout = view.stored.record
    found.route_revision = view.route_revision
    arms = view.route.arms if view.route is not None else ()
    found.arm_status.extend(_arm_status(rollout, view, arm) for arm in arms)
    found.fits.extend(map(_fit_to, view.fits))
    return found


def stored_to_proto(rollout: Rollout, etag: str) -> pb.Rollout:
    """Return a rollout as it is stored, without what the fleet reports."""
    gate, meta = rollout.gate, rollout.meta
    return pb.Rollout(
        metadata=pb.Metadata(
            name=meta.name,
            etag=etag,
            create_time=timestamp(meta.create_unix_s),
            update_time=timestamp(meta.update_unix_s),
            labels=meta.labels,
        ),
        deployment=rollout.deployment,
        steps=[
            pb.RolloutStep(
                weight_ratio=step.weight_bp / WHOLE_BP,
                hold=duration_of(step.hold_s),
                min_requests=step.min_requests,
            )
            for step in rollout.steps
        ],
        phase=pb.RolloutPhase.Value(f"ROLLOUT_PHASE_{rollout.phase.name}"),
        message=rollout.message,
        strategy=pb.RolloutStrategy.Value(f"ROLLOUT_STRATEGY_{rollout.strategy.name}"),
        arms=[
            pb.RolloutArm(
                name=arm.name,
                version=arm.version,
                weight_ratio=arm.weight_bp / WHOLE_BP,
                version_digest=arm.version_digest,
            )
            for arm in rollout.arms
        ],
        rules=_rules_to(rollout.rules),
        shadow=_shadow_to(rollout.shadow),
        gate=pb.RolloutGate(
            metrics=[metric.value for metric in gate.metrics],
            min_sessions=gate.min_sessions,
            patience=duration_of(gate.patience_s),
            inconclusive=pb.InconclusivePolicy.Value(f"INCONCLUSIVE_POLICY_{gate.inconclusive.name}"),
            max_engine_restarts=gate.max_engine_restarts,
            accepted={metric.value: reason for metric, reason in gate.accepted.items()},
        ),
        soak=duration_of(rollout.soak_s),
        load_timeout=duration_of(rollout.load_timeout_s),
        by_worker=rollout.by_worker,
        stable_version=rollout.stable_version,
        stable_digest=rollout.stable_digest,
        step=rollout.step,
        paused=rollout.paused,
        target=rollout.target,
        history=map(_event_to, rollout.history),
    )


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
        status.evidence.extend(map(_evidence_to, gate.evidence))
    return status


def _event_to(event: RolloutEvent) -> pb.RolloutHistoryEntry:
    return pb.RolloutHistoryEntry(
        time=timestamp(event.time_unix_s),
        what=event.what,
        message=event.message,
        arm=event.arm,
        evidence=map(_evidence_to, event.evidence),
    )


def _evidence_to(evidence: MetricEvidence) -> pb.GateEvidence:
    return pb.GateEvidence(
        metric=evidence.metric.value,
        verdict=evidence.verdict.value,
        baseline=evidence.baseline,
        candidate=evidence.candidate,
        baseline_samples=evidence.baseline_samples,
        candidate_samples=evidence.candidate_samples,
        statistic=evidence.statistic,
        bound=evidence.bound,
        counted=evidence.counted,
        accepted=evidence.accepted,
    )


def _fit_to(fit: ArmFit) -> pb.RolloutFit:
    return pb.RolloutFit(
        name=fit.name,
        replicas=fit.replicas,
        needed_bytes=fit.needed_bytes,
        measured=fit.measured,
        workers=fit.workers,
        missing_replicas=fit.missing,
        rejected=[f"{worker}: {why}"[:512] for worker, why in fit.rejected],
    )


def _strategy_from(value: pb.RolloutStrategy.ValueType) -> RolloutStrategy:
    if value == pb.ROLLOUT_STRATEGY_UNSPECIFIED:
        return RolloutStrategy.CANARY
    return RolloutStrategy[pb.RolloutStrategy.Name(value).removeprefix("ROLLOUT_STRATEGY_")]


def _step_from(message: pb.RolloutStep) -> RolloutStep:
    return RolloutStep(
        _bp(message.weight_ratio),
        seconds_of(message.hold) if message.HasField("hold") else _DEFAULT_STEP.hold_s,
        message.min_requests or _DEFAULT_STEP.min_requests,
    )


def _rules_from(message: pb.RolloutRules) -> SplitRules:
    caps = {
        _named(Priority, name, "rollout.rules.class_caps"): _bp(ratio)
        for name, ratio in message.class_caps.items()
    }
    return SplitRules(
        not message.refuse_pins,
        tuple(message.allowed_tenants),
        tuple(message.denied_tenants),
        dict(message.overrides),
        caps,
    )


def _rules_to(rules: SplitRules) -> pb.RolloutRules:
    return pb.RolloutRules(
        refuse_pins=not rules.pins,
        allowed_tenants=rules.allow,
        denied_tenants=rules.deny,
        overrides=rules.overrides,
        class_caps={priority.value: bp / WHOLE_BP for priority, bp in rules.class_caps_bp.items()},
    )


def _shadow_from(message: pb.RolloutShadow) -> Shadow:
    default = Shadow("", 0)
    return Shadow(
        message.arm, _bp(message.fraction_ratio), message.max_concurrency or default.max_concurrency
    )


def _shadow_to(shadow: Shadow | None) -> pb.RolloutShadow | None:
    if shadow is None:
        return None
    return pb.RolloutShadow(
        arm=shadow.arm,
        fraction_ratio=shadow.fraction_bp / WHOLE_BP,
        max_concurrency=shadow.max_concurrency,
    )


def _gate_from(message: pb.RolloutGate) -> GateSettings:
    restarts = message.max_engine_restarts if message.HasField("max_engine_restarts") else None
    inconclusive = Inconclusive.WAIT
    if message.inconclusive != pb.INCONCLUSIVE_POLICY_UNSPECIFIED:
        name = pb.InconclusivePolicy.Name(message.inconclusive)
        inconclusive = Inconclusive[name.removeprefix("INCONCLUSIVE_POLICY_")]
    return GateSettings(
        tuple(_named(GateMetric, name, "rollout.gate.metrics") for name in message.metrics),
        message.min_sessions or _DEFAULT_GATE.min_sessions,
        seconds_of(message.patience) if message.HasField("patience") else _DEFAULT_GATE.patience_s,
        inconclusive,
        _DEFAULT_GATE.max_engine_restarts if restarts is None else restarts,
        _accepted_from(message.accepted, "rollout.gate.accepted"),
    )


def _accepted_from(accepted: Mapping[str, str], field: str) -> dict[GateMetric, str]:
    return {_named(GateMetric, name, field): reason for name, reason in accepted.items()}


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
