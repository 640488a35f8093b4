"""A flood of very long prompts beside short chats: the short ones keep their time to first token."""

from __future__ import annotations

from simulator.lab.load import chat
from simulator.lab.load.arrivals import Modulated, Poisson, Steps
from simulator.lab.load.lengths import Fixed, LogNormal
from simulator.lab.load.load import Stream, merged
from simulator.lab.report.report import Mark
from simulator.lab.scenario import Options, Scenario, fleet_of, rate_of

_LONG = LogNormal(10_000.0, 0.2, least_tokens=6000, most_tokens=15_000)
_SHORT = LogNormal(120.0, 0.6, least_tokens=8, most_tokens=1000)


def scenario(options: Options) -> Scenario:
    duration_s = options.duration_s or 120.0
    from_s, for_s = duration_s / 4, duration_s / 4
    tenants = chat.tenants(3)
    fleet = fleet_of(options, tenants)
    short = rate_of(options, fleet, prompt_tokens=150, output_tokens=chat.OUTPUT_MEAN, load_ratio=0.35)
    flood = rate_of(options, fleet, prompt_tokens=10_000, output_tokens=20, load_ratio=0.8)
    calm = flood / 40
    streams = [
        Stream("tenant-0", Poisson(short / 2), _SHORT, chat.OUTPUT),
        Stream("tenant-1", Poisson(short / 2), _SHORT, chat.OUTPUT),
        Stream(
            "tenant-2",
            Modulated(Steps(((0.0, calm), (from_s, flood), (from_s + for_s, calm)))),
            _LONG,
            Fixed(20),
        ),
    ]
    return Scenario(
        name="long-prompts",
        summary=f"{short:.1f} short requests/s, and {flood:.2f} prompts/s of 10,000 tokens for {for_s:g} s",
        fleet=fleet,
        load=lambda: merged(streams, seed=options.seed, duration_s=duration_s),
        duration_s=duration_s,
        marks=(Mark("a flood of long prompts", from_s, from_s + for_s),),
    )
