"""The lease policy in a small fleet with delays and faults: no over-lease, no starvation, fair shares."""

from __future__ import annotations

from random import Random

import pytest

from services.core.fixed_cost.slots import DEMAND_TTL_S
from services.core.records import Priority
from services.scheduler.slots.leases import LeaseTerms
from tests.unit.scheduler.slots.slot_fleet import DIGEST, SlotFleet, Tenant


def fleet_of(*tenants: Tenant, gateways: int = 2, row_slots: tuple[int, ...] = (32, 32)) -> SlotFleet:
    found = {tenant.name: tenant for tenant in tenants}
    return SlotFleet(1, found, row_slots=row_slots, gateways_of=(tuple(found),) * gateways)


def test_backlogged_tenants_get_equal_device_time_whatever_their_rows_cost() -> None:
    fleet = fleet_of(Tenant("short", 100, 0.001), Tenant("long", 100, 0.004))
    fleet.run(2.0)
    fleet.served.clear()
    fleet.run(8.0)
    assert sum(fleet.served.values()) > 0.9 * 2 * 8.0, "both devices are busy"
    assert 0.8 < fleet.served["short"] / fleet.served["long"] < 1.25


def test_weights_divide_device_time() -> None:
    fleet = fleet_of(Tenant("one", 100, 0.002), Tenant("three", 100, 0.002, weight=3.0))
    fleet.run(1.0)
    fleet.served.clear()
    fleet.run(5.0)
    assert 2.5 < fleet.served["three"] / fleet.served["one"] < 3.5


def test_a_changed_weight_counts_at_once() -> None:
    fleet = fleet_of(Tenant("one", 100, 0.002), Tenant("other", 100, 0.002))
    fleet.run(1.0)
    fleet.tenants["other"].weight = 3.0
    for gateway in fleet.gateways:
        gateway.enter("other", 1)
    fleet.run(1.2)
    fleet.served.clear()
    fleet.run(5.0)
    assert 2.5 < fleet.served["other"] / fleet.served["one"] < 3.5


def test_a_burst_of_long_rows_leaves_another_tenants_share_intact() -> None:
    fleet = fleet_of(Tenant("steady", 60, 0.001), Tenant("burst", 0, 0.008))
    fleet.run(1.0)
    fleet.gateways[0].enter("burst", 2000)
    fleet.run(0.5)  # until the cost of its rows is measured
    fleet.served.clear()
    fleet.run(4.0)
    assert fleet.served["steady"] > 0.45 * sum(fleet.served.values())


def test_a_class_goes_before_those_below_which_keep_a_slot() -> None:
    fleet = fleet_of(Tenant("batch", 200, 0.002, priority=Priority.BATCH), Tenant("live", 200, 0.002))
    fleet.run(1.0)
    fleet.served.clear()
    fleet.run(3.0)
    assert 0 < fleet.served["batch"] < 0.1 * fleet.served["live"]


def test_one_tenant_uses_all_but_what_is_kept_for_newcomers_who_start_at_once() -> None:
    fleet = fleet_of(Tenant("all", 200, 0.001), Tenant("new", 0, 0.001))
    fleet.run(1.0)
    fleet.gateways[0].enter("new", 1)
    fleet.run(0.1)  # a round trip, a row's way there and back, and a batch before its own
    assert fleet.finished["new"] >= 1


def test_more_tenants_than_slots_take_turns() -> None:
    tenants = [Tenant(f"t{index}", 3, 0.002) for index in range(7)]
    fleet = fleet_of(*tenants, row_slots=(2, 2))
    fleet.run(2.0)
    fleet.served.clear()
    fleet.run(8.0)
    shares = [fleet.served[tenant.name] for tenant in tenants]
    assert min(shares) > 0.6 * max(shares), shares


def test_gateways_of_one_tenant_take_turns_on_too_few_slots() -> None:
    fleet = fleet_of(Tenant("acme", 3, 0.002), gateways=5, row_slots=(2,))
    fleet.run(2.0)
    ended = {gateway: gateway.ended_rows for gateway in fleet.gateways}
    fleet.run(6.0)
    counts = [gateway.ended_rows - before for gateway, before in ended.items()]
    assert min(counts) > 0.5 * max(counts), counts


