"""The leading scheduler is killed under load: the standby leads, and no request is lost."""

from __future__ import annotations

from simulator.fleet.fleet import SimFleet
from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, Step
from simulator.lab.scenarios._faulty import faulty


def _kill_leader(fleet: SimFleet) -> None:
    leader = fleet.leader
    if leader is not None:
        fleet.crash(leader.name)


def _restart_dead(fleet: SimFleet) -> None:
    for name in list(fleet.schedulers):
        if not fleet.processes[name].alive:
            fleet.restart(name)


def _happens(duration_s: float) -> tuple[tuple[Step, ...], tuple[Mark, ...]]:
    at_s = duration_s / 3
    until_s = at_s + min(10.0, duration_s / 4)
    steps = (Step(at_s, _kill_leader), Step(until_s, _restart_dead))
    return steps, (Mark("the leader was killed and is away", at_s, until_s),)


def scenario(options: Options) -> Scenario:
    return faulty(options, "failover", load_ratio=0.6, happens=_happens)
