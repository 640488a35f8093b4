"""The load of a pool as the leader reports it: rates of idle and busy replicas, held requests, arrivals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.estimates.capacity import Bound
from services.core.estimates.pool_load import ClassLoad, GroupLoad, PoolLoad
from services.core.fixed_cost.slots import SlotDemand
from services.core.fleet import PoolSnapshot, ReportSnapshot, TenantTokens
from services.core.records import Priority
from services.rpc.convert.scheduler import LOAD, pool_to_proto
from services.scheduler.overload.loads import loads_of
from services.scheduler.term_streams import DemandSlots, Report
from tests.unit.scheduler.model import DIGEST
from tests.unit.scheduler.overload.test_pool_load import Load
from tests.unit.scheduler.plant import Plant


def load_of(plant: Plant, digest: str = DIGEST) -> PoolLoad:
    found = {
        one.version_digest: one
        for one in loads_of(plant.term.fleet, plant.term.overload, plant.term.slots, plant.now_s)
    }
    load = found[digest].load
    assert load is not None
    assert LOAD.from_proto(pool_to_proto(found[digest]).load) == load
    return load


def classes(load: PoolLoad) -> dict[Priority, ClassLoad]:
    return {one.priority: one for one in load.classes}


def test_an_idle_replica_has_the_rate_of_a_busy_one() -> None:
    """What an idle replica computes shows what it was asked for, not what it can do."""
    plant = Plant(1)
    plant.run(120, Load(plant, standard=1.0))
    idle = load_of(plant).rate
    plant.run(60, Load(plant, standard=9.0))
    busy = load_of(plant).rate
    assert idle is not None
    assert busy is not None
    assert idle > 400.0, "a tenth of it is asked for"
    assert idle == pytest.approx(busy, rel=0.5)


def test_a_declared_itl_target_bounds_the_rate_of_a_replica_and_is_named() -> None:
    plant = Plant(1)
    plant.run(60, Load(plant, standard=9.0))
    free = load_of(plant)
    assert free.rate_bound is not Bound.ITL
    (model,) = [one.step_model for one in plant.term.fleet.candidates(DIGEST).values()]
    one_s, most_s = (model.seconds(1, 0, decoding, 75 * decoding) for decoding in (1, 8))
    plant.machines["w0"].itl_target_s = (one_s + most_s) / 2
    plant.run(2)
    tight = load_of(plant)
    assert tight.rate_bound is Bound.ITL
    assert free.rate is not None
    assert tight.rate is not None
    assert 0.0 < tight.rate < free.rate
    plant.machines["w0"].itl_target_s = one_s / 2
    plant.run(2)
    assert load_of(plant).rate == pytest.approx(free.rate, rel=0.05), "no number of replicas meets it"


def test_what_arrives_is_counted_also_where_it_is_shed() -> None:
    plant = Plant(1)
    plant.run(20, Load(plant, standard=5.0))
    before = classes(load_of(plant))[Priority.STANDARD].arrived
    assert before == pytest.approx(5.0 * 20 * 100, rel=0.05)
    burst = Load(plant, standard=60.0)
    plant.run(20, burst)
    assert any(one.error is not None for one in burst.made["standard"]), "some are shed"
    found = classes(load_of(plant))[Priority.STANDARD]
    assert found.arrived - before == pytest.approx(60.0 * 20 * 100, rel=0.05)
    assert found.waiting > 0.0
    assert found.target_s == 10.0


def test_requests_are_held_while_no_worker_serves() -> None:
    plant = Plant(0)
    plant.ask()
    plant.ask(Priority.INTERACTIVE)
    plant.run(1)
    load = load_of(plant)
    assert (load.held, load.rate) == (2, None)
    assert {priority: one.waiting for priority, one in classes(load).items()} == {
        Priority.STANDARD: pytest.approx(100.0, rel=1.0),
        Priority.INTERACTIVE: pytest.approx(100.0, rel=1.0),
    }
    plant.run(40)
    assert load_of_nothing(plant)


def test_a_load_is_counted_by_deployment_and_by_the_nodes_that_may_run_it() -> None:
    plant = Plant(1)
    plant.ask(model="chat", output=400)
    plant.ask(model="bot", output=400)
    plant.ask(model="own", node_group="dedicated/acme", isolation_waits=True)
    plant.run(0.3)
    load = load_of(plant)
    assert {one.deployment for one in load.classes} == {"chat", "bot", "own"}
    assert load.groups == (GroupLoad("dedicated/acme", "own", held=1), GroupLoad("", running=2))
    assert (load.held, load.running) == (1, 2)
    plant.run(40)
    load = load_of(plant)
    assert (load.held, load.running, load.groups) == (0, 0, ())


def load_of_nothing(plant: Plant) -> bool:
    """Return whether no pool is reported: the held requests timed out."""
    found = list(loads_of(plant.term.fleet, plant.term.overload, plant.term.slots, plant.now_s))
    return all(one.load is not None and not one.load.held for one in found)


def test_rows_of_a_fixed_cost_version_are_work_by_their_device_time() -> None:
    plant, digest = Plant(0), "sha256:rows"
    demand = SlotDemand(digest, "acme", 40, 1.0, Priority.STANDARD, repeats=True)
    plant.term.streams.send(DemandSlots(plant.session, (demand,), ()))
    plant.run(0.5)
    own = replace(demand, tenant="own", node_group="dedicated/acme", rows=5)
    plant.term.streams.send(DemandSlots(plant.session, (own,), ()))
    plant.run(0.1)
    assert load_of(plant, digest).groups == (GroupLoad("", held=40), GroupLoad("dedicated/acme", held=5))
    plant.term.streams.send(DemandSlots(plant.session, (replace(own, rows=0),), ()))
    plant.run(0.1)
    assert load_of(plant, digest).held == 40
    reporter = plant.term.streams.open_reporter(lambda: None)
    pool = PoolSnapshot(digest, 0, 0, 1, 10, 6, 0, 0, row_slots=32, row_us=5000)
    ended = (TenantTokens("acme", digest, 0, 0, rows=200, device_us=1_000_000),)
    report = ReportSnapshot("w9", 1, "h:1", pools=(pool,), epoch=1, tenants=ended, device_type="gpu")
    plant.term.streams.send(Report(reporter, 1, report))
    plant.run(0.5)
    load = load_of(plant, digest)
    assert (load.rate, load.held, load.request_work) == (200.0, 0, 1.0)
    found = classes(load)[Priority.STANDARD]
    assert (found.waiting, found.arrived) == (24.0, 240.0)
