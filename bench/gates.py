"""How often the gate policy undoes a good rollout, and how surely it finds a bad one.

Arms are drawn from a model of recorded traces (``bench/gating``): sessions whose requests resemble each
other, a load that changes by the minute, failures that come in sessions. Each rollout has three gates, each
looked at again and again while sessions arrive, also after it passed. ``make bench-gates`` takes about
15 minutes on two cores. The last line is ``RESULT`` with the ratios; ``sessions`` are those of the candidate
in the gate in which the power was measured.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from bench.gating.noise import NONE, Regression, draw, independent, looks
from bench.results import print_result
from services.controlplane.objectives.policy.gates import (
    DEFAULT_BOUNDS,
    GateMetric,
    GatePlan,
    MetricBounds,
    Verdict,
    judge,
)

GATES: Final = 3
BASELINE: Final = 3  # its sessions by the candidate's: a canary at 25 %
LONG: Final = 8  # times the length of the traces' sessions: agents
SHORT_LOOKS: Final = (50, 100, 250, 500)
AA_LOOKS: Final = (50, 100, 250, 500, 1000, 1600)
POWER_LOOKS: Final = (100, 250, 500, 1000, 1500, 2000, 3000, 4000, 6000)
PLAN: Final = GatePlan(gates=GATES)
STRICT: Final = replace(
    PLAN,
    bounds={
        metric: MetricBounds(0.0 if bounds.margin < 1 else 1.0, bounds.limit)
        for metric, bounds in DEFAULT_BOUNDS.items()
    },
)
TTFT: Final = Regression(ttft=1.3)
ERRORS: Final = Regression(error_ratio=0.02)
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate: after how many of the candidate's sessions it failed first, and by what; and passed."""

    failed_at: int | None = None
    failed_by: tuple[GateMetric, ...] = ()
    passed_at: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """``times``: the length of sessions by that of the traces. ``mistaken``: requests count as sessions."""

    plan: GatePlan = PLAN
    counts: tuple[int, ...] = AA_LOOKS
    regression: Regression = NONE
    times: int = 1
    mistaken: bool = False


def run_gate(seed: int, case: Case) -> Gate:
    """Return how one gate went."""
    rng, counts = np.random.default_rng(seed), case.counts
    arms = [
        draw(rng, BASELINE * counts[-1], times=case.times),
        draw(rng, counts[-1], case.regression, times=case.times),
    ]
    if case.mistaken:
        arms = [independent(rng, arm) for arm in arms]
    baseline = looks(arms[0], tuple(BASELINE * count for count in counts))
    found = Gate()
    for count, base, other in zip(counts, baseline, looks(arms[1], counts), strict=True):
        report = judge(case.plan, base, other)
        if report.verdict is Verdict.FAIL:
            return replace(found, failed_at=count, failed_by=report.failed)
        if report.verdict is Verdict.PASS and found.passed_at is None:
            found = replace(found, passed_at=count)
    return found


def run_rollout(seed: int, case: Case) -> Gate:
    """Return the gate that ended a rollout of a version that equals the baseline, or its last gate."""
    found = Gate()
    for number in range(GATES):
        found = run_gate(seed * GATES + number, case)
        if found.failed_at is not None:
            break
    return found


def upper_bound(failures: int, runs: int, confidence: float = CONFIDENCE) -> float:
    """Return the one-sided upper confidence bound of a ratio (Clopper and Pearson 1934)."""
    if failures >= runs:
        return 1.0
    low, high = failures / runs, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(failures, runs, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _at_most(failures: int, runs: int, ratio: float) -> float:
    """Return the probability of at most that many failures."""
    logs = (
        math.lgamma(runs + 1) - math.lgamma(count + 1) - math.lgamma(runs - count + 1)
        + count * math.log(ratio) + (runs - count) * math.log1p(-ratio)
        for count in range(failures + 1)
    )  # fmt: skip
    return sum(map(math.exp, logs))


def _show_false(name: str, found: list[Gate]) -> tuple[float, float]:
    failed = [gate for gate in found if gate.failed_at is not None]
    bound = upper_bound(len(failed), len(found))
    causes = dict(Counter(str(metric) for gate in failed for metric in gate.failed_by))
    print(f"{name}: {len(failed)} of {len(found)} rolled back, at most {bound:.3%} (95 %) {causes or ''}")
    return len(failed) / len(found), bound


def _show_power(name: str, found: list[Gate], counts: Iterable[int]) -> float:
    print(f"{name}: found after that many sessions of the candidate")
    for count in counts:
        done = sum(gate.failed_at is not None and gate.failed_at <= count for gate in found)
        print(f"  {count:6d}  {done / len(found):6.1%}")
    return sum(gate.failed_at is not None for gate in found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2000, help="rollouts of equal versions")
    parser.add_argument("--bad", type=int, default=200, help="gates with each regression")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    first = options.seed * 1_000_000
    seeds, few = range(first, first + options.rollouts), range(first, first + options.bad)
    with ProcessPoolExecutor(options.processes) as pool:

        def rollouts(numbers: range, case: Case) -> list[Gate]:
            return list(pool.map(partial(run_rollout, case=case), numbers, chunksize=10))

        def gates(regression: Regression) -> list[Gate]:
            case = Case(counts=POWER_LOOKS, regression=regression)
            return list(pool.map(partial(run_gate, case=case), few, chunksize=10))

        equal = rollouts(seeds, Case())
        strict = rollouts(few, Case(STRICT, SHORT_LOOKS, times=LONG))
        mistaken = rollouts(few, Case(STRICT, SHORT_LOOKS, times=LONG, mistaken=True))
        slower, failing = gates(TTFT), gates(ERRORS)
    ratio, bound = _show_false("equal versions", equal)
    _show_false("equal versions, no margin, long sessions", strict)
    _show_false("the same, requests taken for independent", mistaken)
    passed = sorted(gate.passed_at for gate in equal if gate.passed_at is not None)
    print(f"passed the last gate: {len(passed)}, half of them after {passed[len(passed) // 2]} sessions")
    result = {
        "aa_false_ratio": round(ratio, 5),
        "aa_upper_bound": round(bound, 5),
        "power_ttft_1_3": round(_show_power("TTFT x 1.3", slower, POWER_LOOKS), 4),
        "power_errors_2pct": round(_show_power("2 % errors", failing, POWER_LOOKS), 4),
        "sessions": POWER_LOOKS[-1],
    }
    print_result(result)


if __name__ == "__main__":
    main()