def test_a_gateway_without_a_leader_uses_its_leases_until_they_lapse() -> None:
    fleet = fleet_of(Tenant("acme", 60, 0.001), row_slots=(32,))
    fleet.run(1.0)
    cut = fleet.gateways[0]
    cut.up.is_open = cut.down.is_open = False
    fleet.leader.pools.disconnect(cut.gateway_id)
    fleet.run(1.0)
    assert cut.leases.choose(DIGEST, "acme", ()) is not None or cut.ended_rows
    fleet.run(1.5)
    before = cut.ended_rows
    fleet.run(4.0)
    assert cut.ended_rows == before, "its slots are leased to the other gateway by now"


def test_leases_of_a_lost_gateway_lapse_and_are_leased_to_others() -> None:
    fleet = fleet_of(Tenant("acme", 200, 0.001))
    fleet.run(1.0)
    fleet.lose_gateway(fleet.gateways[0])
    terms = LeaseTerms()
    fleet.run(terms.hold_s + 0.5)
    leases = fleet.leader.pools._pools[DIGEST].leases
    assert leases.slots_of(("g1", "acme")) == 60, "all of 64 but those for newcomers"
    assert not leases.of(("g0", "acme"))


def test_demands_of_a_gateway_that_is_lost_without_notice_end() -> None:
    fleet = fleet_of(Tenant("acme", 200, 0.001))
    fleet.run(1.0)
    lost = fleet.gateways[0]
    lost.alive = lost.up.is_open = lost.down.is_open = False  # the leader's stream stays open
    fleet.run(DEMAND_TTL_S + LeaseTerms().hold_s + 1.0)
    assert fleet.leader.pools._pools[DIGEST].leases.slots_of(("g1", "acme")) == 60


def test_demands_of_a_gateway_that_does_not_repeat_last_as_long_as_its_stream() -> None:
    """As gateways of the release before."""
    fleet = fleet_of(Tenant("acme", 200, 0.001))
    for gateway in fleet.gateways:
        gateway.repeats = False
    fleet.run(2 * DEMAND_TTL_S)
    leases = fleet.leader.pools._pools[DIGEST].leases
    assert leases.slots_of(("g0", "acme")) + leases.slots_of(("g1", "acme")) == 60


def test_a_worker_that_joins_relieves_those_that_are_loaded() -> None:
    fleet = fleet_of(Tenant("acme", 12, 0.001), gateways=1)
    fleet.lose_worker(fleet.workers[1])
    fleet.run(1.0)
    fleet.restart_worker(fleet.workers[1])
    fleet.run(3.0)
    leases = fleet.leader.pools._pools[DIGEST].leases
    assert leases.slots_on("w0") + leases.slots_on("w1") == 24, "twice the rows"
    assert 9 <= leases.slots_on("w1") <= 15


@pytest.mark.parametrize("seed", range(8))
def test_faults_over_lease_nothing_and_starve_nobody(seed: int) -> None:
    """The fleet checks after every step that nothing is over-leased."""
    rng = Random(seed)
    tenants = [
        Tenant(f"t{index}", rng.choice([1, 4, 40]), rng.choice([0.0005, 0.002, 0.008]))
        for index in range(rng.randint(2, 6))
    ]
    names = tuple(tenant.name for tenant in tenants)
    some = [tuple(rng.sample(names, rng.randint(1, len(names)))) for _ in range(3)]
    fleet = SlotFleet(
        seed,
        {tenant.name: tenant for tenant in tenants},
        row_slots=tuple(rng.choice([4, 16, 48]) for _ in range(rng.randint(2, 3))),
        gateways_of=(*some, names),
    )
    fleet.run(1.0)
    for _ in range(4):
        fault = rng.randrange(3)
        if fault == 0:
            fleet.lose_gateway(rng.choice(fleet.gateways[:3]))
        elif fault == 1:
            worker = rng.choice(fleet.workers)
            fleet.lose_worker(worker)
            fleet.run(rng.uniform(0.1, 1.0))
            fleet.restart_worker(worker)
        else:
            fleet.change_leader()
        fleet.run(rng.uniform(0.2, 1.5))
    fleet.run(4.0)
    fleet.finished.clear()
    fleet.run(2.0)
    assert all(fleet.finished[name] for name in names), f"starved: {fleet.finished}"
