"""One worker takes three times as long for every step: it is found, ejected, and taken back when it heals."""

from __future__ import annotations

from dataclasses import replace

from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, Step
from simulator.lab.scenarios._faulty import faulty

SLOW = "worker-0"


def _happens(duration_s: float) -> tuple[tuple[Step, ...], tuple[Mark, ...]]:
    from_s, to_s = duration_s / 4, duration_s * 3 / 4
    steps = (
        Step(from_s, lambda fleet: fleet.workers[SLOW].slow(3.0)),
        Step(to_s, lambda fleet: fleet.workers[SLOW].slow(1.0)),
    )
    return steps, (Mark(f"{SLOW} is three times as slow", from_s, to_s),)


def scenario(options: Options) -> Scenario:
    made = faulty(options, "slow-worker", load_ratio=0.6, happens=_happens, duration_s=120.0)
    return replace(made, watched=(SLOW, made.marks[0].from_s))
