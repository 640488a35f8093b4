"""The scenarios by name: loads and faults, and those of a caller's own files."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from services.core.records import Priority
from services.core.scaling import Scaling
from simulator.fleet.fleet import SimFleet
from simulator.fleet.spec import FleetSpec, ScalingSpec, TenantSpec, VersionSpec
from simulator.lab.load.arrivals import Arrivals, Diurnal, Gamma, Modulated, Poisson, Steps
from simulator.lab.load.lengths import Fixed, LogNormal
from simulator.lab.load.load import SharedPrefixes, Stream, merged
from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, ScenarioError, Script, Step, fleet_of, rate_of

# A chat service, with median and spread near those of the public Azure conversation trace of 2023.
PROMPT: Final = LogNormal(700.0, 0.9, least_tokens=16, most_tokens=8192)
OUTPUT: Final = LogNormal(140.0, 0.8, least_tokens=4, most_tokens=1024)

MINNOWS: Final = 9
WHALE_RATIO: Final = 0.6
LOAD_RATIO: Final = 1.05  # load as a share of what the fleet can serve at most
# Share of the most that was served of this load: blocks are reserved ahead of use.
SATURATED_RATIO: Final = 0.85

_CLASSES: Final = (Priority.INTERACTIVE, Priority.STANDARD, Priority.STANDARD, Priority.BATCH)
_SHARES: Final = ((Priority.INTERACTIVE, 0.3), (Priority.STANDARD, 0.4), (Priority.BATCH, 0.3))
_LONG: Final = LogNormal(10_000.0, 0.2, least_tokens=6000, most_tokens=15_000)
_SHORT: Final = LogNormal(120.0, 0.6, least_tokens=8, most_tokens=1000)
_PREFIX_TOKENS: Final = 1536
_OWN: Final = LogNormal(150.0, 0.8, least_tokens=8, most_tokens=2000)


def mean_tokens(lengths: LogNormal) -> float:
    """Return the mean of a lognormal distribution, its cuts aside."""
    return lengths.median_tokens * math.exp(lengths.sigma**2 / 2)


def tenants(count: int) -> tuple[TenantSpec, ...]:
    """Return equal tenants without limits."""
    return tuple(TenantSpec(f"tenant-{index}", 1.0) for index in range(count))


def chat_rate(
    options: Options, fleet: FleetSpec, *, load_ratio: float, prompt_tokens: float | None = None
) -> float:
    """Return the rate to send at (``rate_of``) with chat's answers, and its prompts or longer ones."""
    prompt = mean_tokens(PROMPT) if prompt_tokens is None else prompt_tokens
    return rate_of(
        options, fleet, prompt_tokens=prompt, output_tokens=mean_tokens(OUTPUT), load_ratio=load_ratio
    )


def under_load(
    name: str,
    options: Options,
    fleet: FleetSpec,
    streams: Sequence[Stream],
    *,
    summary: str,
    duration_s: float,
    marks: tuple[Mark, ...] = (),
) -> Scenario:
    """Return a scenario in which ``streams`` send for ``duration_s``, and nothing else happens."""
    return Scenario(
        name=name,
        summary=summary,
        fleet=fleet,
        load=lambda: merged(streams, seed=options.seed, duration_s=duration_s),
        duration_s=duration_s,
        marks=marks,
    )


def _in_classes(
    senders: Sequence[TenantSpec], rate: float, arrivals: Callable[[float], Arrivals]
) -> list[Stream]:
    """Return the streams of equal tenants that send ``rate`` together, each in all three classes."""
    return [
        Stream(
            tenant.name,
            arrivals(rate * share / len(senders)),
            PROMPT,
            OUTPUT,
            name=priority.value,
            priority=priority,
        )
        for tenant in senders
        for priority, share in _SHARES
    ]


def steady(options: Options) -> Scenario:
    """Eight tenants at seven tenths of what the fleet can serve: the figures of an ordinary day."""
    senders = tenants(8)
    fleet = fleet_of(options, senders)
    rate = chat_rate(options, fleet, load_ratio=0.7)
    arrivals = Gamma(rate / len(senders), cv=1.5)
    streams = [
        Stream(tenant.name, arrivals, PROMPT, OUTPUT, priority=_CLASSES[index % len(_CLASSES)])
        for index, tenant in enumerate(senders)
    ]
    summary = f"{len(senders)} tenants, {rate:.1f} requests/s, bursty arrivals (cv 1.5)"
    return under_load(
        "steady", options, fleet, streams, summary=summary, duration_s=options.duration_s or 120.0
    )


