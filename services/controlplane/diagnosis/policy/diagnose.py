"""Why a quantile of latency rose: the tree that leads from the change to its causes.

First the change itself must be certain and large enough. Then it is divided over stages, and every suspect is
tested: the window without it is compared with the window. What remains is ranked by the part of the change
that it explains. Without a certain cause the answer is that none was found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from services.controlplane.diagnosis.policy.comparison import (
    Evidence,
    SampledSpan,
    TwoTimes,
    compare,
    of_model,
)
from services.controlplane.diagnosis.policy.demand import DemandSuspects
from services.controlplane.diagnosis.policy.quantiles import levels, quantile, ratio_interval, rises
from services.controlplane.diagnosis.policy.samples import (
    STAGES,
    Floats,
    Metric,
    RequestTable,
    SpentOn,
)
from services.controlplane.diagnosis.policy.suspects import CauseKind, Suspect, ms, suspects_of

LEAST_SAMPLES: Final = 30
LEAST_TIMES: Final = 5  # buckets with requests, in each time
LEAST_RATIO: Final = 1.2  # smallest rise of the quantile that is diagnosed
LEAST_RISE_S: Final = {Metric.TTFT: 2e-3, Metric.ITL: 5e-4, Metric.TOTAL: 2e-3}
LEAST_SHARE: Final = 0.2  # least share of the change that a cause explains
FAMILY_CHANCE: Final = 0.01  # probability of any false accusation of a quiet window
_LEAST_TESTS: Final = 40  # suspects that are counted at least: those below the least sizes are tests too
_MOST_CAUSES: Final = 8
_MOST_PARTS: Final = 60  # values of a series in which a change is found
_CERTAIN_RATIO: Final = 1.5  # a rise of a tenant with few requests moves few moments, however large it is
_LATE: Final = 0.5  # a figure that rises after the latency may be its effect, as retries are
_BROAD: Final = 0.9  # growth of arrivals explains any wait: what names the way goes first


class DiagnosisVerdict(StrEnum):
    CAUSE_FOUND = "CAUSE_FOUND"
    NO_CAUSE_FOUND = "NO_CAUSE_FOUND"
    NOT_ENOUGH_TRAFFIC = "NOT_ENOUGH_TRAFFIC"
    BASELINE_DIFFERS = "BASELINE_DIFFERS"


@dataclass(frozen=True, slots=True)
class StageChange:
    """What a stage contributes to the quantile in both times; the ``share`` is of the whole change."""

    stage: str
    baseline_s: float
    window_s: float
    share: float


@dataclass(frozen=True, slots=True)
class TreeStep:
    depth: int
    text: str


@dataclass(frozen=True, slots=True)
class LatencyCause:
    """``share_s``: what it explains of the change. ``counterfactual_s``: the window's quantile without it."""

    kind: CauseKind
    subject: str
    score: float
    share_s: float
    counterfactual_s: float
    evidence: tuple[str, ...]
    next: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    verdict: DiagnosisVerdict
    message: str
    model: str
    metric: Metric
    level: float
    window: SampledSpan
    baseline: SampledSpan
    baseline_s: float = 0.0
    window_s: float = 0.0
    stages: tuple[StageChange, ...] = ()
    tree: tuple[TreeStep, ...] = ()
    causes: tuple[LatencyCause, ...] = ()
    prices: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


def diagnose(
    baseline: Evidence,
    window: Evidence,
    *,
    model: str = "",
    metric: Metric = Metric.TTFT,
    level: float = 0.95,
    tenant: str = "",
) -> Diagnosis:
    """Return the diagnosis of a model, or without a name of the model whose quantile rose most certainly."""
    names = [model] if model else _models(window.samples.where(window.samples.asked("tenant", tenant)))
    found = [compare(name, metric, level, baseline, window, tenant) for name in names]
    changes = [(_change(one), one) for one in found if _is_enough(one)]
    if not changes:
        return _too_little(model, metric, level, window.span(model, tenant), baseline.span(model, tenant))
    changed = [each for each in changes if each[0].certain]
    change, one = max(changed or changes, key=lambda each: each[0].low)
    measured = _measured(one, baseline, window)
    if not changed:
        return _unchanged(one, change, measured, len(changes))
    return _explain(one, change, measured, len(names))


