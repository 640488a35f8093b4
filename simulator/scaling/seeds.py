"""Fleets whose replicas follow a load that swings, on nodes that are ordered, under mixed faults.

The times of scaling are a twentieth of usual ones: a node starts in 3 to 9 s, and the deployment is without
replicas after some seconds without a request.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random
from typing import Final

from services.controlplane.scaling.policy.nodes import NodeLimits
from services.controlplane.scaling.policy.scaler import ScalerTuning
from services.core.records import Priority
from services.core.scaling import Scaling
from simulator.fleet.assembly import Parts
from simulator.fleet.chaos import CHAOS_FAULTS, NODE_FAULTS, FaultKind, InjectedFault, draw_faults
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.fault_actions import FaultSchedule
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.invariant import Invariant
from simulator.fleet.nodes.node_provider import NodeFault
from simulator.fleet.spec import FleetSpec, ScalingSpec, TenantSpec, VersionSpec, WorkerSpec
from simulator.invariants.balance import Balance, Bounds
from simulator.invariants.fencing import Fencing
from simulator.invariants.scaling import Decisions, HeldRequests

SEEDS: Final = 500
FAULTS: Final = 8
_FAULTS_S: Final = 48.0
_ZONES: Final = ("a", "b", "c")
_TENANTS: Final = ("one", "two", "three")
_PRIORITIES: Final = (Priority.BATCH, Priority.STANDARD, Priority.INTERACTIVE)
_KINDS: Final = (*CHAOS_FAULTS, *sorted(NODE_FAULTS), FaultKind.PLANE_CRASH, FaultKind.PLANE_PAUSE)
# Seconds and requests per second: calm, a surge, silence beyond the idle time, single requests, a surge.
_SWINGS: Final = ((6.0, 2.0), (8.0, 14.0), (22.0, 0.0), (6.0, 0.7), (6.0, 10.0))


def scaling_fleet(seed: int) -> FleetSpec:
    """Return a fleet of few workers, less than the surges need; half of them may have none that serves."""
    rng = Random(f"scaling fleet {seed}")
    least, workers = rng.choice((0, 0, 1, 2)), rng.randint(2, 3)
    scaling = ScalingSpec(
        Scaling(least, workers + rng.randint(1, 3), idle_s=rng.uniform(2.0, 4.0)),
        ScalerTuning(rate_window_s=0.5, settle_s=rng.uniform(4.0, 8.0)),
        NodeLimits(rng.randint(2, 4), rng.uniform(12.0, 25.0), rng.uniform(3.0, 8.0), settle_s=1.0),
        start_s=(3.0, 9.0),
        faulty_ratio=rng.choice((0.0, 0.3, 0.6)),
    )
    return FleetSpec(
        seed=seed,
        skewed=True,
        workers=workers,
        gateways=2,
        planes=rng.randint(2, 3),
        replicas=max(1, least),
        tenants=tuple(map(TenantSpec, _TENANTS)),
        worker_kinds=(WorkerSpec(kv_blocks=256, max_sequences=4, step_tokens=512, zones=_ZONES),),
        versions=(VersionSpec(load_s=rng.uniform(0.5, 2.0)),),
        max_context_tokens=2048,
        engine_restart_s=1.0,
        scaling=scaling,
    )


def scaling_faults(seed: int) -> tuple[InjectedFault, ...]:
    """Return mixed faults, and a pause of the leading plane that outlasts its lease, before the silence ends:
    from then on two planes see a changing load, and one of them led before."""
    rng = Random(f"scaling faults {seed}")
    found = draw_faults(rng, duration_s=_FAULTS_S, count=FAULTS, among=_KINDS)
    pause = InjectedFault(FaultKind.PLANE_PAUSE, rng.uniform(4.0, 20.0), rng.uniform(5.0, 8.0), 0.0, 0.0, 0.0)
    return tuple(sorted((*found, pause), key=lambda fault: fault.at_s))


def scaling_load(seed: int) -> Iterator[SimRequest]:
    """Yield requests in swings; some have keys, deadlines or leave."""
    rng, began_s, number = Random(f"scaling load {seed}"), 0.0, 0
    for lasts_s, per_s in _SWINGS:
        at_s = began_s
        while per_s and (at_s := at_s + rng.expovariate(per_s)) < began_s + lasts_s:
            number += 1
            output_tokens = rng.randint(20, 120)
            yield SimRequest(
                tenant=rng.choice(_TENANTS),
                prompt_tokens=rng.randint(16, 400),
                output_tokens=output_tokens,
                arrival_s=at_s,
                priority=rng.choice(_PRIORITIES),
                deadline_s=rng.uniform(0.5, 20.0) if rng.random() < 0.2 else None,
                cancel_after_s=rng.uniform(0.1, 8.0) if rng.random() < 0.05 else None,
                key=f"key-{number}" if rng.random() < 0.2 else "",
                retries=rng.randint(0, 2),
            )
        began_s += lasts_s


@dataclass(frozen=True, slots=True)
class ScalingResult:
    """What became of one seed. ``reached`` counts what invariants compare, and the faults by kind."""

    report: RunReport
    reached: dict[str, int]

    @property
    def violations(self) -> tuple[str, ...]:
        return self.report.violations


def run_scaling(
    seed: int,
    *,
    spec: FleetSpec | None = None,
    parts: Parts | None = None,
    show: Callable[[str], None] | None = None,
) -> ScalingResult:
    """Return what became of one seed, or of another fleet under its load and faults. Same arguments, same
    result, trace and all."""
    spec, strikes = spec or scaling_fleet(seed), FaultSchedule(scaling_faults(seed))
    assert spec.scaling is not None
    decisions, held, fencing = Decisions(spec.scaling), HeldRequests(), Fencing()
    invariants: tuple[Invariant, ...] = (decisions, held, Balance(), Bounds(), fencing)
    reached = Counter[str]()

    def ended(record: RequestRecord) -> None:
        held.closed(record)
        reached["finished"] += record.finished
        reached["resumed"] += record.finished and record.resumes > 0

    report = simulate(
        spec,
        scaling_load(seed),
        plans=(strikes,),
        invariants=invariants,
        on_record=ended,
        parts=parts,
        show=show,
    )
    reached.update({fault.value: count for fault, count in strikes.struck.items()})
    reached.update({fault.value: count for fault, count in decisions.node_faults.items()})
    reached.update(
        decisions=decisions.decided,
        orders=len(decisions.orders),
        held=held.held,
        woken=held.woken,
        at_zero=0 in decisions.decisions,
        at_most=spec.scaling.bounds.max_replicas in decisions.decisions,
    )
    return ScalingResult(report, dict(reached))


def unreached(results: Sequence[ScalingResult]) -> list[str]:
    """Return what none of the runs came to."""
    reached = Counter[str]()
    for result in results:
        reached.update(result.reached)
    wanted = [*map(str, _KINDS), *map(str, NodeFault)]
    wanted += ["finished", "resumed", "decisions", "orders", "held", "woken", "at_zero", "at_most"]
    return [name for name in wanted if not reached[name]]


def main(arguments: Sequence[str]) -> int:
    """Return 0 when every invariant held in every seed and the usual seeds reached everything, else 1."""
    parser = argparse.ArgumentParser(prog="simulator scaling", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print what happens, in one process")
    options = parser.parse_args(arguments)
    began_s, results, violations = time.monotonic(), list[ScalingResult](), 0
    seeds = range(options.first, options.first + options.seeds)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        ran = (
            (run_scaling(seed, show=print) for seed in seeds)
            if options.trace
            else pool.map(run_scaling, seeds)
        )
        for result in ran:
            results.append(result)
            violations += len(result.violations)
            for violation in result.violations:
                print(f"seed {result.report.seed}: {violation}", flush=True)
    total = Counter[str]()
    for result in results:
        total.update(result.reached)
    print(f"reached: {', '.join(f'{name} {count}' for name, count in sorted(total.items()))}")
    missing = unreached(results) if options.seeds >= SEEDS else []
    if missing:
        print(f"NOT REACHED: {', '.join(missing)}")
    figures = {
        "seeds": len(results),
        "requests": sum(result.report.requests for result in results),
        "violations": violations,
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    print(f"RESULT {json.dumps(figures)}")
    return 1 if violations or missing else 0
