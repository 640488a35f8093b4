"""A day in short: the rate swings between a fifth of the mean and nearly twice it, twice per run."""

from __future__ import annotations

from simulator.lab.load import chat
from simulator.lab.load.arrivals import Diurnal, Modulated
from simulator.lab.load.load import Stream, merged
from simulator.lab.scenario import Options, Scenario, fleet_of, rate_of


def scenario(options: Options) -> Scenario:
    duration_s = options.duration_s or 240.0
    tenants = chat.tenants(4)
    fleet = fleet_of(options, tenants)
    rate = rate_of(
        options, fleet, prompt_tokens=chat.PROMPT_MEAN, output_tokens=chat.OUTPUT_MEAN, load_ratio=0.55
    )
    day = Diurnal(rate / len(tenants), swing_ratio=0.8, period_s=duration_s / 2)
    streams = [Stream(tenant.name, Modulated(day), chat.PROMPT, chat.OUTPUT) for tenant in tenants]
    return Scenario(
        name="diurnal",
        summary=f"{rate:.1f} requests/s on average, from {rate * 0.2:.1f} to {rate * 1.8:.1f}",
        fleet=fleet,
        load=lambda: merged(streams, seed=options.seed, duration_s=duration_s),
        duration_s=duration_s,
    )
