"""A day of two pools under four scalers, the loss of a zone at the peak, and the plan of a pool's size.

    python -m simulator elastic [--traces FOLDER] [--hours 24] [--pools azure mooncake] [--jobs 2]

The bound is the node time that the day's work takes on full replicas, of all requests but the heaviest of
each class, as many as ours missed. No scaler is below it: ``capacity_of`` is the most that a replica serves
of a mix, since each of its terms is the least that the cost model lets the work take, and a node also costs
while it starts, idles and drains. Each rival's own target is searched for the cheapest day that reaches our
attainment. Work of batches that is left at the end is charged at the rate of full replicas. Prints a line
per run, and ``RESULT {json}`` last, with the worst pool's figures.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from services.core.estimates.capacity import capacity_of, mix_of
from services.core.records import Priority
from simulator.elastic.plan import plan_error
from simulator.elastic.pool import ElasticPool, Scaler
from simulator.elastic.scalers import RIVALS, Ours, Rival
from simulator.elastic.traffic import AZURE, DAY_S, MOONCAKE, Workload
from simulator.lab.load.traces import TraceError
from simulator.lab.report.table import aligned

POOLS: Final = {one.name: one for one in (AZURE, MOONCAKE)}
REVERSAL_S: Final = 1800.0  # time within which a change and its opposite are an oscillation
CALM_S: Final = 30.0  # time without a miss that ends a breach
SEARCHES: Final = 4
URGENT: Final = (Priority.INTERACTIVE, Priority.STANDARD)


@dataclass(frozen=True, slots=True)
class DayOutcome:
    """What a day showed. Times in seconds of nodes."""

    attainment: float  # of interactive requests
    standard: float
    expired_ratio: float  # share of batch lines that were not done in time
    node_s: float  # of the day, and for the batch lines that are left
    bound_s: float
    oscillations_per_day: float
    changes: int
    target: float = 0.0  # a rival's

    @property
    def cost(self) -> float:
        return self.node_s / self.bound_s


def day(load: Workload, scaler: Scaler, target: float = 0.0) -> DayOutcome:
    """Return what a day under a scaler shows."""
    rate_per_s = load.rate_per_s * (1.0 - load.swing_ratio * math.cos(2.0 * math.pi * load.phase_s / DAY_S))
    pool = ElasticPool(load, scaler, replicas=math.ceil(rate_per_s / replica_rate(load)))
    pool.run()
    batch = pool.classes[Priority.BATCH]
    capacity = capacity_of(load.costs, mix_of(pool.done), max_sequences=load.max_sequences)
    assert capacity is not None
    left_s = sum(pool.due.values()) / capacity.tokens_per_s(mix_of(pool.done))
    return DayOutcome(
        attainment=pool.classes[Priority.INTERACTIVE].attainment,
        standard=pool.classes[Priority.STANDARD].attainment,
        expired_ratio=batch.refused / max(1, batch.arrived),
        node_s=pool.node_s + left_s,
        bound_s=bound_s(load, pool),
        oscillations_per_day=oscillations(pool.changes) * DAY_S / load.duration_s,
        changes=len(pool.changes),
        target=target,
    )


def replica_rate(load: Workload) -> float:
    """Return the requests per second of one full replica, from the first minutes of the day."""
    mix = mix_of(
        (one.prompt, 0, one.output) for one in replace(load, duration_s=600.0, phase_s=0.0).requests()
    )
    found = capacity_of(load.costs, mix, max_sequences=load.max_sequences)
    assert found is not None
    return found.requests_per_s


def bound_s(load: Workload, pool: ElasticPool) -> float:
    """Return the least node time in which a clairvoyant serves the day with the misses of ``pool``."""
    missed = {one: pool.classes[one].arrived - pool.classes[one].met for one in URGENT}
    heaviest: dict[Priority, list[tuple[int, int, int]]] = {one: [] for one in URGENT}
    kept: list[tuple[int, int, int]] = []
    for request in load.requests():
        lengths = (request.prompt, 0, request.output)
        most = missed.get(request.priority, 0)
        if not most:
            kept.append(lengths)
            continue
        entry = (request.prompt + request.output, request.prompt, request.output)
        heap = heaviest[request.priority]
        if len(heap) < most:
            heapq.heappush(heap, entry)
        else:
            _, prompt, output = heapq.heappushpop(heap, entry)
            kept.append((prompt, 0, output))
    capacity = capacity_of(load.costs, mix_of(kept), max_sequences=load.max_sequences)
    assert capacity is not None
    return len(kept) / capacity.requests_per_s


def oscillations(changes: Sequence[tuple[float, int]]) -> int:
    """Count the changes whose opposite followed within ``REVERSAL_S``."""
    return sum(
        one * other < 0 and to_s - from_s < REVERSAL_S for (from_s, one), (to_s, other) in pairwise(changes)
    )


def best_day(load: Workload, rival: Rival, attainment: float) -> DayOutcome:
    """Return the cheapest day of a rival that reaches an attainment, else its best one."""
    low, high = math.log(rival.low), math.log(rival.high)
    found: list[DayOutcome] = [day(load, rival.scaler(rival.low), rival.low)]
    for _ in range(SEARCHES):
        target = math.exp((low + high) / 2)
        found.append(day(load, rival.scaler(target), target))
        low, high = (
            (math.log(target), high) if found[-1].attainment >= attainment else (low, math.log(target))
        )
    reached = [one for one in found if one.attainment >= attainment]
    return min(reached, key=lambda one: one.cost) if reached else max(found, key=lambda one: one.attainment)


# --- the loss of a zone ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """The scaler, decided more often, and what the pool showed at each."""

    scaler: Ours
    from_s: float
    rows: list[tuple[str, ...]]
    every_s: float = 2.0

    def replicas(self, pool: ElasticPool, now_s: float) -> int:
        found = self.scaler.replicas(pool, now_s)
        past_s = now_s - self.from_s
        if past_s in _SHOWN_S:
            interactive, standard, batch = pool.classes.values()
            missed = sum(at_s >= self.from_s for at_s in pool.misses)
            running = sum(one[2].priority is Priority.BATCH for each in pool.replicas for one in each.running)
            waits = (len(interactive.queue), len(standard.queue), len(batch.queue), running)
            ready = (len(pool.ready), len(pool.starting), found)
            self.rows.append(
                (f"{past_s:g}", *(str(one) for one in (*ready, *waits, missed, standard.refused)))
            )
        return found


_SHOWN_S: Final = (-2, 0, 2, 4, 6, 8, 10, 14, 20, 30, 40, 60, 90, 120, 150, 180)
HEADS: Final = (
    "s after the loss",
    "ready",
    "starting",
    "wanted",
    "interactive waiting",
    "standard waiting",
    "batch lines waiting",
    "batch lines running",
    "interactive missed",
    "standard refused",
)


def zone_loss(load: Workload) -> tuple[float, list[tuple[str, ...]]]:
    """Return the seconds until interactive requests are in time again after a zone is lost at the peak."""
    lost_s = 5400.0
    load = replace(load, duration_s=lost_s + 900.0, phase_s=lost_s - DAY_S / 2, spikes=0)
    peak = load.rate_per_s * (1.0 + load.swing_ratio) / replica_rate(load)
    watch = Watched(Ours(), lost_s, [HEADS])
    pool = ElasticPool(load, watch, replicas=math.ceil(peak), zone_loss_s=lost_s)
    pool.run()
    ends_s = lost_s
    for at_s in sorted(at_s for at_s in pool.misses if at_s >= lost_s - load.targets[Priority.INTERACTIVE]):
        if at_s - ends_s > CALM_S:
            break
        ends_s = max(ends_s, at_s)
    return ends_s - lost_s, watch.rows


# --- the command -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status: 1 where a figure misses its target, 2 for a wrong use."""
    parsed = _parser().parse_args(arguments)
    try:
        duration_s = parsed.hours * 3600.0
        pools = [replace(POOLS[name], duration_s=duration_s, seed=parsed.seed) for name in parsed.pools]
        if parsed.traces is not None:
            pools = [one.recorded(parsed.traces) for one in pools]
        result = compare(pools, parsed.jobs)
    except (TraceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("RESULT " + json.dumps(result))
    return 0 if _holds(result) else 1


def compare(pools: Sequence[Workload], jobs: int) -> dict[str, float]:
    """Return the content of the RESULT line, and print what each run showed."""
    with ProcessPoolExecutor(jobs) as executor:
        mine = list(executor.map(_ours, pools))
        tasks = [
            (load, name, one.attainment) for load, one in zip(pools, mine, strict=True) for name in RIVALS
        ]
        rivals = list(executor.map(_rival, tasks))
        losses = list(executor.map(zone_loss, pools))
        errors = list(executor.map(plan_error, pools))
    rows: list[tuple[str, ...]] = [("pool", "scaler", "target", *_HEADS)]
    rows += [(load.name, "ours", "", *_row(one)) for load, one in zip(pools, mine, strict=True)]
    rows += [
        (load.name, name, f"{one.target:.3g}", *_row(one))
        for (load, name, _), one in zip(tasks, rivals, strict=True)
    ]
    print("\n".join(aligned(rows)))
    for load, (breach_s, table) in zip(pools, losses, strict=True):
        print(f"{load.name}: a zone is lost at the peak; interactive requests miss for {breach_s:.1f} s")
        print("\n".join(aligned(table)))
    for load, error in zip(pools, errors, strict=True):
        print(f"{load.name}: replicas of the plan by those of the simulated fleet: {1.0 + error:.3f}")
    costs = {load.name: one.cost for load, one in zip(pools, mine, strict=True)}
    ratios = {
        (load.name, name): costs[load.name] / one.cost
        for (load, name, _), one in zip(tasks, rivals, strict=True)
    }
    queue = max(ratio for (_, name), ratio in ratios.items() if name != "utilisation")
    found = {
        "slo_attainment": min(one.attainment for one in mine),
        "cost_vs_clairvoyant": max(costs.values()),
        "cost_vs_queue_scaler": queue,
        "cost_vs_utilisation_scaler": max(
            ratio for (_, name), ratio in ratios.items() if name == "utilisation"
        ),
        "oscillations_per_day": max(one.oscillations_per_day for one in mine),
        "zone_loss_breach_s": max(breach_s for breach_s, _ in losses),
        "plan_error": max(abs(error) for error in errors),
    }
    return {name: round(value, 4) for name, value in found.items()}


_HEADS: Final = (
    "interactive",
    "standard",
    "expired",
    "node hours",
    "cost by bound",
    "oscillations",
    "changes",
)


def _row(one: DayOutcome) -> tuple[str, ...]:
    shares = (f"{one.attainment:.4f}", f"{one.standard:.4f}", f"{one.expired_ratio:.4f}")
    rest = (
        f"{one.node_s / 3600.0:.1f}",
        f"{one.cost:.3f}",
        f"{one.oscillations_per_day:.1f}",
        str(one.changes),
    )
    return (*shares, *rest)


def _holds(result: dict[str, float]) -> bool:
    return (
        result["slo_attainment"] >= 0.99
        and result["cost_vs_clairvoyant"] <= 1.25
        and result["cost_vs_queue_scaler"] < 1.0
        and result["cost_vs_utilisation_scaler"] < 1.0
        and result["oscillations_per_day"] <= 4.0
        and result["zone_loss_breach_s"] <= 30.0
        and result["plan_error"] <= 0.1
    )


def _ours(load: Workload) -> DayOutcome:
    return day(load, Ours())


def _rival(task: tuple[Workload, str, float]) -> DayOutcome:
    load, name, attainment = task
    return best_day(load, RIVALS[name], attainment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulator elastic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, help="a folder of recorded traces, instead of fitted arrivals")
    parser.add_argument(
        "--hours", type=float, default=24.0, help="length of the day, from the night's least rate on"
    )
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="day, of the same rates")
    return parser
