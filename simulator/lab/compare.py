"""``python -m simulator compare``: this scheduler against simpler ones, on traces and on planned trouble.

Same fleet, same load, several seeds; a seed replays its own part of a trace. The last line is ``RESULT`` and
a JSON object of ratios, medians over the seeds:

- ``ttft_vs_round_robin``: our mean time to first token over that of round-robin routing, the worse trace;
- ``goodput_vs_best_other``: our requests per second within the targets over those of the best other policy
  on that trace, the worse trace;
- ``minnow_p95_ttft_ratio``: the p95 of nine small tenants' requests, as one population, beside a tenant that
  sends three fifths of a load above capacity, over what it is when that one sends no more than its max-min
  fair share;
- ``throughput_vs_fcfs``: our output tokens per second in that overload over those of a queue by arrival;
- ``gray_detect_s``: from the moment at which one worker takes three times as long until it is ejected; null
  when it is not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from simulator.lab.baselines import ABLATIONS, FIRST_COME, OURS, POLICIES, ROUND_ROBIN
from simulator.lab.cases import GRAY, LONG, TRACES, WHALE, WHALE_CAPPED, WORKERS, Case, Figures, run_case
from simulator.lab.load.traces import TraceError
from simulator.lab.report.table import aligned, seconds
from simulator.lab.runner import traces_folder
from simulator.lab.scenario import ScenarioError
from simulator.lab.scenarios import LOAD_RATIO

Results = dict[Case, Figures]
_PER_RULE: Final[tuple[tuple[str, str, Callable[[float], str]], ...]] = (
    ("TTFT p50", "ttft_p50_s", seconds),
    ("p95", "ttft_p95_s", seconds),
    ("p99", "ttft_p99_s", seconds),
    ("small tenants' p95", "minnow_ttft_p95_s", seconds),
    ("good/s", "good_per_s", lambda value: f"{value:.2f}"),
    ("tokens/s", "tokens_per_s", lambda value: f"{value:.0f}"),
)
_PER_TRACE: Final[tuple[tuple[str, Callable[[float], str]], ...]] = (
    ("ttft_mean_s", seconds),
    ("ttft_p50_s", seconds),
    ("ttft_p95_s", seconds),
    ("ttft_p99_s", seconds),
    ("itl_p95_s", seconds),
    ("good_per_s", lambda value: f"{value:.2f}"),
    ("good_ratio", lambda value: f"{value:.1%}"),
    ("tokens_per_s", lambda value: f"{value:.0f}"),
    ("cached_ratio", lambda value: f"{value:.1%}"),
    ("refused_ratio", lambda value: f"{value:.1%}"),
)
_TITLES: Final = (
    "policy",
    "",
    "TTFT mean",
    "p50",
    "p95",
    "p99",
    "ITL p95",
    "good/s",
    "good",
    "tokens/s",
    "cached",
    "refused",
)


def main(arguments: Sequence[str]) -> int:
    """Run the comparison; the result is its exit status."""
    parsed = _parser().parse_args(arguments)
    folder = traces_folder(parsed.traces)
    plan = planned_ablations if parsed.rules else planned
    cases = plan(parsed.seeds, parsed.size, folder)
    source = "recorded traces" if folder is not None else "synthetic traces of the recorded ones' shape"
    print(f"{len(cases)} runs on {WORKERS} workers each, {parsed.seeds} seeds, {source}", flush=True)
    try:
        results = run_all(cases, jobs=parsed.jobs)
    except (ScenarioError, TraceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines, found = ablated(results) if parsed.rules else (tables(results), result(results))
    for line in lines:
        print(line)
    print("RESULT", json.dumps(found, allow_nan=False))
    return 0


def planned(seeds: int, size_ratio: float, traces: Path | None) -> list[Case]:
    """Return the runs of a comparison."""
    pairs = [(trace, policy.name) for trace in TRACES for policy in POLICIES]
    pairs += [(WHALE, OURS.name), (WHALE_CAPPED, OURS.name), (WHALE, FIRST_COME.name), (GRAY, OURS.name)]
    return [
        Case(workload, policy, seed, size_ratio, traces)
        for seed in range(seeds)
        for workload, policy in pairs
    ]


def planned_ablations(seeds: int, size_ratio: float, traces: Path | None) -> list[Case]:
    """Return the runs that show what each rule of the queue changes."""
    return [
        Case(workload, policy.name, seed, size_ratio, traces)
        for seed in range(seeds)
        for workload in (*TRACES, LONG, WHALE)
        for policy in (OURS, *ABLATIONS)
    ]


def ablated(results: Results) -> tuple[list[str], dict[str, float | None]]:
    """Return a table of the medians, and by workload and rule the p95 of the time to first token without the
    rule over that with it; of the whale's workload that of the small tenants."""
    rows: list[tuple[str, ...]] = [("workload", "policy", *(title for title, _, _ in _PER_RULE))]
    ratios: dict[str, float | None] = {}
    for workload in (*TRACES, LONG, WHALE):
        figure = "minnow_ttft_p95_s" if workload == WHALE else "ttft_p95_s"
        for policy in (OURS, *ABLATIONS):
            medians = [show(_median(results, workload, policy.name, name)) for _, name, show in _PER_RULE]
            rows.append((workload, policy.name, *medians))
            if policy is not OURS:
                ratio = _paired(results, (workload, policy.name), (workload, OURS.name), figure)
                ratios[f"{workload}, {policy.name}"] = _rounded(ratio, 3)
    return list(aligned(rows)), ratios


