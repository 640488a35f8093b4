"""An input that ends its engine, among 32 neighbours on one, two and three workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.errors import PoisonedInput
from simulator.engine.poison import Ending, Poison
from simulator.fleet.assembly import Parts
from simulator.fleet.clients.client import Record, SimRequest
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.spec import FleetSpec, WorkerSpec
from simulator.invariants.balance import Balance
from simulator.invariants.poisons import MAX_DEATHS, Poisons

NEIGHBOURS = 32


def load_of(poison: Poison) -> list[SimRequest]:
    """32 neighbours at once, the poison in their midst, and the same poison much later."""
    neighbour = SimRequest("tenant-0", prompt_tokens=60, output_tokens=300)
    poisonous = replace(neighbour, poison=poison, arrival_s=0.3)
    mixed = [replace(neighbour, arrival_s=0.01 * number) for number in range(NEIGHBOURS)]
    at_once = sorted([*mixed, poisonous], key=lambda one: one.arrival_s)
    return [*at_once, replace(poisonous, arrival_s=150.0)]


def run(
    ending: Ending, workers: int, *, after_tokens: int = 0, parts: Parts | None = None
) -> tuple[RunReport, Poisons, list[Record]]:
    spec = FleetSpec(workers=workers, worker_kinds=(WorkerSpec(max_sequences=64),), engine_restart_s=1.0)
    poisons, records = Poisons(), list[Record]()

    def ended(record: Record) -> None:
        records.append(record)
        poisons.closed(record)

    load = load_of(Poison(ending, 7, after_tokens))
    report = simulate(spec, load, invariants=(Balance(), poisons), on_record=ended, parts=parts)
    return report, poisons, records


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("ending", list(Ending))
@pytest.mark.parametrize("after_tokens", [0, 20])
def test_the_neighbours_complete_and_the_poison_is_condemned(
    ending: Ending, workers: int, after_tokens: int
) -> None:
    report, poisons, records = run(ending, workers, after_tokens=after_tokens)
    assert report.violations == ()
    assert report.outcomes == {"finished": NEIGHBOURS, PoisonedInput.reason: 2}
    (deaths,) = poisons.deaths.values()
    assert deaths == (3 if ending in (Ending.RAISES, Ending.SIGNALS) else 5)
    assert deaths < MAX_DEATHS
    _, second = [record for record in records if record.request.poison is not None]
    assert second.ended_s - second.sent_s < 0.1
