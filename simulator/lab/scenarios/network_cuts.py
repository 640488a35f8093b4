"""Links between a gateway, a worker and the schedulers are cut in turn, and heal."""

from __future__ import annotations

from itertools import pairwise

from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, Step
from simulator.lab.scenarios._faulty import faulty

_CUTS = (("gateway-0", "worker-0"), ("worker-0", "scheduler-0"), ("gateway-0", "scheduler-0"))


def _cut(at_s: float, left: str, right: str) -> Step:
    return Step(at_s, lambda fleet: fleet.network.cut(left, right))


def _heal(at_s: float, left: str, right: str) -> Step:
    return Step(at_s, lambda fleet: fleet.network.heal(left, right))


def _happens(duration_s: float) -> tuple[tuple[Step, ...], tuple[Mark, ...]]:
    edges = [duration_s * (turn + 1) / (len(_CUTS) + 2) for turn in range(len(_CUTS) + 1)]
    steps: list[Step] = []
    marks = []
    for (left, right), (from_s, next_s) in zip(_CUTS, pairwise(edges), strict=True):
        to_s = from_s + min(8.0, (next_s - from_s) / 2)
        steps += [_cut(from_s, left, right), _heal(to_s, left, right)]
        marks.append(Mark(f"{left} and {right} do not hear each other", from_s, to_s))
    return tuple(steps), tuple(marks)


def scenario(options: Options) -> Scenario:
    return faulty(options, "network-cuts", load_ratio=0.5, happens=_happens)