def _is_enough(one: TwoTimes) -> bool:
    return all(
        mask.sum() >= LEAST_SAMPLES and len(np.unique(side.buckets[mask])) >= LEAST_TIMES
        for side, mask in zip((one.baseline, one.window), one.asked, strict=True)
    )


def _models(samples: RequestTable) -> list[str]:
    return sorted({str(one) for one in samples.model if one})


@dataclass(frozen=True, slots=True)
class _Change:
    """``low`` and ``high``: the interval of the ratio; ``chance``: of such a tail without a change."""

    low: float
    high: float
    chance: float
    certain: bool


def _change(one: TwoTimes) -> _Change:
    sides = one.both(
        lambda side, mask: (side.parts.total[mask], side.samples.weight[mask], side.buckets[mask]), one.asked
    )
    low, high = ratio_interval(*sides, one.level)
    chance = rises(*one.tails)
    certain = (
        one.after_s >= LEAST_RATIO * one.before_s
        and one.change_s >= LEAST_RISE_S[one.metric]
        and low > 1.0
        and (chance < FAMILY_CHANCE or low > _CERTAIN_RATIO)
    )
    return _Change(low, high, chance, certain)


def _too_little(model: str, metric: Metric, level: float, *spans: SampledSpan) -> Diagnosis:
    of = f" of {model}" if model else ""
    which, span = ("window", spans[0]) if spans[0].samples < LEAST_SAMPLES else ("baseline", spans[1])
    text = (
        f"the {which} has {span.samples} sampled requests{of} that finished; a comparison needs "
        f"{LEAST_SAMPLES}, spread over {LEAST_TIMES} moments in each time. "
        "Widen it with --from, --to or --since"
    )
    return Diagnosis(DiagnosisVerdict.NOT_ENOUGH_TRAFFIC, text, model, metric, level, spans[0], spans[1])


def _head(one: TwoTimes, change: _Change) -> str:
    return (
        f"p{100 * one.level:g} of {one.metric}: {ms(one.before_s)}, then {ms(one.after_s)} "
        f"(ratio {one.after_s / max(1e-9, one.before_s):.2f}, 99 % interval {change.low:.2f} to "
        f"{change.high:.2f})"
    )


def _stages(one: TwoTimes) -> tuple[StageChange, ...]:
    columns = one.allocated(lambda side: side.samples.stage_parts(one.metric))
    whole = one.change_s
    return tuple(
        StageChange(
            name,
            float(before_s),
            float(after_s),
            float(after_s - before_s) / whole if abs(whole) > 1e-9 else 0.0,
        )
        for name, before_s, after_s in zip(STAGES, *columns, strict=True)
    )


def _measured(one: TwoTimes, baseline: Evidence, window: Evidence) -> Diagnosis:
    """Return the answer's figures, with no cause so far."""
    prices = one.prices
    return Diagnosis(
        DiagnosisVerdict.NO_CAUSE_FOUND,
        "",
        one.model,
        one.metric,
        one.level,
        window.span(one.model, one.tenant),
        baseline.span(one.model, one.tenant),
        one.before_s,
        one.after_s,
        _stages(one),
        prices=(prices.step_s, prices.prefill_s, prices.decode_s, prices.attended_s),
    )


def _unchanged(one: TwoTimes, change: _Change, found: Diagnosis, models: int) -> Diagnosis:
    name = found.model
    others = f"; nor did another of {models} models" if models > 1 else ""
    return replace(
        found,
        message=f"the latency of {name} did not rise beyond chance and {LEAST_RATIO:g} times its "
        f"baseline{others}",
        tree=(
            TreeStep(0, f"{name}: {_head(one, change)}"),
            TreeStep(1, "no certain rise: nothing to explain"),
        ),
    )


