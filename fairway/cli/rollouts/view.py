"""A rollout on a terminal: its arms, its gates with their evidence, its history and its plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fairway.cli.terminal.output import out, plain
from fairway.cli.terminal.table import Column, show_rows
from fairway.v1 import controlplane_pb2 as cp

_MIB: Final = 2**20


def phase_name(rollout: cp.Rollout) -> str:
    name = cp.RolloutPhase.Name(rollout.phase).removeprefix("ROLLOUT_PHASE_").lower().replace("_", " ")
    return f"{name} (paused)" if rollout.paused else name


def strategy_name(rollout: cp.Rollout) -> str:
    name = cp.RolloutStrategy.Name(rollout.strategy).removeprefix("ROLLOUT_STRATEGY_")
    return name.lower().replace("_", "-")


ARM_COLUMNS: Final[tuple[Column[cp.RolloutArmStatus], ...]] = (
    Column("arm", lambda arm: arm.name),
    Column("version", lambda arm: arm.version_digest, drop=1),
    Column("traffic", lambda arm: f"{arm.weight_ratio:.2%}"),
    Column("ready", lambda arm: f"{arm.ready_replicas}/{arm.wanted_replicas}"),
    Column("crashes", lambda arm: str(arm.engine_restarts), drop=2),
    Column("gate", lambda arm: arm.verdict or "-"),
    Column("waits for", lambda arm: arm.waits_for, least=30),
)
EVIDENCE_COLUMNS: Final[tuple[Column[cp.GateEvidence], ...]] = (
    Column("metric", lambda one: one.metric),
    Column("stable", lambda one: _value(one, "baseline")),
    Column("candidate", lambda one: _value(one, "candidate")),
    Column("samples", lambda one: f"{one.baseline_samples}/{one.candidate_samples}"),
    Column(
        "regression", lambda one: f"{one.statistic:+.1f} of {one.bound:.1f}" if one.bound else "-", drop=1
    ),
    Column("verdict", lambda one: _verdict(one)),
)
HISTORY_COLUMNS: Final[tuple[Column[cp.RolloutHistoryEntry], ...]] = (
    Column("time", lambda one: one.time.ToDatetime().isoformat("T", "seconds") + "Z"),
    Column("what", lambda one: one.what, drop=1),
    Column("message", lambda one: one.message, least=58),
)
FIT_COLUMNS: Final[tuple[Column[cp.RolloutFit], ...]] = (
    Column("arm", lambda fit: fit.name),
    Column("replicas", lambda fit: f"{fit.replicas - fit.missing_replicas}/{fit.replicas}"),
    Column(
        "memory on each",
        lambda fit: f"{-(-fit.needed_bytes // _MIB)} MiB{'' if fit.measured else ' or more (its files)'}",
    ),
    Column("workers", lambda fit: ", ".join(fit.workers) or "-", drop=1),
    Column("does not fit", lambda fit: "; ".join(fit.rejected), least=40),
)


def show_status(rollout: cp.Rollout) -> None:
    """Print where the rollout is, its arms, and the gate of each candidate."""
    head = f"{rollout.metadata.name}: {strategy_name(rollout)} of {rollout.deployment}, {phase_name(rollout)}"
    if rollout.steps and rollout.phase == cp.ROLLOUT_PHASE_RUNNING:
        head += f", step {rollout.step + 1} of {len(rollout.steps)}"
    plain(out(), f"{head}\n{rollout.message}")
    if rollout.arm_status:
        plain(out())
        show_rows(ARM_COLUMNS, rollout.arm_status)
    for arm in rollout.arm_status:
        if arm.evidence:
            plain(out(), f"\n{arm.name} against stable:")
            show_rows(EVIDENCE_COLUMNS, arm.evidence)


def show_history(entries: Iterable[cp.RolloutHistoryEntry]) -> None:
    """Print what happened, with the evidence of each decision."""
    for entry in entries:
        show_rows(HISTORY_COLUMNS, [entry])
        if entry.evidence:
            show_rows(EVIDENCE_COLUMNS, entry.evidence)


def show_plan(rollout: cp.Rollout) -> None:
    """Print what a start would do, and where its versions fit."""
    plain(
        out(),
        f"{strategy_name(rollout)} of {rollout.deployment} from {rollout.stable_version}\n{rollout.message}",
    )
    for number, step in enumerate(rollout.steps, 1):
        hold_s = step.hold.ToTimedelta().total_seconds()
        plain(
            out(),
            f"step {number}: {step.weight_ratio:.2%}, at least {hold_s:g} s and {step.min_requests} requests",
        )
    show_rows(FIT_COLUMNS, rollout.fits)


def _value(evidence: cp.GateEvidence, field: str) -> str:
    if not evidence.HasField(field):  # type: ignore[arg-type]
        return "-"
    value = float(getattr(evidence, field))
    return f"{value:.2%}" if evidence.metric.endswith("_ratio") else f"{value:.4g}"


def _verdict(evidence: cp.GateEvidence) -> str:
    if evidence.accepted:
        return f"{evidence.verdict}, accepted: {evidence.accepted}"
    return evidence.verdict if evidence.counted else "not measured"
