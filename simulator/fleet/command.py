"""``python -m simulator sim``: seeds of mixed faults, judged by every invariant; then one line of JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from simulator.fleet.chaos import REQUESTS
from simulator.fleet.seeds import SeedResult, run_seed, run_seeds, wall_s


def main(arguments: Sequence[str]) -> int:
    """Return 0 when every invariant held in every seed, else 1."""
    parser = argparse.ArgumentParser(prog="simulator sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="per seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        return _replay(asked.seed, asked.workers, asked.requests, trace=asked.trace)
    began_s = wall_s()
    total = run_seeds(
        range(asked.first, asked.first + asked.seeds),
        workers=asked.workers,
        requests=asked.requests,
        processes=asked.processes,
        tell=_tell,
    )
    print(f"outcomes: {_counts(total.outcomes)}")
    print(f"faults:   {_counts(total.faults)}")
    print(f"reached:  {_counts(total.reached)}, of {total.requests} requests")
    nearest = max(total.widest.values(), default=0.0)
    print(f"fairness: {total.compared} comparisons, at most {nearest:.2f} of the bound")
    result = {
        "seeds": total.seeds,
        "violations": sum(map(len, total.violations.values())),
        "wall_s": round(wall_s() - began_s, 1),
    }
    print(f"RESULT {json.dumps(result)}")
    return 1 if total.violations else 0


def _replay(seed: int, workers: int, requests: int, *, trace: bool) -> int:
    result = run_seed(seed, workers=workers, requests=requests, show=print if trace else None)
    report = result.report
    print(f"outcomes: {_counts(report.outcomes)}")
    print(f"faults:   {_counts(result.faults)}")
    if result.compared:
        print(f"fairness: {result.compared} comparisons, at most {result.widest:.2f} of the bound")
    print(f"trace:    {report.trace_digest}, {report.events} events, {report.simulated_s:.3f} s")
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    return 1 if result.violations else 0


def _tell(result: SeedResult) -> None:
    for violation in result.violations:
        print(f"seed {result.report.seed}: {violation}", flush=True)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
