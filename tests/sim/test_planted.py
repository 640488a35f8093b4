"""Every invariant finds the bug that was planted for it. Most run in ``make sim-tests`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.core.records import Priority
from services.scheduler.queue.rules import PRODUCTION, QueueDiscipline
from simulator.fleet.assembly import Parts
from simulator.fleet.chaos import FaultKind, InjectedFault, Moment, is_saturated
from simulator.fleet.clients.client import SimRequest
from simulator.fleet.clients.session import ONCE, TOKENS
from simulator.fleet.fault_actions import FaultSchedule
from simulator.fleet.fleet import REST, RunReport, simulate
from simulator.fleet.invariant import Looks
from simulator.fleet.nodes.plane_node import SchedulerNode
from simulator.fleet.nodes.worker_node import WorkerNode
from simulator.fleet.spec import FleetSpec, TenantSpec, WorkerSpec
from simulator.invariants.balance import BALANCE, BOUNDS, CRASHED, Balance, Bounds
from simulator.invariants.fairness import FAIRNESS, FairnessInvariant
from simulator.invariants.fencing import ALONE, FENCED, REPLAYED, Fencing
from simulator.invariants.seeds import run_seed
from simulator.invariants.shedding import INVERSION, Shedding
from simulator.lab.baselines import ARRIVAL
from simulator.lab.runner import run as run_scenario
from simulator.lab.scenario import Scenario
from tests.sim.planted.gateways import (
    AsksNobody,
    EndsTwice,
    Fails,
    RepeatsTokens,
    ResumesElsewhere,
    ShowsOldGrants,
    TakesAll,
)
from tests.sim.planted.schedulers import (
    FirstComeFirstServed,
    GrantsAnywhere,
    GrantsEjected,
    IgnoresWeights,
    ShedsWhoComes,
)
from tests.sim.planted.workers import (
    BooksTooMuch,
    BooksTooMuchForAMoment,
    BooksTooMuchNowAndThen,
    ForgetsDeviceTime,
    GivesUnboundedCredit,
    LosesSequences,
    StartsClosedVersions,
    StartsWhileDraining,
    TakesEveryGrant,
    TakesWhatNobodyGranted,
)
from tests.support.sweep import daily

# The bug, the invariant that finds it, and the seed that is tried first: one in which it shows.
PLANTED = {
    "ends twice": (Parts(gateway=EndsTwice), ONCE, 0),
    "repeats tokens": (Parts(gateway=RepeatsTokens), TOKENS, 0),
    "resumes elsewhere": (Parts(gateway=ResumesElsewhere), TOKENS, 0),
    "a task fails": (Parts(gateway=Fails), CRASHED, 0),
    "books too much": (Parts(worker=BooksTooMuch), BALANCE, 0),
    "forgets device time": (Parts(worker=ForgetsDeviceTime), BALANCE, 2),
    "grants anywhere": (Parts(scheduler=GrantsAnywhere), FENCED, 0),
}
SEEDS = range(12)


@pytest.mark.parametrize("bug", daily(sorted(PLANTED), ["ends twice"]))
def test_planted_bugs_are_found_by_the_seeds(bug: str) -> None:
    parts, invariant, first = PLANTED[bug]
    for seed in (first, *SEEDS):
        found = run_seed(seed, workers=6, requests=60, parts=parts).violations
        if any(text.startswith(invariant) for text in found):
            return
    pytest.fail(f"{len(SEEDS)} seeds do not find it")


@pytest.mark.sweep
@pytest.mark.parametrize(("scheduler", "shows_in"), [(FirstComeFirstServed, 27), (IgnoresWeights, 7)])
def test_planted_unfair_orders_are_found_by_the_fairness_seeds(
    scheduler: type[SchedulerNode], shows_in: int
) -> None:
    for seed in (shows_in, *filter(is_saturated, range(50))):
        result = run_seed(seed, workers=8, requests=70, parts=Parts(scheduler=scheduler))
        if any(text.startswith(FAIRNESS) for text in result.violations):
            assert result.widest > 1.0
            return
    pytest.fail("no fairness seed finds it")


HEALS: dict[str, tuple[type[WorkerNode], Looks]] = {
    "after a start": (BooksTooMuchForAMoment, Looks.TOUCHED),
    "at any time": (BooksTooMuchNowAndThen, Looks.ALL),
}


@pytest.mark.sweep
@pytest.mark.parametrize("when", sorted(HEALS))
def test_planted_bug_that_heals_between_two_samples(when: str) -> None:
    """A sample sees some of it by chance; a look at the end of each instant sees all."""
    worker, looks = HEALS[when]
    sampled, looked = (_balance_of(worker, found) for found in (Looks.SAMPLES, looks))
    assert looked > 5 * sampled
    assert looked > 20


def _balance_of(worker: type[WorkerNode], looks: Looks) -> int:
    """Return how many violations of the balance a small fleet comes to, of those that are kept."""
    spec = replace(small_fleet(), workers=2, gateways=1)
    load = crowd({"whale": 30}, every_s=0.2)
    ran = simulate(spec, load, invariants=(Balance(),), looks=looks, parts=Parts(worker=worker))
    return sum(text.startswith(BALANCE) for text in ran.violations)


def test_planted_worker_that_starts_what_it_may_not_take() -> None:
    """It is drained just after a grant on it: one in order refuses what comes under that."""
    drains = [
        InjectedFault(FaultKind.WORKER_DRAIN, 1.0 + 2.5 * number, 1.0, 0.3, 0.0, 0.0, Moment.AFTER_GRANT)
        for number in range(8)
    ]
    drained = struck(drains, Parts(worker=StartsWhileDraining), every_s=0.2)
    assert any(text.startswith(FENCED) and "although it drains" in text for text in drained)
    closed = struck((), Parts(worker=StartsClosedVersions), every_s=0.2)
    assert any(text.startswith(FENCED) and "no more of that version" in text for text in closed)
    assert struck(drains, Parts(), every_s=0.2) == ()


@pytest.mark.sweep
def test_planted_scheduler_that_grants_on_who_is_ejected() -> None:
    """One that is tried is barred by its grant; that grant was right, and the next is wrong."""
    slow = [InjectedFault(FaultKind.WORKER_SLOW, 0.0, 80.0, 0.0, 0.0, 6.0)]
    found = struck(slow, Parts(scheduler=GrantsEjected), every_s=0.4, workers=5)
    assert any(text.startswith(FENCED) and "is ejected" in text for text in found)
    assert struck(slow, Parts(), every_s=0.4, workers=5) == ()


def struck(
    faults: Sequence[InjectedFault], parts: Parts, *, every_s: float = 0.1, workers: int = 2
) -> tuple[str, ...]:
    """Return the violations of a small fleet under faults."""
    spec = replace(small_fleet(), workers=workers, gateways=1)
    load = crowd({"whale": 120}, every_s=every_s)
    invariants = (Balance(), Fencing())
    return simulate(spec, load, plans=(FaultSchedule(faults),), invariants=invariants, parts=parts).violations


@pytest.mark.sweep
def test_planted_worker_that_does_not_tell_of_a_lost_engine() -> None:
    faults = [InjectedFault(FaultKind.ENGINE_CRASH, 1.0, 0.1, 0.0, 0.0, 0.0, Moment.IN_PREFILL)]
    assert any(text.startswith(REST) for text in struck(faults, Parts(worker=LosesSequences)))
    assert struck(faults, Parts()) == ()


@pytest.mark.sweep
@pytest.mark.parametrize("invariant", [FENCED, REPLAYED])
def test_planted_worker_that_takes_every_grant(invariant: str) -> None:
    """One in order refuses what is shown to it, and nothing is lost by that."""
    shown = struck((), Parts(gateway=ShowsOldGrants, worker=TakesEveryGrant))
    assert any(text.startswith(invariant) for text in shown)
    assert struck((), Parts(gateway=ShowsOldGrants)) == ()


@pytest.mark.sweep
def test_planted_worker_that_takes_what_nobody_granted() -> None:
    taken = struck((), Parts(gateway=AsksNobody, worker=TakesWhatNobodyGranted), every_s=0.5)
    assert any(text.startswith(ALONE) for text in taken)
    assert struck((), Parts(gateway=AsksNobody), every_s=0.5) == ()


@pytest.mark.sweep
def test_planted_worker_that_gives_unbounded_credit() -> None:
    kinds = (FaultKind.LEADER_PAUSE, FaultKind.STORE_OUTAGE)
    away = [InjectedFault(kind, 5.0, 20.0, 0.0, 0.0, 0.0) for kind in kinds]
    given = struck(away, Parts(worker=GivesUnboundedCredit), every_s=0.8)
    assert any(text.startswith(ALONE) for text in given)
    assert struck(away, Parts(), every_s=0.8) == ()


def crowd(
    tenants: dict[str, int],
    *,
    priorities: tuple[Priority, ...] = (Priority.STANDARD,),
    every_s: float = 0.0,
) -> list[SimRequest]:
    """Return so many requests of each tenant, the first tenant's before the second's."""
    return [
        SimRequest(
            tenant, 100, 100, arrival_s=number * every_s, priority=priorities[number % len(priorities)]
        )
        for tenant, count in tenants.items()
        for number in range(count)
    ]


def small_fleet() -> FleetSpec:
    kind = WorkerSpec(kv_blocks=64, max_sequences=4)
    tenants = (TenantSpec("whale"), TenantSpec("minnow"))
    return FleetSpec(workers=1, worker_kinds=(kind,), tenants=tenants)


def fair_fleet(discipline: QueueDiscipline) -> FleetSpec:
    spec = small_fleet()
    term = spec.term
    order = replace(term.order, bypass_window_tokens=512.0)
    term = replace(term, order=order, discipline=discipline, shedding=replace(term.shedding, enabled=False))
    return replace(spec, term=term, gateway=replace(spec.gateway, queue_ttl_s=600.0))


def fair_run(discipline: QueueDiscipline) -> tuple[RunReport, FairnessInvariant]:
    spec, fairness = fair_fleet(discipline), FairnessInvariant()
    return simulate(spec, crowd({"whale": 120, "minnow": 40}), invariants=(fairness,)), fairness


@pytest.mark.sweep
def test_planted_first_come_first_served_is_unfair() -> None:
    report, _ = fair_run(ARRIVAL)
    assert any(text.startswith(FAIRNESS) for text in report.violations)


@pytest.mark.sweep
def test_the_fair_order_keeps_its_bound_on_the_same_load() -> None:
    report, fairness = fair_run(PRODUCTION)
    assert report.violations == ()
    assert fairness.compared > 0


@pytest.mark.sweep
@pytest.mark.parametrize(("discipline", "is_fair"), [(PRODUCTION, True), (ARRIVAL, False)])
def test_a_scenario_with_an_unfair_queue_is_violated(discipline: QueueDiscipline, is_fair: bool) -> None:
    fleet = fair_fleet(discipline)
    load = crowd({"whale": 120, "minnow": 40})
    crowded = Scenario("crowd", "two tenants at once", fleet, lambda: iter(load), duration_s=60.0)
    report = run_scenario(crowded)
    assert any(text.startswith(FAIRNESS) for text in report.violations) is not is_fair
    if is_fair:
        assert report.violations == ()
        assert report.fairness_bound_tokens is not None
        assert 0.0 < report.fairness.difference_tokens <= report.fairness_bound_tokens


def shedding_run(parts: Parts | None) -> tuple[RunReport, Shedding]:
    shedding = Shedding()
    load = crowd({"whale": 300}, priorities=(Priority.BATCH, Priority.INTERACTIVE), every_s=0.1)
    report = simulate(small_fleet(), load, invariants=(shedding,), parts=parts)
    return report, shedding


@pytest.mark.sweep
def test_planted_shedding_of_whoever_comes_inverts_classes() -> None:
    report, _ = shedding_run(Parts(scheduler=ShedsWhoComes))
    assert any(text.startswith(INVERSION) for text in report.violations)


@pytest.mark.sweep
def test_shedding_refuses_and_inverts_no_classes() -> None:
    report, shedding = shedding_run(None)
    assert report.violations == ()
    assert shedding.refusals > 0


def bounded_run(parts: Parts | None) -> RunReport:
    spec = small_fleet()
    spec = replace(spec, gateways=1, gateway=replace(spec.gateway, max_requests=20))
    return simulate(spec, crowd({"whale": 30, "minnow": 30}), invariants=(Bounds(),), parts=parts)


@pytest.mark.sweep
def test_planted_gateway_without_a_limit_is_found() -> None:
    report = bounded_run(Parts(gateway=TakesAll))
    assert any(text.startswith(BOUNDS) for text in report.violations)


@pytest.mark.sweep
def test_a_gateway_keeps_its_limit() -> None:
    report = bounded_run(None)
    assert report.violations == ()
    assert report.outcomes["SHARE_EXCEEDED"] == 40, "half of the gateway for each tenant"
