"""Four fifths of the requests share a fifth of the system prompts: cache hits, and hot ones that spread."""

from __future__ import annotations

from simulator.lab.load import chat
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.lengths import LogNormal
from simulator.lab.load.load import SharedPrefixes, Stream, merged
from simulator.lab.scenario import Options, Scenario, fleet_of, rate_of

PREFIX_TOKENS = 1536
_OWN = LogNormal(150.0, 0.8, least_tokens=8, most_tokens=2000)


def scenario(options: Options) -> Scenario:
    duration_s = options.duration_s or 120.0
    tenants = chat.tenants(2)
    fleet = fleet_of(options, tenants)
    rate = rate_of(
        options,
        fleet,
        prompt_tokens=PREFIX_TOKENS + chat.mean_tokens(_OWN),
        output_tokens=chat.OUTPUT_MEAN,
        load_ratio=0.9,
    )
    streams = [
        Stream(
            tenant.name,
            Poisson(rate / len(tenants)),
            _OWN,
            chat.OUTPUT,
            prefixes=SharedPrefixes(count=40, tokens=PREFIX_TOKENS, first_id=1 + 100 * index),
        )
        for index, tenant in enumerate(tenants)
    ]
    return Scenario(
        name="shared-prefixes",
        summary=f"{rate:.1f} requests/s; a tenant has 40 prompts of {PREFIX_TOKENS} tokens, 8 get 80 %",
        fleet=fleet,
        load=lambda: merged(streams, seed=options.seed, duration_s=duration_s),
        duration_s=duration_s,
    )
