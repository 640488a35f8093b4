"""One seed, judged by every invariant; and many of them, over several processes.

Nine of ten are a fleet under mixed faults (``chaos``), the tenth a small one that is never without tenants
that wait (``saturated``): there the order in which they are served is judged.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from operator import attrgetter
from typing import Final

from simulator.fleet.assembly import Parts
from simulator.fleet.chaos import (
    DURATION_S,
    REQUESTS,
    InjectedFault,
    chaos_faults,
    chaos_load,
    chaos_rows,
    chaos_spec,
    has_rows,
    is_saturated,
    saturated_faults,
    saturated_load,
    saturated_spec,
)
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.clients.row_client import SimRows
from simulator.fleet.fault_actions import FaultSchedule
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.invariant import Invariant, Looks
from simulator.fleet.spec import FleetSpec
from simulator.invariants.balance import Balance, Bounds
from simulator.invariants.fairness import FairnessInvariant
from simulator.invariants.fencing import Fencing
from simulator.invariants.isolation import Poisons, Slots
from simulator.invariants.shedding import Shedding

# Continued elsewhere after the loss of a worker; came through another gateway; had its output limit
# reduced; was sent again after a refusal; was placed by a gateway without a leader; was a poison that was
# found.
REACHES: Final = ("resumed", "asked again", "degraded", "retried", "placed alone", "condemned")


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What became of one seed. ``faults`` counts what was carried out, by kind, and ``reached`` what requests
    went through, by the names of ``REACHES``. ``compared``: how often the service of two tenants was, and
    ``widest`` the largest difference over its bound; 0 but in fairness seeds."""

    report: RunReport
    faults: dict[str, int]
    reached: dict[str, int]
    compared: int = 0
    widest: float = 0.0

    @property
    def violations(self) -> tuple[str, ...]:
        return self.report.violations


@dataclass(slots=True)
class Total:
    """Many seeds together."""

    seeds: int = 0
    requests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    violations: dict[int, tuple[str, ...]] = field(default_factory=dict)
    compared: int = 0
    widest: dict[int, float] = field(default_factory=dict)  # widest gap of each fairness seed

    def add(self, result: SeedResult) -> None:
        self.seeds += 1
        self.requests += result.report.requests
        self.outcomes.update(result.report.outcomes)
        self.rows.update(result.report.rows)
        self.faults.update(result.faults)
        self.reached.update(result.reached)
        self.compared += result.compared
        if is_saturated(result.report.seed):
            self.widest[result.report.seed] = result.widest
        if result.violations:
            self.violations[result.report.seed] = result.violations


def run_seed(
    seed: int,
    *,
    workers: int = 20,
    requests: int = REQUESTS,
    looks: Looks = Looks.TOUCHED,
    parts: Parts | None = None,
    show: Callable[[str], None] | None = None,
) -> SeedResult:
    """Return what became of one seed. Same arguments, same result, trace and all."""
    spec, load, faults = _seed(seed, workers, requests)
    strikes = FaultSchedule(faults)
    fencing, fairness, poisons = Fencing(), FairnessInvariant(predictable=True), Poisons()
    invariants: list[Invariant] = [Balance(), Bounds(), fencing, Shedding(), poisons, Slots()]
    if is_saturated(seed):
        invariants.append(fairness)
    reached: Counter[str] = Counter()

    def ended(record: RequestRecord) -> None:
        poisons.closed(record)
        reached["resumed"] += record.finished and record.resumes > 0
        reached["asked again"] += record.finished and record.attempts > record.refusals + 1
        reached["degraded"] += record.finished and record.degraded
        reached["retried"] += record.finished and record.refusals > 0

    report = simulate(
        spec,
        load,
        plans=(strikes,),
        invariants=invariants,
        looks=looks,
        on_record=ended,
        parts=parts,
        show=show,
    )
    reached["placed alone"] = fencing.alone
    reached["condemned"] = poisons.condemned
    struck = {kind.value: count for kind, count in sorted(strikes.struck.items())}
    return SeedResult(report, struck, dict(reached), fairness.compared, fairness.widest)


def _seed(
    seed: int, workers: int, requests: int
) -> tuple[FleetSpec, Iterator[SimRequest | SimRows], tuple[InjectedFault, ...]]:
    """Return the fleet of a seed, its load and its faults."""
    if is_saturated(seed):
        faults = saturated_faults(seed, duration_s=DURATION_S)
        return saturated_spec(seed, workers=workers), saturated_load(seed, requests), faults
    load: Iterator[SimRequest | SimRows] = chaos_load(seed, requests)
    if has_rows(seed):
        load = heapq.merge(load, chaos_rows(seed), key=attrgetter("arrival_s"))
    return chaos_spec(seed, workers=workers), load, chaos_faults(seed)


def run_seeds(
    seeds: Iterable[int], *, workers: int, requests: int, processes: int, show: Callable[[SeedResult], None]
) -> Total:
    """Return all seeds together; The callback receives each as it ends."""
    total = Total()
    work = partial(run_seed, workers=workers, requests=requests)
    if processes <= 1:
        for seed in seeds:
            _take(work(seed), total, show)
        return total
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for result in pool.map(work, seeds):
            _take(result, total, show)
    return total


def _take(result: SeedResult, total: Total, show: Callable[[SeedResult], None]) -> None:
    total.add(result)
    show(result)


def main(arguments: Sequence[str]) -> int:
    """``python -m simulator sim``: return 0 when every invariant held in every seed, else 1."""
    parser = argparse.ArgumentParser(
        prog="simulator sim", description="Seeds of mixed faults, judged by every invariant"
    )
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="per seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happens")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _replay(options.seed, options.workers, options.requests, trace=options.trace)
    began_s = time.monotonic()
    total = run_seeds(
        range(options.first, options.first + options.seeds),
        workers=options.workers,
        requests=options.requests,
        processes=options.processes,
        show=_show,
    )
    print(f"outcomes: {_counts(total.outcomes)}")
    print(f"rows:     {_counts(total.rows)}")
    print(f"faults:   {_counts(total.faults)}")
    print(f"reached:  {_counts(total.reached)}, of {total.requests} requests")
    nearest = max(total.widest.values(), default=0.0)
    print(f"fairness: {total.compared} comparisons, at most {nearest:.2f} of the bound")
    result = {
        "seeds": total.seeds,
        "violations": sum(map(len, total.violations.values())),
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    print(f"RESULT {json.dumps(result)}")
    return 1 if total.violations else 0


def _replay(seed: int, workers: int, requests: int, *, trace: bool) -> int:
    result = run_seed(seed, workers=workers, requests=requests, show=print if trace else None)
    report = result.report
    print(f"outcomes: {_counts(report.outcomes)}")
    if report.rows:
        print(f"rows:     {_counts(report.rows)}")
    print(f"faults:   {_counts(result.faults)}")
    if result.compared:
        print(f"fairness: {result.compared} comparisons, at most {result.widest:.2f} of the bound")
    print(f"trace:    {report.trace_digest}, {report.events} events, {report.simulated_s:.3f} s")
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    return 1 if result.violations else 0


def _show(result: SeedResult) -> None:
    for violation in result.violations:
        print(f"seed {result.report.seed}: {violation}", flush=True)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
