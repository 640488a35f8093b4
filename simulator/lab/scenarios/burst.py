"""Ten times the load for thirty seconds: what is shed, in which order, and how soon it is over."""

from __future__ import annotations

from services.core.records import Priority
from simulator.lab.load import chat
from simulator.lab.load.arrivals import Modulated, Steps
from simulator.lab.load.load import Stream, merged
from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, fleet_of, rate_of

_SHARES = ((Priority.INTERACTIVE, 0.3), (Priority.STANDARD, 0.4), (Priority.BATCH, 0.3))


def scenario(options: Options) -> Scenario:
    duration_s = options.duration_s or 120.0
    from_s, for_s = duration_s / 4, min(30.0, duration_s / 4)
    tenants = chat.tenants(4)
    fleet = fleet_of(options, tenants)
    rate = rate_of(
        options, fleet, prompt_tokens=chat.PROMPT_MEAN, output_tokens=chat.OUTPUT_MEAN, load_ratio=0.3
    )
    streams = [
        Stream(
            tenant.name,
            Modulated(Steps.burst(rate * share / len(tenants), factor=10.0, from_s=from_s, for_s=for_s)),
            chat.PROMPT,
            chat.OUTPUT,
            name=priority.value,
            priority=priority,
        )
        for tenant in tenants
        for priority, share in _SHARES
    ]
    return Scenario(
        name="burst",
        summary=f"{rate:.1f} requests/s in three classes, and ten times as many for {for_s:g} s",
        fleet=fleet,
        load=lambda: merged(streams, seed=options.seed, duration_s=duration_s),
        duration_s=duration_s,
        marks=(Mark("ten times the load", from_s, from_s + for_s),),
    )
