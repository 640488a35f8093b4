"""A pool of a fixed-cost version in a fleet under faults: rows are answered rightly, once, within leases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from services.core.errors import PoisonedInput
from services.core.fixed_cost.rows import RowEnd
from services.core.fixed_cost.turns import TenantTurns
from services.worker.batcher.driver import Batcher
from services.worker.batcher.policy.isolation import RunFailure
from services.worker.batcher.runs import BatchRun, BatchRuns
from services.worker.streams.charges import DeviceTime
from services.worker.streams.live_row import LiveRow
from simulator.engine.poison import EngineEnding
from simulator.fleet.assembly import Parts
from simulator.fleet.chaos import FaultKind, InjectedFault
from simulator.fleet.clients.client import SimRequest
from simulator.fleet.clients.row_client import ROWS, SimRows
from simulator.fleet.fault_actions import FaultSchedule
from simulator.fleet.fleet import RunReport, simulate
from simulator.fleet.spec import FleetSpec, RowsSpec, TenantSpec
from simulator.invariants.balance import BALANCE, Balance
from simulator.invariants.isolation import SLOTS, Slots
from tests.sim.planted.rows import KeepsLeases, SwapsAnswers

TENANTS = (TenantSpec("whale"), TenantSpec("minnow"))
FLEET = FleetSpec(workers=2, gateways=2, tenants=TENANTS, rows=RowsSpec(workers=2))
BY_LAYERS = replace(FLEET, rows=RowsSpec(workers=2, by_layers=True))
both_kinds = pytest.mark.parametrize("fleet", [FLEET, BY_LAYERS], ids=["whole batches", "by layers"])


def crowd(requests: int, *, rows: int = 8, every_s: float = 0.05) -> list[SimRows]:
    """Return requests of two tenants in turn, of rows of mixed lengths."""
    return [
        SimRows(
            TENANTS[number % 2].name,
            tuple(2 + (7 * number + 5 * place) % 60 for place in range(rows)),
            arrival_s=number * every_s,
        )
        for number in range(requests)
    ]


def ran(
    load: Sequence[SimRows | SimRequest],
    *,
    faults: Sequence[InjectedFault] = (),
    parts: Parts | None = None,
    fleet: FleetSpec = FLEET,
    slots: Slots | None = None,
) -> RunReport:
    invariants = (Balance(), slots if slots is not None else Slots())
    return simulate(fleet, load, plans=(FaultSchedule(faults),), invariants=invariants, parts=parts)


def fault(kind: FaultKind, at_s: float, for_s: float = 1.0) -> InjectedFault:
    return InjectedFault(kind, at_s, for_s, 0.3, 0.7, 3.0)


@both_kinds
def test_more_rows_than_the_pool_takes_are_all_answered(fleet: FleetSpec) -> None:
    slots = Slots()
    report = ran(crowd(60, rows=40), slots=slots, fleet=fleet)
    assert report.violations == ()
    assert report.rows == {"ANSWERED": 60 * 40}
    assert slots.most == 1.0


@both_kinds
@pytest.mark.parametrize("ending", list(EngineEnding), ids=lambda ending: ending.name)
def test_a_poison_ends_alone(ending: EngineEnding, fleet: FleetSpec) -> None:
    load = crowd(20)
    load[3] = replace(load[3], poisons={2: ending})
    report = ran(load, fleet=fleet)
    assert report.violations == ()
    assert report.rows == {"ANSWERED": 20 * 8 - 1, "POISONED_INPUT": 1}


@pytest.mark.parametrize(
    "kind",
    [
        FaultKind.WORKER_CRASH,
        FaultKind.WORKER_DRAIN,
        FaultKind.ENGINE_CRASH,
        FaultKind.ENGINE_HANG,
        FaultKind.LEADER_CRASH,
        FaultKind.LEADER_PAUSE,
        FaultKind.STORE_OUTAGE,
    ],
)
@both_kinds
def test_one_fault_costs_no_row(kind: FaultKind, fleet: FleetSpec) -> None:
    """Another worker takes what was lost; without a leader, gateways place rows themselves."""
    report = ran(crowd(60), faults=[fault(kind, 1.0, 3.0)], fleet=fleet)
    assert report.violations == ()
    assert report.rows == {"ANSWERED": 60 * 8}


PLANTED = {"swaps answers": (SwapsAnswers, ROWS), "keeps leases": (KeepsLeases, SLOTS)}


@pytest.mark.parametrize("bug", sorted(PLANTED))
def test_planted_gateways_are_found(bug: str) -> None:
    gateway, invariant = PLANTED[bug]
    found = ran(crowd(40, rows=40), parts=Parts(gateway=gateway)).violations
    assert any(text.startswith(invariant) for text in found), found


def _condemn_all(batcher: Batcher, run: BatchRun, _: RunFailure) -> None:
    for row in run.rows:
        batcher._end(row, RowEnd(error=PoisonedInput("", version_digest="")), PoisonedInput.reason)


def _nothing(*_: object, **__: object) -> None: ...


BROKEN: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "a condemned innocent": (Batcher, "_failed", _condemn_all, ROWS),
    "device time that nobody pays": (DeviceTime, "rows_ended", _nothing, BALANCE),
    "a lost batch that nobody searches": (Batcher, "_failed", _nothing, BALANCE),
}


@pytest.mark.parametrize("bug", sorted(BROKEN))
def test_planted_workers_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, broken, invariant = BROKEN[bug]
    monkeypatch.setattr(owner, method, broken)
    load = [SimRows("whale", (4,) * 40, poisons={2: EngineEnding.RAISES})]
    found = ran(load).violations
    assert any(text.startswith(invariant) for text in found), found


def beside_bursts(bursts: Sequence[SimRows], *, by_layers: bool = False) -> dict[str, float]:
    """Return each tenant's p95, of short rows that come one by one and these bursts, on one worker."""
    rng = Random(1)
    at_s, load = 0.0, list(bursts)
    while at_s < 20.0:
        at_s += rng.expovariate(10.0)
        load.append(SimRows("minnow", (8,), arrival_s=at_s))
    load.sort(key=lambda asked: asked.arrival_s)
    report = ran(load, fleet=replace(FLEET, workers=1, rows=RowsSpec(workers=1, by_layers=by_layers)))
    assert report.violations == ()
    assert set(report.rows) == {"ANSWERED"}
    return report.rows_p95_s


BURSTS = [SimRows("whale", (64,) * 40, arrival_s=2.0 + 4.0 * number) for number in range(5)]


def test_bursts_of_long_rows_do_not_stand_before_another_tenant() -> None:
    """Forty rows take 0.7 s in one batch, 28 ms each alone: a short row waits for one, not for all."""
    alone, beside = beside_bursts(())["minnow"], beside_bursts(BURSTS)
    assert beside["minnow"] < 1.7 * alone
    assert beside["whale"] < 2.0


def test_rows_run_between_the_layers_of_another_tenants_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, started = beside_bursts(BURSTS), BatchRuns.start_between
    between: list[int] = []

    def counted(runs: BatchRuns, rows: Sequence[LiveRow], width: int, cause: str) -> None:
        between.append(len(rows))
        started(runs, rows, width, cause)

    monkeypatch.setattr(BatchRuns, "start_between", counted)
    by_layers = beside_bursts(BURSTS, by_layers=True)
    assert len(between) > 20
    assert all(by_layers[name] < 1.1 * whole[name] for name in ("minnow", "whale"))


def test_without_turns_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TenantTurns, "are_shared", lambda *_: False)
    assert beside_bursts(BURSTS)["minnow"] > 5.0 * beside_bursts(())["minnow"]
