"""Scenarios of faults: a steady load on a fleet that something happens to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final

from simulator.fleet.fleet import SimFleet
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.load import Stream
from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, Script, Step, fleet_of
from simulator.lab.scenarios.loads import OUTPUT, PROMPT, chat_rate, tenants, under_load

Course = tuple[tuple[Step, ...], tuple[Mark, ...]]  # what is done, and how it is marked

_WORKER: Final = "worker-0"
_TIMES: Final = 5
_CUTS: Final = (("gateway-0", _WORKER), (_WORKER, "scheduler-0"), ("gateway-0", "scheduler-0"))


def _faulty(
    options: Options,
    name: str,
    happens: Callable[[float], Course],
    *,
    load_ratio: float,
    duration_s: float = 90.0,
) -> Scenario:
    """Return a scenario of four tenants; ``happens`` gets its duration in seconds."""
    duration_s = options.duration_s or duration_s
    senders = tenants(4)
    fleet = fleet_of(options, senders)
    rate = chat_rate(options, fleet, load_ratio=load_ratio)
    streams = [Stream(tenant.name, Poisson(rate / len(senders)), PROMPT, OUTPUT) for tenant in senders]
    steps, marks = happens(duration_s)
    summary = f"{rate:.1f} requests/s of {len(senders)} tenants; {marks[0].name}"
    made = under_load(name, options, fleet, streams, summary=summary, duration_s=duration_s, marks=marks)
    return replace(made, plans=(Script(steps),))


def failover(options: Options) -> Scenario:
    """The leading scheduler is killed under load: the standby leads, and no request is lost."""

    def happens(duration_s: float) -> Course:
        at_s = duration_s / 3
        until_s = at_s + min(10.0, duration_s / 4)
        steps = (Step(at_s, _kill_leader), Step(until_s, _restart_dead))
        return steps, (Mark("the leader was killed and is away", at_s, until_s),)

    return _faulty(options, "failover", happens, load_ratio=0.6)


def flapping_worker(options: Options) -> Scenario:
    """One worker dies and comes back again and again: its sequences continue elsewhere."""

    def happens(duration_s: float) -> Course:
        round_s = duration_s / (_TIMES + 1)
        steps: list[Step] = []
        marks = []
        for turn in range(1, _TIMES + 1):
            down_s, up_s = turn * round_s, (turn + 0.5) * round_s
            steps.append(Step(down_s, lambda fleet: fleet.crash(_WORKER)))
            steps.append(Step(up_s, lambda fleet: fleet.restart(_WORKER)))
            marks.append(Mark(f"{_WORKER} is down", down_s, up_s))
        return tuple(steps), tuple(marks)

    return _faulty(options, "flapping-worker", happens, load_ratio=0.5)


def network_cuts(options: Options) -> Scenario:
    """Links between a gateway, a worker and the schedulers are cut in turn, and heal."""

    def happens(duration_s: float) -> Course:
        edges = [duration_s * (turn + 1) / (len(_CUTS) + 2) for turn in range(len(_CUTS) + 1)]
        steps: list[Step] = []
        marks = []
        for (left, right), (from_s, next_s) in zip(_CUTS, pairwise(edges), strict=True):
            to_s = from_s + min(8.0, (next_s - from_s) / 2)
            steps += [_cut(from_s, left, right), _heal(to_s, left, right)]
            marks.append(Mark(f"{left} and {right} do not hear each other", from_s, to_s))
        return tuple(steps), tuple(marks)

    return _faulty(options, "network-cuts", happens, load_ratio=0.5)


def slow_worker(options: Options) -> Scenario:
    """One worker takes three times as long for every step: it is found, ejected, and taken back later."""

    def happens(duration_s: float) -> Course:
        from_s, to_s = duration_s / 4, duration_s * 3 / 4
        steps = (
            Step(from_s, lambda fleet: fleet.workers[_WORKER].slow(3.0)),
            Step(to_s, lambda fleet: fleet.workers[_WORKER].slow(1.0)),
        )
        return steps, (Mark(f"{_WORKER} is three times as slow", from_s, to_s),)

    made = _faulty(options, "slow-worker", happens, load_ratio=0.6, duration_s=120.0)
    return replace(made, watched=(_WORKER, made.marks[0].from_s))


def _kill_leader(fleet: SimFleet) -> None:
    leader = fleet.leader
    if leader is not None:
        fleet.crash(leader.name)


def _restart_dead(fleet: SimFleet) -> None:
    for name in list(fleet.schedulers):
        if not fleet.processes[name].alive:
            fleet.restart(name)


def _cut(at_s: float, left: str, right: str) -> Step:
    return Step(at_s, lambda fleet: fleet.network.cut(left, right))


def _heal(at_s: float, left: str, right: str) -> Step:
    return Step(at_s, lambda fleet: fleet.network.heal(left, right))
