"""What is compared: workloads that are sized to a fleet, each run on one policy with one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final

from simulator.lab import scenarios
from simulator.lab.baselines import ABLATIONS, POLICIES
from simulator.lab.load import replay
from simulator.lab.load.load import of_trace
from simulator.lab.load.traces import TraceCut, TraceRow, cut, read_trace
from simulator.lab.report.measure import Slo
from simulator.lab.report.report import LabReport
from simulator.lab.runner import run
from simulator.lab.scenario import Options, Scenario, ScenarioError

WORKERS: Final = 8


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """A recorded trace to be replayed."""

    file: str
    preset: str
    # Replayed in a run.
    rows: int
    # Factor of the lengths.
    length_ratio: float
    # Load as a share of what the fleet can serve without a cache.
    load_ratio: float
    slo: Slo
    synthetic: Callable[[int], Iterator[TraceRow]]


TRACES: Final = {
    "azure": RecordedTrace(
        "azure_llm_2023_conv.csv", "a10", 600, 1.0, 0.78, Slo(2.0, 0.1), replay.azure_like
    ),
    "mooncake": RecordedTrace(
        "mooncake_conversation.jsonl", "a100", 1200, 0.25, 0.95, Slo(1.0, 0.1), replay.mooncake_like
    ),
}
WHALE: Final = "whale"
WHALE_CAPPED: Final = "whale, capped"
GRAY: Final = "slow worker"
LONG: Final = "long prompts"


@dataclass(frozen=True, slots=True)
class Case:
    """One run. ``traces`` is a folder of recorded traces; without it synthetic ones stand in.

    ``size_ratio`` scales how many rows, and for how many seconds, are run.
    """

    workload: str
    policy: str
    seed: int
    size_ratio: float = 1.0
    traces: Path | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run showed."""

    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    itl_p95_s: float
    good_per_s: float
    good_ratio: float
    # Output tokens of all requests after the warm-up; a refused one counts as the mean of the others.
    asked_tokens_per_s: float
    # Output tokens produced from the warm-up until the last arrival.
    tokens_per_s: float
    cached_ratio: float
    refused_ratio: float
    jain: float
    # 95th percentile over all tenants but the whale.
    minnow_ttft_p95_s: float = 0.0
    # Infinite if the slow worker is never found, so that a median over seeds counts that as worst.
    found_after_s: float = 0.0
    # Infinite in the same case.
    share_after_ratio: float = 0.0


def run_case(case: Case) -> Figures:
    """Return what a case shows. Same case, same figures, in whichever process."""
    return figures(run(scenario_of(case)), case)


def scenario_of(case: Case) -> Scenario:
    """Return the run of a case: the workload's fleet and load, with the policy's scheduler."""
    if case.workload in TRACES:
        scenario = _of_trace(case, TRACES[case.workload])
    elif case.workload == GRAY:
        scenario = scenarios.slow_worker(_options(case, 100.0))
    elif case.workload == LONG:
        scenario = scenarios.long_prompts(_options(case, 120.0))
    else:
        scenario = _whale(case)
    policy = next(policy for policy in (*POLICIES, *ABLATIONS) if policy.name == case.policy)
    return replace(scenario, fleet=replace(scenario.fleet, term=policy.settings()))


def figures(report: LabReport, case: Case) -> Figures:
    total, length_s = report.total, report.header.duration_s - report.header.warm_up_s
    from_s, to_s = report.header.warm_up_s, report.header.duration_s
    tokens = [amount for at_s, amount in report.series.tokens_per_s if from_s <= at_s < to_s]
    extra = report.figures
    return Figures(
        ttft_p50_s=total.ttft_s.p50 or 0.0,
        ttft_p95_s=total.ttft_s.p95 or 0.0,
        ttft_p99_s=total.ttft_s.p99 or 0.0,
        ttft_mean_s=total.ttft_s.mean or 0.0,
        itl_p95_s=total.itl_s.p95 or 0.0,
        good_per_s=total.good_per_s,
        good_ratio=total.good / total.sent if total.sent else 0.0,
        asked_tokens_per_s=_requested(total.output_tokens, total.finished, total.sent, length_s),
        tokens_per_s=sum(tokens) / len(tokens) if tokens and length_s else 0.0,
        cached_ratio=report.cache_hit_ratio,
        refused_ratio=1 - total.finished / total.sent if total.sent else 0.0,
        jain=report.fairness.jain_mean or 0.0,
        minnow_ttft_p95_s=extra.get("together_ttft_p95_s") or 0.0,
        found_after_s=_or_never(extra.get("found_after_s")),
        share_after_ratio=_or_never(extra.get("share_after_ratio")),
    )


def _requested(output_tokens: int, finished: int, sent: int, length_s: float) -> float:
    return output_tokens / finished * sent / length_s if finished and length_s else 0.0


def _or_never(value: float | None) -> float:
    return float("inf") if value is None else value


def _of_trace(case: Case, trace: RecordedTrace) -> Scenario:
    options = Options(workers=WORKERS, seed=case.seed, preset=trace.preset)
    fleet = replay.trace_fleet(options)
    # Each seed replays another part of the trace.
    part = TraceCut(
        rows=max(1, round(trace.rows * case.size_ratio)),
        length_ratio=trace.length_ratio,
        most_prompt_tokens=replay.most_prompt_tokens(fleet),
    )
    skipped = islice(_rows(case, trace), case.seed * trace.rows, None)
    rows = list(cut(_from_zero(skipped), part))
    if not rows:
        raise ScenarioError(f"{trace.file} has no rows for seed {case.seed}: compare with fewer seeds")
    speed = replay.speed_of(replay.survey(rows), options, fleet, load_ratio=trace.load_ratio)
    return Scenario(
        name=case.workload,
        summary=f"{len(rows)} rows, replayed {speed:.2f} times as fast",
        fleet=fleet,
        load=lambda: of_trace(
            cut(iter(rows), TraceCut(speed=speed)),
            replay.SHARES,
            seed=case.seed,
            context_tokens=replay.CONTEXT_TOKENS,
        ),
        duration_s=rows[-1].arrival_s / speed,
        slo=trace.slo,
    )


def _rows(case: Case, trace: RecordedTrace) -> Iterator[TraceRow]:
    return trace.synthetic(0) if case.traces is None else read_trace(case.traces / trace.file)


def _from_zero(rows: Iterator[TraceRow]) -> Iterator[TraceRow]:
    first_s: float | None = None
    for row in rows:
        first_s = row.arrival_s if first_s is None else first_s
        yield replace(row, arrival_s=row.arrival_s - first_s)


def _whale(case: Case) -> Scenario:
    options = _options(case, 120.0)
    return scenarios.whale(options) if case.workload == WHALE else scenarios.whale_capped(options)


def _options(case: Case, duration_s: float) -> Options:
    return Options(workers=WORKERS, seed=case.seed, duration_s=duration_s * case.size_ratio)
