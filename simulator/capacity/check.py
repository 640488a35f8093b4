"""The plan against the whole-fleet simulator: the least workers for the attainment, on equal traces.

The simulated fleet runs the production scheduler and planner of steps. A refused request has missed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from services.core.estimates.cost_model import PRESETS
from services.core.estimates.node_need import NodeType, Unfit
from simulator.capacity.load import BadLoad, WantedLatency, windows_of
from simulator.capacity.node_plan import CapacityPlan, plan_type
from simulator.fleet.clients.client import RequestRecord
from simulator.fleet.fleet import simulate
from simulator.lab.load.arrivals import Poisson
from simulator.lab.load.lengths import LogNormal
from simulator.lab.load.load import of_trace
from simulator.lab.load.replay import CONTEXT_TOKENS, SHARES, trace_fleet
from simulator.lab.load.traces import MOONCAKE_BLOCK_TOKENS, TraceRow
from simulator.lab.scenario import Options

ATTAINMENT: Final = 0.99
MOST_WORKERS: Final = 24


@dataclass(frozen=True, slots=True)
class CheckMix:
    """A load on nodes of one preset. ``prefixes`` of ``prefix_blocks`` blocks each begin its prompts."""

    rate_per_s: float
    prompt: LogNormal
    output: LogNormal
    ttft_s: float = 2.0
    preset: str = "a10"
    prefixes: int = 0
    prefix_blocks: int = 0
    lasts_s: float = 60.0

    def rows(self, seed: int) -> list[TraceRow]:
        """Return its trace. The first prefix is the most frequent one: 1 / n of the n-th."""
        rng, rows = Random(f"{seed}/lengths"), list[TraceRow]()
        numbers = range(self.prefixes)
        for at_s in Poisson(self.rate_per_s).times(Random(f"{seed}/arrivals")):
            if at_s >= self.lasts_s:
                break
            blocks: tuple[int, ...] = ()
            if self.prefixes:
                (number,) = rng.choices(numbers, [1.0 / (each + 1) for each in numbers])
                blocks = tuple(range(number * self.prefix_blocks, (number + 1) * self.prefix_blocks))
            prompt_tokens = len(blocks) * MOONCAKE_BLOCK_TOKENS + self.prompt.draw(rng)
            rows.append(TraceRow(at_s, prompt_tokens, self.output.draw(rng), blocks))
        return rows


MIXES: Final = {
    "short chat": CheckMix(36.0, LogNormal(400.0, 0.6, 16, 4000), LogNormal(200.0, 0.6, 8, 1500)),
    "long prompt": CheckMix(7.5, LogNormal(4000.0, 0.4, 500, 12_000), LogNormal(48.0, 0.5, 4, 400), 6.0),
    "long output": CheckMix(
        26.0, LogNormal(100.0, 0.5, 8, 1000), LogNormal(350.0, 0.5, 8, 2500), lasts_s=90.0
    ),
    "shared prefix": CheckMix(
        44.0, LogNormal(200.0, 0.6, 8, 2000), LogNormal(120.0, 0.6, 4, 1000), prefixes=8, prefix_blocks=4
    ),
}


def attainment(mix: CheckMix, rows: Sequence[TraceRow], workers: int) -> float:
    """Return the share of the requests whose first token came in time, of a simulated fleet."""
    good = 0

    def take(record: RequestRecord) -> None:
        nonlocal good
        good += record.finished and record.ttft_s is not None and record.ttft_s <= mix.ttft_s

    fleet = trace_fleet(Options(workers=workers, preset=mix.preset))
    simulate(fleet, of_trace(rows, SHARES, seed=0, context_tokens=CONTEXT_TOKENS), on_record=take)
    return good / len(rows)


def planned(mix: CheckMix, rows: Sequence[TraceRow]) -> CapacityPlan:
    """Return the plan for its trace. Raises BadLoad."""
    kind = NodeType(mix.preset, PRESETS[mix.preset])
    plan = plan_type(kind, windows_of(rows, WantedLatency(mix.ttft_s)), 1)
    if isinstance(plan, Unfit):
        raise BadLoad(plan.text)
    return plan


def least_workers(mix: CheckMix, rows: Sequence[TraceRow], first: int) -> int:
    """Return the fewest workers that attain the target, searched from ``first`` on."""
    workers, serves = first, attainment(mix, rows, first) >= ATTAINMENT
    while 1 < workers < MOST_WORKERS:
        following = workers - 1 if serves else workers + 1
        if (attainment(mix, rows, following) >= ATTAINMENT) != serves:
            return workers if serves else following
        workers = following
    return workers


def check(names: Sequence[str], seed: int) -> int:
    """Print the plan and the simulated need of each mix. The exit status is 1 for an error above 10 %."""
    errors = {}
    for name in names:
        mix = MIXES[name]
        rows = mix.rows(seed)
        plan = planned(mix, rows)
        least = least_workers(mix, rows, plan.nodes)
        errors[name] = round((plan.nodes - least) / least, 3)
        text = f"planned {plan.nodes} ({plan.exact:.2f}), simulated {least}, {len(rows)} requests"
        print(f"{name}: {text}", flush=True)
    worst = max(map(abs, errors.values()))
    print("RESULT", json.dumps({"plan_error": worst, "errors": errors, "seed": seed}))
    return int(worst > 0.1)
