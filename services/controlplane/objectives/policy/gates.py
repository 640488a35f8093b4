"""The gate of a rollout step: the candidate against the baseline of the same step, while both serve. Pure.

``judge`` may be called after every report: its verdicts stay valid however often one looks. The sums are
kept by session cluster, so that requests of one session need not be independent; errors and values of a
cluster are compared as ratios of sums, with the variance between clusters. The alarm rate of the family is
divided by its metrics and by the gates of the rollout (Bonferroni).

A metric fails when a regression above its ``margin`` is proven, and passes when one above its ``limit`` is
ruled out; between the two it is inconclusive, and the plan's owner decides how long that may last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from services.controlplane.objectives.policy import comparisons
from services.controlplane.objectives.policy.comparisons import Comparison
from services.core.arms import ArmWindow


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class GateMetric(StrEnum):
    """What is compared. Margins of ratios 0..1 are differences; those of the others are factors."""

    ERROR_RATIO = "error_ratio"
    # Share of the requests that sent a token and were broken off; completion is the rest.
    BROKEN_RATIO = "broken_ratio"
    TTFT_P95 = "ttft_p95"
    ITL_P95 = "itl_p95"
    OUTPUT_LENGTH = "output_length"  # mean; longer and shorter are regressions
    COST = "cost"  # device seconds per 1,000 tokens, as shares of engine steps or of whole ones
    # Share of the requests that a safety pack blocks, stops or redacts; more and fewer are regressions.
    INTERVENTION_RATE = "intervention_rate"


@dataclass(frozen=True, slots=True)
class MetricBounds:
    """``margin``: the regression that is tolerated. ``limit``: the one that must be ruled out to pass."""

    margin: float
    limit: float


DEFAULT_BOUNDS: Final[Mapping[GateMetric, MetricBounds]] = {
    GateMetric.ERROR_RATIO: MetricBounds(0.005, 0.015),
    GateMetric.BROKEN_RATIO: MetricBounds(0.005, 0.015),
    GateMetric.TTFT_P95: MetricBounds(1.1, 1.3),
    GateMetric.ITL_P95: MetricBounds(1.1, 1.3),
    GateMetric.OUTPUT_LENGTH: MetricBounds(1.15, 1.5),
    GateMetric.COST: MetricBounds(1.15, 1.5),
}


# A safety pack is compared by what it does, by the time that it holds the first token, and by its verdicts'
# cost; it has no output of its own.
PACK_BOUNDS: Final[Mapping[GateMetric, MetricBounds]] = {
    GateMetric.ERROR_RATIO: DEFAULT_BOUNDS[GateMetric.ERROR_RATIO],
    GateMetric.INTERVENTION_RATE: MetricBounds(0.01, 0.03),
    GateMetric.TTFT_P95: DEFAULT_BOUNDS[GateMetric.TTFT_P95],
    GateMetric.COST: DEFAULT_BOUNDS[GateMetric.COST],
}


@dataclass(frozen=True, slots=True)
class GatePlan:
    """How the arms of a rollout are compared."""

    bounds: Mapping[GateMetric, MetricBounds] = field(default_factory=lambda: DEFAULT_BOUNDS)
    # Probability that a candidate without a regression fails in any gate of the rollout, by any metric.
    false_alarm_ratio: float = 0.01
    # Probability that a candidate at a metric's limit passes it in one gate.
    false_pass_ratio: float = 0.05
    # Gates of the rollout that share the false alarms.
    gates: int = 1
    # Minimum for each arm before anything is judged.
    min_requests: int = 100
    min_sessions: int = 30
    # Metrics whose regression the operator accepts, and why. They are shown and do not count.
    accepted: Mapping[GateMetric, str] = field(default_factory=dict)
    # Whether cost is the time of the steps between two tokens, whoever shares them: a batch with fewer
    # sequences has larger shares.
    whole_steps: bool = False


@dataclass(frozen=True, slots=True)
class MetricEvidence:
    """One metric of both arms. Values are None where nothing was measured."""

    metric: GateMetric
    verdict: Verdict
    baseline: float | None
    candidate: float | None
    baseline_samples: int
    candidate_samples: int
    # Standard errors by which the regression exceeds the margin, and how many prove it; infinite, 0 where
    # stored: too few samples for any.
    statistic: float = 0.0
    bound: float = 0.0
    # Whether it is a part of the gate's verdict, and the operator's reason where it is accepted.
    counted: bool = True
    accepted: str = ""

    @property
    def ratio(self) -> float | None:
        """The candidate's value by the baseline's."""
        if self.candidate is None or not self.baseline:
            return None
        return self.candidate / self.baseline


@dataclass(frozen=True, slots=True)
class GateReport:
    """The verdict of a gate and why. ``waits_for`` states what is missing before anything is judged."""

    verdict: Verdict
    evidence: tuple[MetricEvidence, ...]
    baseline_sessions: int
    candidate_sessions: int
    waits_for: str = ""

    @property
    def failed(self) -> tuple[GateMetric, ...]:
        """The metrics that fail the gate."""
        return tuple(one.metric for one in self.evidence if one.counted and one.verdict is Verdict.FAIL)


def judge(plan: GatePlan, baseline: ArmWindow, candidate: ArmWindow) -> GateReport:
    """Return the verdict on the candidate, from what both arms served in the same window."""
    waits_for = missing(plan, "candidate", candidate) or missing(plan, "baseline", baseline)
    evidence = tuple(
        _evidence(plan, metric, baseline, candidate, judged=not waits_for) for metric in plan.bounds
    )
    counted = [one.verdict for one in evidence if one.counted]
    verdict = Verdict.INCONCLUSIVE
    if Verdict.FAIL in counted:
        verdict = Verdict.FAIL
    elif counted and all(one is Verdict.PASS for one in counted):
        verdict = Verdict.PASS
    return GateReport(verdict, evidence, baseline.sessions, candidate.sessions, waits_for)


def missing(plan: GatePlan, name: str, arm: ArmWindow) -> str:
    """Return what an arm has too few of to be judged, empty for nothing."""
    if arm.requests < plan.min_requests:
        return f"the {name} has {arm.requests} of {plan.min_requests} requests"
    if arm.sessions < plan.min_sessions:
        return f"the {name} has {arm.sessions} of {plan.min_sessions} sessions"
    if len(arm.clusters) < comparisons.MIN_CLUSTERS:
        return f"the sessions of the {name} are in {len(arm.clusters)} of {comparisons.MIN_CLUSTERS} clusters"
    return ""


def _evidence(
    plan: GatePlan, metric: GateMetric, baseline: ArmWindow, candidate: ArmWindow, *, judged: bool
) -> MetricEvidence:
    alarm_ratio = plan.false_alarm_ratio / (plan.gates * len(plan.bounds))
    found = _compared(plan, metric, baseline, candidate)
    bound = found.bound(alarm_ratio)
    verdict = Verdict.INCONCLUSIVE
    if judged and found.regression_z > bound:
        verdict = Verdict.FAIL
    elif judged and found.ruled_out_z > found.bound(plan.false_pass_ratio):
        verdict = Verdict.PASS
    accepted = plan.accepted.get(metric, "")
    return MetricEvidence(
        metric=metric,
        verdict=verdict,
        baseline=found.baseline,
        candidate=found.candidate,
        baseline_samples=found.baseline_samples,
        candidate_samples=found.candidate_samples,
        statistic=found.regression_z,
        bound=bound,
        counted=not accepted and found.baseline is not None,
        accepted=accepted,
    )


def _compared(plan: GatePlan, metric: GateMetric, baseline: ArmWindow, candidate: ArmWindow) -> Comparison:
    arms, bounds = (baseline, candidate), plan.bounds[metric]
    margin, limit = bounds.margin, bounds.limit
    match metric:
        case GateMetric.ERROR_RATIO:
            return comparisons.of_shares(arms, lambda one: (one.errors, one.requests), margin, limit)
        case GateMetric.INTERVENTION_RATE:
            shares = comparisons.of_changed_shares
            return shares(arms, lambda one: (one.interventions, one.requests), margin, limit)
        case GateMetric.BROKEN_RATIO:
            return comparisons.of_shares(arms, lambda one: (one.broken, one.started), margin, limit)
        case GateMetric.TTFT_P95:
            return comparisons.of_quantiles(arms, lambda one: one.ttft, margin, limit)
        case GateMetric.ITL_P95:
            return comparisons.of_quantiles(arms, lambda one: {0: one.itl}, margin, limit)
        case GateMetric.OUTPUT_LENGTH:
            return comparisons.of_means(
                arms, lambda one: (one.output_tokens, one.finished), margin, limit, two_sided=True
            )
        case GateMetric.COST if plan.whole_steps:
            return comparisons.of_means(arms, lambda one: (1e3 * one.itl.total, one.itl.count), margin, limit)
        case GateMetric.COST:
            return comparisons.of_means(arms, lambda one: (1e3 * one.device_s, one.tokens), margin, limit)
