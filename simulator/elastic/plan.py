"""What is planned for a steady load against what a fleet of production schedulers and engines needs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final

from services.core.estimates.capacity import capacity_of, mix_of, spare_replicas
from services.core.estimates.cost_model import encode
from services.core.records import Priority
from services.scheduler.policy.overload.pressure import ServiceTargets
from services.scheduler.policy.overload.shedding import SheddingPolicy
from simulator.elastic.traffic import DayRequest, Workload
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.fleet import simulate
from simulator.fleet.spec import TenantSpec
from simulator.lab.load.arrivals import Poisson
from simulator.lab.scenario import Options, fleet_of

WORKERS: Final = 8
LOAD_S: Final = 100.0
WARM_UP_S: Final = 40.0
ATTAINMENT: Final = 0.99
STEP: Final = 1.04  # factor between two rates that are tried
MOST_STEPS: Final = 8


def plan_error(load: Workload) -> float:
    """Return how far the replicas of the plan are above (or below) those that the fleet needs, as a ratio.

    The fleet has ``WORKERS``. The highest rate of interactive requests that it serves is searched in steps
    from the planned one, and the replicas that are planned for it are compared with them.
    """
    low, high = 0.0, WORKERS * 100.0
    while high - low > 1e-3:
        middle = (low + high) / 2.0
        low, high = (middle, high) if planned(load, middle) <= WORKERS else (low, middle)
    rate_per_s, served = low, fleet_attainment(load, low) >= ATTAINMENT
    for _ in range(MOST_STEPS):
        following = rate_per_s * STEP if served else rate_per_s / STEP
        if (fleet_attainment(load, following) >= ATTAINMENT) != served:
            return planned(load, rate_per_s if served else following) / WORKERS - 1.0
        rate_per_s = following
    raise ValueError(f"{load.name}: the plan is more than {STEP**MOST_STEPS - 1.0:.0%} off")


def planned(load: Workload, rate_per_s: float) -> float:
    """Return the replicas that a steady rate of interactive requests needs.

    Of its target, a request may wait what the prefill of a long prompt leaves, one in a hundred being longer.
    """
    rng = Random("lengths")
    lengths = [(load.prompt.draw(rng), 0, load.output.draw(rng)) for _ in range(4000)]
    mix = mix_of(lengths)
    capacity = capacity_of(load.costs, mix, max_sequences=load.max_sequences)
    assert capacity is not None
    busy, work_s = rate_per_s / capacity.requests_per_s, 1.0 / capacity.requests_per_s
    longest_s = load.costs.prefill_s(sorted(lengths)[int(len(lengths) * ATTAINMENT)][0])
    target_s = load.targets[Priority.INTERACTIVE]
    absorb_s = max(0.1 * target_s, target_s - longest_s)
    return busy + spare_replicas(busy, work_s, absorb_s, burst_ratio=mix.work_ratio)


def steady(load: Workload, rate_per_s: float) -> Iterator[DayRequest]:
    """Yield independent interactive requests with the lengths of a workload, for ``LOAD_S``."""
    rng = Random("lengths")
    for at_s in Poisson(rate_per_s).times(Random("steady")):
        if at_s >= LOAD_S:
            return
        yield DayRequest(at_s, Priority.INTERACTIVE, load.prompt.draw(rng), load.output.draw(rng))


def fleet_attainment(load: Workload, rate_per_s: float) -> float:
    """Return the share of the requests after the warm-up whose first token comes in time on a whole fleet."""
    target_s, met, counted = load.targets[Priority.INTERACTIVE], 0, 0

    def ended(record: RequestRecord) -> None:
        nonlocal met, counted
        if record.request.arrival_s >= WARM_UP_S:
            counted += 1
            met += record.ttft_s is not None and record.ttft_s <= target_s

    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder, "costs.json")
        costs.write_bytes(encode(load.costs))
        fleet = fleet_of(
            Options(workers=WORKERS, preset=str(costs)),
            (TenantSpec("tenant"),),
            max_context_tokens=65_536,
            max_sequences=load.max_sequences,
        )
        shed = SheddingPolicy(targets=ServiceTargets(interactive_s=target_s * load.shed_ratio))
        simulate(
            replace(fleet, term=replace(fleet.term, shedding=shed)),
            (
                SimRequest("tenant", one.prompt, one.output, one.arrival_s, one.priority)
                for one in steady(load, rate_per_s)
            ),
            on_record=ended,
        )
    return met / counted