def _explain(one: TwoTimes, change: _Change, found: Diagnosis, models: int) -> Diagnosis:
    tree = [TreeStep(0, f"{found.model}: {_head(one, change)}")]
    tree += [
        TreeStep(
            1,
            f"{each.stage}: {ms(each.baseline_s)}, then {ms(each.window_s)}: {each.share:.0%} of the change",
        )
        for each in sorted(found.stages, key=lambda each: -each.share)
        if abs(each.share) >= 0.05
    ]
    tree += [TreeStep(2, text) for text in _part_texts(one)]
    causes, tested = _causes(one, models)
    tree += tested
    if not causes:
        message = f"the latency rose, and no suspect explains {LEAST_SHARE:.0%} of it beyond chance"
        return replace(found, message=message, tree=tuple(tree))
    first = causes[0]
    share = first.share_s / one.change_s
    return replace(
        found,
        verdict=DiagnosisVerdict.CAUSE_FOUND,
        message=f"{first.kind} ({first.subject}) explains {min(1.0, share):.0%} of the rise",
        tree=tuple(tree),
        causes=causes,
    )


def _part_texts(one: TwoTimes) -> list[str]:
    """Return the parts that changed most at the quantile."""
    found = one.allocated(lambda side: np.stack([side.parts[part] for part in SpentOn], axis=1))
    shares = (found[1] - found[0]) / one.change_s
    order = np.argsort(-shares)[:4]
    return [
        f"{list(SpentOn)[at]}: {ms(float(found[0][at]))}, then {ms(float(found[1][at]))}: "
        f"{shares[at]:.0%} of the change"
        for at in order
        if shares[at] >= 0.1
    ]


def _causes(one: TwoTimes, models: int) -> tuple[tuple[LatencyCause, ...], list[TreeStep]]:
    """Return the causes in their order, and what was tested.

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979, over the suspects of all models.
    """
    suspects = sorted([*suspects_of(one), *DemandSuspects(one).suspects()], key=lambda each: each.chance)
    tests = max(_LEAST_TESTS, len(suspects)) * max(1, models)
    causes, tree, holds = list[LatencyCause](), list[TreeStep](), True
    for place, suspect in enumerate(suspects):
        holds = holds and suspect.chance <= FAMILY_CHANCE / (tests - place)
        share_s = one.explained_s(suspect.values, suspect.weights)
        share = share_s / one.change_s
        named = f"{suspect.kind} ({suspect.subject})"
        if not holds:
            tree.append(TreeStep(3, f"{named}: it may have changed by chance ({suspect.chance:.2g})"))
        elif share < LEAST_SHARE:
            tree.append(
                TreeStep(
                    3, f"{named}: without it the quantile is {share:.0%} of the change lower: too little"
                )
            )
        else:
            late = _is_late(one, suspect)
            score = min(1.0, share) * (_LATE if late else 1.0)
            score *= _BROAD if suspect.kind is CauseKind.ARRIVALS_GREW else 1.0
            tree.append(TreeStep(3, f"{named}: without it {share:.0%} of the change goes"))
            causes.append(_cause(one, suspect, score, share_s, late))
    causes.sort(key=lambda each: (-each.score, -each.share_s, each.kind, each.subject))
    unique = {(each.kind, each.subject): each for each in reversed(causes)}  # a zone has two roles
    ranked = [each for each in causes if unique[each.kind, each.subject] is each]
    return tuple(ranked[:_MOST_CAUSES]), tree


def _cause(one: TwoTimes, suspect: Suspect, score: float, share_s: float, late: bool | None) -> LatencyCause:
    order = {
        None: "order: not tested, for the baseline does not end where the window begins",
        True: "order: it rose after the latency did, as an effect does",
        False: "order: it rose no later than the latency",
    }[late]
    return LatencyCause(
        suspect.kind,
        suspect.subject,
        score,
        share_s,
        one.after_s - share_s,
        (*suspect.evidence, order, f"chance of its change in a quiet window: {suspect.chance:.1g}"),
        _NEXT[suspect.kind].format(subject=suspect.subject),
    )


