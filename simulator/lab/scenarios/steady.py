"""Eight tenants at seven tenths of what the fleet can serve: the figures of an ordinary day."""

from __future__ import annotations

from services.core.records import Priority
from simulator.lab.load import chat
from simulator.lab.load.arrivals import Gamma
from simulator.lab.load.load import Stream, merged
from simulator.lab.scenario import Options, Scenario, fleet_of, rate_of

_CLASSES = (Priority.INTERACTIVE, Priority.STANDARD, Priority.STANDARD, Priority.BATCH)


def scenario(options: Options) -> Scenario:
    duration_s = options.duration_s or 120.0
    tenants = chat.tenants(8)
    fleet = fleet_of(options, tenants)
    rate = rate_of(
        options, fleet, prompt_tokens=chat.PROMPT_MEAN, output_tokens=chat.OUTPUT_MEAN, load_ratio=0.7
    )
    streams = [
        Stream(
            tenant.name,
            Gamma(rate / len(tenants), cv=1.5),
            chat.PROMPT,
            chat.OUTPUT,
            priority=_CLASSES[index % len(_CLASSES)],
        )
        for index, tenant in enumerate(tenants)
    ]
    return Scenario(
        name="steady",
        summary=f"{len(tenants)} tenants, {rate:.1f} requests/s, bursty arrivals (cv 1.5)",
        fleet=fleet,
        load=lambda: merged(streams, seed=options.seed, duration_s=duration_s),
        duration_s=duration_s,
    )
