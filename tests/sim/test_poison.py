"""An input that ends its engine, among 32 neighbours on one, two and three workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.errors import PoisonedInput
from simulator.engine.poison import EngineEnding, Poison
from simulator.fleet.assembly import Parts
from simulator.fleet.chaos import FaultKind, InjectedFault
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.fleet.fault_actions import FaultSchedule
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.nodes.worker_node import WorkerNode
from simulator.fleet.spec import FleetSpec, WorkerSpec
from simulator.invariants.balance import Balance
from simulator.invariants.isolation import AGAIN, CONDEMNED, DEATHS, MAX_DEATHS, Poisons
from tests.sim.planted.gateways import AdmitsTheCondemned, RunsSuspectsTogether
from tests.sim.planted.workers import BlamesBystanders, TakesKillsForFaults
from tests.support.sweep import daily

NEIGHBOURS = 32


def load_of(poison: Poison) -> list[SimRequest]:
    """32 neighbours at once, the poison in their midst, and the same poison much later."""
    neighbour = SimRequest("tenant-0", prompt_tokens=60, output_tokens=300)
    poisonous = replace(neighbour, poison=poison, arrival_s=0.3)
    mixed = [replace(neighbour, arrival_s=0.01 * number) for number in range(NEIGHBOURS)]
    at_once = sorted([*mixed, poisonous], key=lambda one: one.arrival_s)
    return [*at_once, replace(poisonous, arrival_s=150.0)]


def run(
    ending: EngineEnding, workers: int, *, after_tokens: int = 0, parts: Parts | None = None
) -> tuple[RunReport, Poisons, list[RequestRecord]]:
    spec = FleetSpec(workers=workers, worker_kinds=(WorkerSpec(max_sequences=64),), engine_restart_s=1.0)
    poisons, records = Poisons(calm=True), list[RequestRecord]()

    def ended(record: RequestRecord) -> None:
        records.append(record)
        poisons.closed(record)

    load = load_of(Poison(ending, 7, after_tokens))
    report = simulate(spec, load, invariants=(Balance(), poisons), on_record=ended, parts=parts)
    return report, poisons, records


@pytest.mark.parametrize("workers", daily([1, 2, 3], [2]))
@pytest.mark.parametrize("ending", list(EngineEnding))
@pytest.mark.parametrize("after_tokens", [0, 20])
def test_the_neighbours_complete_and_the_poison_is_condemned(
    ending: EngineEnding, workers: int, after_tokens: int
) -> None:
    report, poisons, records = run(ending, workers, after_tokens=after_tokens)
    assert report.violations == ()
    assert report.outcomes == {"finished": NEIGHBOURS, PoisonedInput.reason: 2}
    (deaths,) = poisons.deaths.values()
    assert deaths == (3 if ending in (EngineEnding.RAISES, EngineEnding.SIGNALS) else 5)
    assert deaths < MAX_DEATHS
    _, second = [record for record in records if record.request.poison is not None]
    assert second.ended_s - second.sent_s < 0.1


KILLS = [InjectedFault(FaultKind.POOL_LOSS, 0.5, 60.0, 0.0, 0.0, 0.0)]


def killed(parts: Parts | None = None) -> tuple[str, ...]:
    """Return the violations while each engine is killed again and again, and no input is poisonous."""
    spec = FleetSpec(workers=1, gateways=1, worker_kinds=(WorkerSpec(),), engine_restart_s=0.3)
    load = [SimRequest("tenant-0", 60, 400, arrival_s=6.0 * number) for number in range(12)]
    poisons = Poisons()
    report = simulate(
        spec,
        load,
        plans=(FaultSchedule(KILLS),),
        invariants=(poisons,),
        on_record=poisons.closed,
        parts=parts,
    )
    return report.violations


def test_kills_from_outside_condemn_nobody() -> None:
    assert killed() == ()


@pytest.mark.parametrize("worker", [TakesKillsForFaults, BlamesBystanders])
def test_planted_workers_that_blame_whom_a_kill_strikes(worker: type[WorkerNode]) -> None:
    if worker is TakesKillsForFaults:
        found = killed(Parts(worker=worker))
    else:
        found = run(EngineEnding.RAISES, 2, parts=Parts(worker=worker))[0].violations
    assert any(text.startswith(CONDEMNED) for text in found)


def test_planted_gateway_that_runs_suspects_together() -> None:
    report, _, _ = run(EngineEnding.RAISES, 2, parts=Parts(gateway=RunsSuspectsTogether))
    assert any(text.startswith(DEATHS) for text in report.violations)


def test_planted_gateway_that_admits_the_condemned() -> None:
    """A client that sends the poison again ends engines again: more than a fleet in order loses by it."""
    report, poisons, _ = run(EngineEnding.RAISES, 2, parts=Parts(gateway=AdmitsTheCondemned))
    (deaths,) = poisons.deaths.values()
    assert deaths > 3
    assert any(text.startswith(AGAIN) for text in report.violations)