def _is_late(one: TwoTimes, suspect: Suspect) -> bool | None:
    """Return whether the suspect rose clearly after the latency; None where the times are not adjacent."""
    window = suspect.figure[1]
    usual, values = one.tails
    if abs(one.baseline.end_s - one.window.begin_s) > 2 * one.bucket_s or len(window) != len(values):
        return None
    rose = _rise(suspect.figure[0], window), _rise(usual, values)
    return rose[0] > rose[1] + 3


def _rise(before: Floats, after: Floats) -> int:
    """Return the first bucket of the window in which a figure is above its middle."""
    if not len(before) or not len(after):
        return 0
    middle = (float(np.mean(before)) + float(np.max(after))) / 2
    above = np.flatnonzero(after >= middle)
    return int(above[0]) if len(above) else 0


_NEXT: Final = {
    CauseKind.ARRIVALS_GREW: "fairway tenants update {subject} --requests-per-minute N",
    CauseKind.PROMPTS_GREW: "fairway tenants update {subject} --input-tokens-per-minute N",
    CauseKind.OUTPUTS_GREW: "fairway tenants update {subject} --output-tokens-per-minute N",
    CauseKind.CACHE_HITS_FELL: "fairway usage --since 2h --by hour --by tenant",
    CauseKind.SLOW_WORKER: "fairway nodes drain {subject}",
    CauseKind.SLOW_VERSION: "fairway rollouts list",
    CauseKind.NOISY_NEIGHBOUR: "fairway tenants update {subject} --input-tokens-per-minute N",
    CauseKind.PREEMPTED: "fairway queue",
    CauseKind.QUOTA_STORE_SLOW: "fairway status -o wide",
    CauseKind.ZONE_NETWORK_SLOW: "fairway nodes list -o wide",
    CauseKind.READER_STALLED: "fairway requests list --slow --tenant {subject}",
    CauseKind.LOG_DISK_SLOW: "fairway status -o wide",
    CauseKind.BUCKETS_FRAGMENTED: "fairway deployments show {subject}",
    CauseKind.VERSION_LOAD: "fairway nodes show {subject}",
    CauseKind.CAPACITY_LOST: "fairway deployments show {subject}",
}


class Rise(NamedTuple):
    """A time of high latency. ``usual_s``: when the lower latency before it began."""

    begin_s: float
    end_s: float
    usual_s: float


def change_in(
    samples: RequestTable, metric: Metric, level: float, begin_s: float, end_s: float
) -> Rise | None:
    """Return the last rise of a model's latency within a time, until it fell back; None without one."""
    models = _models(samples)
    limit = FAMILY_CHANCE / max(1, len(models))
    rises = [_rise_in(of_model(samples, one, metric), metric, level, begin_s, end_s, limit) for one in models]
    return max((one for one in rises if one), default=None)


def _rise_in(
    samples: RequestTable, metric: Metric, level: float, begin_s: float, end_s: float, limit: float
) -> Rise | None:
    """Each value of the series is of as many requests, since a quantile of few is lower than that of many."""
    order = np.argsort(samples.ended_s, kind="stable")
    order = order[(samples.ended_s[order] >= begin_s) & (samples.ended_s[order] < end_s)]
    least = max(5, math.ceil(1 / (1 - level) - 1e-9))
    parts = np.array_split(order, min(_MOST_PARTS, len(order) // least)) if len(order) >= least else []
    values = samples.metric(metric)
    series = [quantile(values[part], samples.weight[part], level) for part in parts]
    times = [float(samples.ended_s[part[0]]) for part in parts]
    found: Rise | None = None
    is_high, usual, usual_s = False, math.inf, begin_s
    for place, now in levels(np.array(series), limit):
        was_high, is_high = is_high, now >= max(LEAST_RATIO * usual, usual + LEAST_RISE_S[metric])
        if is_high:
            found = found if found and was_high else Rise(times[place], end_s, usual_s)
            continue
        if found and was_high:
            found = found._replace(end_s=times[place])
        if was_high or LEAST_RATIO * now <= usual:
            usual_s = times[place]
        usual = now if was_high else min(usual, now)  # small rises add up
    return found
