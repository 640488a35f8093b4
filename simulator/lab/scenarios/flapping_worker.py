"""One worker dies and comes back again and again: its sequences continue elsewhere."""

from __future__ import annotations

from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, Step
from simulator.lab.scenarios._faulty import faulty

FLAPPING = "worker-0"
TIMES = 5


def _happens(duration_s: float) -> tuple[tuple[Step, ...], tuple[Mark, ...]]:
    round_s = duration_s / (TIMES + 1)
    steps: list[Step] = []
    marks = []
    for turn in range(1, TIMES + 1):
        down_s, up_s = turn * round_s, (turn + 0.5) * round_s
        steps.append(Step(down_s, lambda fleet: fleet.crash(FLAPPING)))
        steps.append(Step(up_s, lambda fleet: fleet.restart(FLAPPING)))
        marks.append(Mark(f"{FLAPPING} is down", down_s, up_s))
    return tuple(steps), tuple(marks)


def scenario(options: Options) -> Scenario:
    return faulty(options, "flapping-worker", load_ratio=0.5, happens=_happens)