def run_all(cases: Sequence[Case], *, jobs: int) -> Results:
    """Return the figures of every case, in the order of the cases, whichever ends first."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        results: Results = {}
        for case, found in zip(cases, pool.map(run_case, cases), strict=True):
            results[case] = found
            print(
                f"  {case.workload}, {case.policy}, seed {case.seed}: TTFT p95 {seconds(found.ttft_p95_s)}, "
                f"{found.good_per_s:.2f} good/s",
                flush=True,
            )
        return results


def tables(results: Results) -> list[str]:
    """Return every figure per policy: the median over the seeds, and its range below."""
    lines: list[str] = []
    for trace, about in TRACES.items():
        targets = f"first token within {seconds(about.slo.ttft_s)}, then {seconds(about.slo.tpot_s)} a token"
        load = f"{about.rows} rows on {about.preset}, {about.load_ratio:.0%} of the capacity without a cache"
        if about.length_ratio != 1.0:
            load += f", lengths times {about.length_ratio:g}"
        lines += ["", f"{trace}: {load}; good: {targets}"]
        rows: list[tuple[str, ...]] = [_TITLES]
        for policy in POLICIES:
            rows += _rows(results, trace, policy.name)
        lines += aligned(rows)
    return [*lines, *_whale(results), *_gray(results)]


def _whale(results: Results) -> Iterator[str]:
    yield ""
    yield f"one tenant sends 60 % of {LOAD_RATIO:.0%} of the capacity, nine others the rest"
    rows = [("policy", "", "minnows' TTFT p95", "asked", "tokens/s", "Jain index")]
    for workload, policy in ((WHALE, OURS.name), (WHALE_CAPPED, OURS.name), (WHALE, FIRST_COME.name)):
        minnows = _spread(results, workload, policy, "minnow_ttft_p95_s", seconds)
        requested = _spread(results, workload, policy, "asked_tokens_per_s", lambda value: f"{value:.0f}")
        tokens = _spread(results, workload, policy, "tokens_per_s", lambda value: f"{value:.0f}")
        # 0: no window in which two of them waited throughout.
        jain = _spread(results, workload, policy, "jain", lambda value: f"{value:.3f}" if value else "-")
        rows.append((policy, workload, minnows, requested, tokens, jain))
    yield from aligned(rows)
    names = ("minnow_ttft_p95_s", "asked_tokens_per_s", "tokens_per_s")
    uncapped, capped = (
        [_values(results, each, OURS.name, name) for name in names] for each in (WHALE, WHALE_CAPPED)
    )
    ratios = [one / other for one, other in zip(uncapped[0], capped[0], strict=True)]
    for name, found in (("uncapped", uncapped), ("capped", capped)):
        loads = [requested / most for requested, most in zip(found[1], uncapped[2], strict=True)]
        yield f"{name}: {_percents(loads)} of what the saturated fleet served in the same seed was asked for"
    yield "minnows' p95, uncapped over capped, by seed: " + ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _percents(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.0%}" for ratio in ratios)


def _gray(results: Results) -> Iterator[str]:
    found = _spread(results, GRAY, OURS.name, "found_after_s", _or_never("{:.1f} s"))
    share = _spread(results, GRAY, OURS.name, "share_after_ratio", _or_never("{:.1%}"))
    yield ""
    yield f"one worker of {WORKERS} three times as slow: ejected after {found}; share of grants then {share}"


def _or_never(form: str) -> Callable[[float], str]:
    return lambda value: form.format(value) if math.isfinite(value) else "never"


def result(results: Results) -> dict[str, float | None]:
    """Return the content of the RESULT line. None: a figure without a value, as for what never happened."""
    others = [policy.name for policy in POLICIES if policy is not OURS]
    ttft, goodput = [], []
    for trace in TRACES:
        ours = _median(results, trace, OURS.name, "ttft_mean_s")
        ttft.append(ours / _median(results, trace, ROUND_ROBIN.name, "ttft_mean_s"))
        best = max(_median(results, trace, other, "good_per_s") for other in others)
        goodput.append(_median(results, trace, OURS.name, "good_per_s") / best)
    minnow = _paired(results, (WHALE, OURS.name), (WHALE_CAPPED, OURS.name), "minnow_ttft_p95_s")
    throughput = _paired(results, (WHALE, OURS.name), (WHALE, FIRST_COME.name), "tokens_per_s")
    return {
        "ttft_vs_round_robin": _rounded(max(ttft), 3),
        "goodput_vs_best_other": _rounded(min(goodput), 3),
        "minnow_p95_ttft_ratio": _rounded(minnow, 3),
        "throughput_vs_fcfs": _rounded(throughput, 3),
        "gray_detect_s": _rounded(_median(results, GRAY, OURS.name, "found_after_s"), 1),
    }


def _rounded(value: float, digits: int) -> float | None:
    """Return a value that JSON has; it has no infinity."""
    return round(value, digits) if math.isfinite(value) else None


def _rows(results: Results, trace: str, policy: str) -> list[tuple[str, ...]]:
    middle = [show(_median(results, trace, policy, name)) for name, show in _PER_TRACE]
    values = [_values(results, trace, policy, name) for name, _ in _PER_TRACE]
    low = [show(min(each)) for each, (_, show) in zip(values, _PER_TRACE, strict=True)]
    high = [show(max(each)) for each, (_, show) in zip(values, _PER_TRACE, strict=True)]
    return [(policy, "median", *middle), ("", "least", *low), ("", "most", *high)]


def _values(results: Results, workload: str, policy: str, name: str) -> list[float]:
    assert name in {field.name for field in fields(Figures)}
    return [
        float(getattr(found, name))
        for case, found in results.items()
        if (case.workload, case.policy) == (workload, policy)
    ]


def _median(results: Results, workload: str, policy: str, name: str) -> float:
    return statistics.median(_values(results, workload, policy, name))


def _paired(results: Results, ours: tuple[str, str], other: tuple[str, str], name: str) -> float:
    """Return the median over the seeds of the ratio within a seed."""
    pairs = zip(_values(results, *ours, name), _values(results, *other, name), strict=True)
    return statistics.median(left / right for left, right in pairs)


def _spread(results: Results, workload: str, policy: str, name: str, show: Callable[[float], str]) -> str:
    values = _values(results, workload, policy, name)
    return f"{show(statistics.median(values))} ({show(min(values))} to {show(max(values))})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulator compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rules", action="store_true", help="leave out one rule of our queue at a time")
    parser.add_argument("--traces", type=Path, help="a folder of recorded traces; else FAIRWAY_TRACES")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", type=float, default=1.0, help="scales the runs: 2 is twice the rows")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at once")
    return parser
