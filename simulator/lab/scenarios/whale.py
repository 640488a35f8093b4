"""One tenant sends three fifths of a load a quarter above what the fleet serves: nine must not feel it."""

from __future__ import annotations

from simulator.fleet.spec import TenantSpec
from simulator.lab.load import chat
from simulator.lab.load.arrivals import Gamma, Poisson
from simulator.lab.load.load import Stream, merged
from simulator.lab.scenario import Options, Scenario, fleet_of, rate_of

MINNOWS = 9
WHALE_RATIO = 0.6
LOAD_RATIO = 1.05  # of what the fleet could serve at most
SATURATED_RATIO = 0.85  # of the most, what was served of this load: blocks are reserved ahead of their use


def scenario(options: Options) -> Scenario:
    return _scenario(options, whale_ratio=WHALE_RATIO, name="whale")


def capped(options: Options) -> Scenario:
    """The same minnows beside a whale that sends what they leave of the measured capacity: its max-min fair
    share."""
    minnows = LOAD_RATIO * (1 - WHALE_RATIO)
    return _scenario(options, whale_ratio=(SATURATED_RATIO - minnows) / LOAD_RATIO, name="whale-capped")


def _scenario(options: Options, *, whale_ratio: float, name: str) -> Scenario:
    """``whale_ratio`` is what the whale sends, as a share of the uncapped load."""
    duration_s = options.duration_s or 120.0
    tenants = (TenantSpec("whale"), *(TenantSpec(f"minnow-{index}") for index in range(MINNOWS)))
    fleet = fleet_of(options, tenants)
    rate = rate_of(
        options, fleet, prompt_tokens=chat.PROMPT_MEAN, output_tokens=chat.OUTPUT_MEAN, load_ratio=LOAD_RATIO
    )
    small = rate * (1 - WHALE_RATIO)
    streams = [Stream("whale", Gamma(rate * whale_ratio, cv=2.0), chat.PROMPT, chat.OUTPUT)]
    streams += [
        Stream(tenant.name, Poisson(small / MINNOWS), chat.PROMPT, chat.OUTPUT) for tenant in tenants[1:]
    ]
    return Scenario(
        name=name,
        summary=f"{rate * whale_ratio:.1f} requests/s of one tenant, {small:.1f} of {MINNOWS} others",
        fleet=fleet,
        load=lambda: merged(streams, seed=options.seed, duration_s=duration_s),
        duration_s=duration_s,
        warm_up_s=duration_s / 6,
        together=tuple(tenant.name for tenant in tenants[1:]),
    )