def diurnal(options: Options) -> Scenario:
    """A day in short: the rate swings between a fifth of the mean and nearly twice it, twice per run."""
    duration_s = options.duration_s or 240.0
    senders = tenants(4)
    fleet = fleet_of(options, senders)
    rate = chat_rate(options, fleet, load_ratio=0.55)
    day = Diurnal(rate / len(senders), swing_ratio=0.8, period_s=duration_s / 2)
    streams = [Stream(tenant.name, Modulated(day), PROMPT, OUTPUT) for tenant in senders]
    summary = f"{rate:.1f} requests/s on average, from {rate * 0.2:.1f} to {rate * 1.8:.1f}"
    return under_load("diurnal", options, fleet, streams, summary=summary, duration_s=duration_s)


def burst(options: Options) -> Scenario:
    """Ten times the load for thirty seconds: what is shed, in which order, and how soon it is over."""
    duration_s = options.duration_s or 120.0
    from_s, for_s = duration_s / 4, min(30.0, duration_s / 4)
    senders = tenants(4)
    fleet = fleet_of(options, senders)
    rate = chat_rate(options, fleet, load_ratio=0.3)

    def arrivals(per_s: float) -> Arrivals:
        return Modulated(Steps.burst(per_s, factor=10.0, from_s=from_s, for_s=for_s))

    return under_load(
        "burst",
        options,
        fleet,
        _in_classes(senders, rate, arrivals),
        summary=f"{rate:.1f} requests/s in three classes, and ten times as many for {for_s:g} s",
        duration_s=duration_s,
        marks=(Mark("ten times the load", from_s, from_s + for_s),),
    )


def long_prompts(options: Options) -> Scenario:
    """A flood of very long prompts beside short chats: the short ones keep their time to first token."""
    duration_s = options.duration_s or 120.0
    from_s, for_s = duration_s / 4, duration_s / 4
    fleet = fleet_of(options, tenants(3))
    short = chat_rate(options, fleet, prompt_tokens=150, load_ratio=0.35)
    flood = rate_of(options, fleet, prompt_tokens=10_000, output_tokens=20, load_ratio=0.8)
    calm = flood / 40
    floods = Modulated(Steps(((0.0, calm), (from_s, flood), (from_s + for_s, calm))))
    streams = [
        Stream("tenant-0", Poisson(short / 2), _SHORT, OUTPUT),
        Stream("tenant-1", Poisson(short / 2), _SHORT, OUTPUT),
        Stream("tenant-2", floods, _LONG, Fixed(20)),
    ]
    return under_load(
        "long-prompts",
        options,
        fleet,
        streams,
        summary=f"{short:.1f} short requests/s, and {flood:.2f} prompts/s of 10,000 tokens for {for_s:g} s",
        duration_s=duration_s,
        marks=(Mark("a flood of long prompts", from_s, from_s + for_s),),
    )


def shared_prefixes(options: Options) -> Scenario:
    """Four fifths of the requests share a fifth of the system prompts: cache hits, and hot prompts spread."""
    senders = tenants(2)
    fleet = fleet_of(options, senders)
    rate = chat_rate(options, fleet, prompt_tokens=_PREFIX_TOKENS + mean_tokens(_OWN), load_ratio=0.9)
    streams = [
        Stream(
            tenant.name,
            Poisson(rate / len(senders)),
            _OWN,
            OUTPUT,
            prefixes=SharedPrefixes(count=40, tokens=_PREFIX_TOKENS, first_id=1 + 100 * index),
        )
        for index, tenant in enumerate(senders)
    ]
    summary = f"{rate:.1f} requests/s; a tenant has 40 prompts of {_PREFIX_TOKENS} tokens, 8 get 80 %"
    return under_load(
        "shared-prefixes", options, fleet, streams, summary=summary, duration_s=options.duration_s or 120.0
    )


def whale(options: Options) -> Scenario:
    """One tenant sends three fifths of more load than the fleet serves: nine others must not feel it."""
    return _whale(options, whale_ratio=WHALE_RATIO, name="whale")


def whale_capped(options: Options) -> Scenario:
    """The same minnows beside a whale that sends what they leave of the measured capacity: its max-min fair
    share."""
    minnows = LOAD_RATIO * (1 - WHALE_RATIO)
    return _whale(options, whale_ratio=(SATURATED_RATIO - minnows) / LOAD_RATIO, name="whale-capped")


