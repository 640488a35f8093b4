"""Rollouts of whole fleets under mixed faults, judged by every invariant."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.controlplane.rollouts.records import RolloutPhase
from simulator.fleet.assembly import Parts
from simulator.fleet.fault_actions import FaultSchedule
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.invariant import Invariant
from simulator.fleet.spec import VERSION_DIGEST
from simulator.invariants.arms import Arms
from simulator.invariants.balance import Balance
from simulator.invariants.fencing import Fencing
from simulator.invariants.splits import SplitHistory
from simulator.rollouts.operator import Operator
from simulator.rollouts.script import (
    CANDIDATE,
    CandidateKind,
    end_of,
    kind_of,
    rollout_faults,
    rollout_fleet,
    rollout_load,
    strategy_of,
)

SEEDS: Final = 40


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What became of one seed."""

    report: RunReport
    kind: CandidateKind
    # How many faults of each kind were carried out.
    faults: dict[str, int]
    # Phases in order; ``why`` is the reason of the last one.
    phases: tuple[RolloutPhase, ...]
    why: str
    # Writes of the rollout, by process.
    writers: dict[str, int]
    # What requests went through: "on candidate", "rerouted", "stale view".
    reached: dict[str, int]

    @property
    def violations(self) -> tuple[str, ...]:
        return self.report.violations


def run_rollout(
    seed: int, *, parts: Parts | None = None, show: Callable[[str], None] | None = None
) -> RolloutResult:
    """Return what became of one seed. Same arguments, same result, trace and all."""
    kind, operator, strikes = kind_of(seed), Operator(seed), FaultSchedule(rollout_faults(seed))
    history = SplitHistory(VERSION_DIGEST, CANDIDATE, end_of(kind))
    arms = Arms(history, answers=kind is not CandidateKind.UNANSWERING)
    invariants: tuple[Invariant, ...] = (history, arms, Balance(), Fencing())
    report = simulate(
        rollout_fleet(seed),
        rollout_load(seed, lambda: operator.phase),
        plans=(operator, strikes),
        invariants=invariants,
        on_record=arms.closed,
        parts=parts,
        show=show,
    )
    return RolloutResult(
        report,
        kind,
        {fault.value: count for fault, count in sorted(strikes.struck.items())},
        tuple(history.phases),
        "" if history.rollout is None else history.rollout.history[-1].message,
        history.writers,
        dict(arms.reached),
    )


def unreached(results: Sequence[RolloutResult]) -> list[str]:
    """Return what none of the runs came to: kinds, faults, phases and what invariants compare."""
    struck, reached = Counter[str](), Counter[str]()
    for result in results:
        struck.update(result.faults)
        reached.update(result.reached)
    missing = {*CandidateKind} - {result.kind for result in results}
    missing |= {fault.kind.value for fault in rollout_faults(0)} - set(struck)
    missing |= {*RolloutPhase} - {phase for result in results for phase in result.phases}
    missing |= {name for name, count in reached.items() if not count}
    if not any(len(result.writers) > 2 for result in results):
        missing.add("a failover in the midst of a rollout")
    return sorted(missing)


def main(arguments: Sequence[str]) -> int:
    """Return 0 when every invariant held in every seed and the usual seeds reached everything, else 1."""
    parser = argparse.ArgumentParser(prog="simulator rollouts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    options = parser.parse_args(arguments)
    began_s, found, requests = time.monotonic(), Counter[str](), 0
    results: list[RolloutResult] = []
    for seed in range(options.first, options.first + options.seeds):
        ran = run_rollout(seed, show=print if options.trace else None)
        results.append(ran)
        requests += ran.report.requests
        found["violations"] += len(ran.violations)
        kind = f"{strategy_of(seed)} {ran.kind}"
        found[f"{kind} {ran.phases[-1] if ran.phases else 'not started'}"] += 1
        print(f"seed {seed}: {kind}, {', '.join(ran.phases)}: {ran.why}; {ran.reached}", flush=True)
        for violation in ran.violations:
            print(f"  VIOLATION {violation}", flush=True)
    print(f"ends: {', '.join(f'{name} {count}' for name, count in sorted(found.items()))}")
    result = {
        "seeds": options.seeds,
        "requests": requests,
        "violations": found["violations"],
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    missing = unreached(results) if options.first == 0 and options.seeds >= SEEDS else []
    if missing:
        print(f"NOT REACHED: {', '.join(missing)}")
    print(f"RESULT {json.dumps(result)}")
    return 1 if found["violations"] or missing else 0
