"""A steady load on a fleet that something happens to: what the scenarios of faults have in common."""

from __future__ import annotations

from collections.abc import Callable

from simulator.lab.load import chat
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.load import Stream, merged
from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, Script, Step, fleet_of, rate_of


def faulty(
    options: Options,
    name: str,
    *,
    load_ratio: float,
    happens: Callable[[float], tuple[tuple[Step, ...], tuple[Mark, ...]]],
    duration_s: float = 90.0,
) -> Scenario:
    """Return a scenario; ``happens`` gets its duration and returns what is done and how it is marked."""
    duration_s = options.duration_s or duration_s
    tenants = chat.tenants(4)
    fleet = fleet_of(options, tenants)
    rate = rate_of(
        options,
        fleet,
        prompt_tokens=chat.PROMPT_MEAN,
        output_tokens=chat.OUTPUT_MEAN,
        load_ratio=load_ratio,
    )
    streams = [
        Stream(tenant.name, Poisson(rate / len(tenants)), chat.PROMPT, chat.OUTPUT) for tenant in tenants
    ]
    steps, marks = happens(duration_s)
    return Scenario(
        name=name,
        summary=f"{rate:.1f} requests/s of {len(tenants)} tenants; {marks[0].name}",
        fleet=fleet,
        load=lambda: merged(streams, seed=options.seed, duration_s=duration_s),
        duration_s=duration_s,
        plans=(Script(steps),),
        marks=marks,
    )