def _whale(options: Options, *, whale_ratio: float, name: str) -> Scenario:
    """``whale_ratio`` is what the whale sends, as a share of the uncapped load."""
    duration_s = options.duration_s or 120.0
    minnows = tuple(TenantSpec(f"minnow-{index}") for index in range(MINNOWS))
    fleet = fleet_of(options, (TenantSpec("whale"), *minnows))
    rate = chat_rate(options, fleet, load_ratio=LOAD_RATIO)
    small = rate * (1 - WHALE_RATIO)
    streams = [Stream("whale", Gamma(rate * whale_ratio, cv=2.0), PROMPT, OUTPUT)]
    streams += [Stream(tenant.name, Poisson(small / MINNOWS), PROMPT, OUTPUT) for tenant in minnows]
    summary = f"{rate * whale_ratio:.1f} requests/s of one tenant, {small:.1f} of {MINNOWS} others"
    made = under_load(name, options, fleet, streams, summary=summary, duration_s=duration_s)
    return replace(made, warm_up_s=duration_s / 6, together=tuple(tenant.name for tenant in minnows))


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


_ZONES: Final = ("a", "b", "c")


def zone_loss(options: Options) -> Scenario:
    """One of three zones is lost at peak: by second, which classes wait or fail until new nodes serve."""
    duration_s = options.duration_s or 300.0
    lost_s = duration_s / 5
    fleet = fleet_of(options, tenants(4))
    fleet = replace(
        fleet,
        planes=2,
        replicas=fleet.workers,
        worker_kinds=tuple(replace(kind, zones=_ZONES) for kind in fleet.worker_kinds),
        versions=(VersionSpec(load_s=10.0),),
        scaling=ScalingSpec(Scaling(1, 2 * fleet.workers)),
    )
    rate = chat_rate(options, fleet, load_ratio=0.6)
    made = under_load(
        "zone-loss",
        options,
        fleet,
        _in_classes(fleet.tenants, rate, Poisson),
        summary=f"{rate:.1f} requests/s in three classes; a new node takes 60 to 180 s and loads for 10 s",
        duration_s=duration_s,
        marks=(Mark("one of three zones is lost", lost_s, duration_s),),
    )
    return replace(made, plans=(Script((Step(lost_s, _lose_zone),)),), by_second_s=lost_s)


def _lose_zone(fleet: SimFleet) -> None:
    for name in [name for name, worker in fleet.workers.items() if worker.zone == _ZONES[0]]:
        fleet.crash(name, silent=True)


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


_BUNDLED: Final[dict[str, Callable[[Options], Scenario]]] = {
    build.__name__.replace("_", "-"): build
    for build in (
        burst,
        diurnal,
        failover,
        flapping_worker,
        long_prompts,
        network_cuts,
        shared_prefixes,
        slow_worker,
        steady,
        whale,
        zone_loss,
    )
}


def names() -> list[str]:
    """Return the names of the scenarios that come with the simulator, sorted."""
    return sorted(_BUNDLED)


def summary(name: str) -> str:
    """Return what a scenario shows, in one line."""
    return (_BUNDLED[name].__doc__ or "").partition("\n")[0]


def load(name: str, options: Options) -> Scenario:
    """Return a scenario by name, or from the file of a caller's own. Raises ScenarioError.

    Such a file has a function ``scenario(options: Options) -> Scenario``.
    """
    if name in _BUNDLED:
        return _BUNDLED[name](options)
    build = _from_file(name)
    if not callable(build):
        raise ScenarioError(f"{name} has no function scenario(options)")
    made = build(options)
    if not isinstance(made, Scenario):
        raise ScenarioError(
            f"scenario(options) of {name} returned {type(made).__name__}, and must return a Scenario"
        )
    return made


def _from_file(name: str) -> Any:
    """Return what the file calls ``scenario``, or None."""
    path = Path(name)
    if path.suffix != ".py":
        raise ScenarioError(
            f"there is no scenario {name!r}; there are {', '.join(names())}, or give a .py file or a trace, "
            "which is a .csv or .jsonl"
        )
    if not path.is_file():
        raise ScenarioError(f"there is no file {name}")
    spec = importlib.util.spec_from_file_location(f"own_scenario_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ScenarioError(f"{name} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file raises is its author's to read
        raise ScenarioError(f"{name} failed while it was read: {type(error).__name__}: {error}") from error
    return getattr(module, "scenario", None)
