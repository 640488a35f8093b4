"""A gateway's slots: what may start where, what is returned, and placement without a leader."""

from __future__ import annotations

from dataclasses import replace

from services.core.fixed_cost.slots import SlotLease, SlotReturn
from services.core.fleet import PlacementFrame, PoolMember
from services.core.generation import NotAdmittedReason
from services.gateway.rows.leases import CLOSED_S, FULL_S, AloneSettings, GatewayLeases
from tests.support.clocks import HandClock

DIGEST = "sha256:" + "a" * 64
LEASE = SlotLease("w1", "h:1", 3, 7, DIGEST, "acme", 2, ttl_s=2.0, number=1)
MEMBER = PoolMember("w1", "h:1", 3, DIGEST, 0, 0, 1, 0, 0, row_slots=16)


def leases_with(*leases: SlotLease) -> tuple[GatewayLeases, HandClock]:
    clock = HandClock()
    found = GatewayLeases(clock, AloneSettings(after_s=1.5, max_age_s=60.0))
    found.on_leases(leases)
    return found, clock


def fill(leases: GatewayLeases, excluded: tuple[str, ...] = ()) -> list[str]:
    """Start rows until no slot is free; return their workers."""
    found = []
    while (slots := leases.choose(DIGEST, "acme", excluded)) is not None:
        leases.started(slots)
        found.append(slots.lease.worker_id)
    return found


def test_rows_go_where_the_smallest_part_of_the_slots_is_in_use() -> None:
    leases, _ = leases_with(LEASE, replace(LEASE, worker_id="w2", slots=4))
    assert sorted(fill(leases)) == ["w1", "w1", "w2", "w2", "w2", "w2"]
    assert leases.choose(DIGEST, "beta", ()) is None, "leases belong to a tenant"


def test_an_excluded_worker_a_lapsed_lease_and_another_version_get_nothing() -> None:
    leases, clock = leases_with(LEASE)
    assert leases.choose(DIGEST, "acme", ("w1",)) is None
    assert leases.choose("sha256:b", "acme", ()) is None
    clock.now_s += 2.0
    assert leases.choose(DIGEST, "acme", ()) is None
    leases.on_leases([LEASE])
    assert leases.choose(DIGEST, "acme", ()) is not None, "a renewal"


def test_a_smaller_lease_is_returned_when_the_rows_beyond_it_have_ended() -> None:
    leases, _ = leases_with(LEASE)
    assert leases.take_returns() == [SlotReturn("w1", DIGEST, "acme", 1)]
    slots = leases.choose(DIGEST, "acme", ())
    assert slots is not None
    leases.started(slots)
    leases.started(slots)
    leases.on_leases([replace(LEASE, slots=1, number=2)])
    assert leases.take_returns() == []
    leases.ended(slots)
    assert leases.take_returns() == [SlotReturn("w1", DIGEST, "acme", 2)]
    leases.ended(slots)
    assert leases.take_returns() == [], "once for each lease"
    leases.on_leases([replace(LEASE, slots=0, number=3)])
    assert leases.take_returns() == [SlotReturn("w1", DIGEST, "acme", 3)]
    assert not list(leases.slots())


def test_a_worker_that_refuses_is_left_out_for_a_while() -> None:
    for refusal, wait_s in ((NotAdmittedReason.NO_ROOM, FULL_S), (NotAdmittedReason.NOT_READY, CLOSED_S)):
        leases, clock = leases_with(LEASE)
        slots = leases.choose(DIGEST, "acme", ())
        assert slots is not None
        leases.started(slots)
        leases.ended(slots, refusal)
        assert leases.choose(DIGEST, "acme", ()) is None
        clock.now_s += wait_s
        assert leases.choose(DIGEST, "acme", ()) is not None


def test_without_a_leader_a_quarter_of_the_slots_of_the_last_list_may_be_used() -> None:
    leases, clock = leases_with()
    tokens = replace(MEMBER, digest="sha256:tokens", row_slots=0)
    leases.on_frame(PlacementFrame(1, members=(MEMBER, tokens)))
    assert leases.choose_alone(DIGEST, "", ()) is None, "a leader answers"
    clock.now_s += 1.5
    count = 0
    while (slots := leases.choose_alone(DIGEST, "", ())) is not None:
        leases.started(slots)
        count += 1
        assert (slots.lease.epoch, slots.lease.incarnation) == (0, 3)
    assert count == 4
    assert leases.choose_alone("sha256:tokens", "", ()) is None
    assert leases.take_returns() == [], "no leader leased these"
    clock.now_s += 60.0
    assert not leases.is_alone, "the list is too old"


def test_lapsed_leases_without_rows_are_forgotten() -> None:
    leases, clock = leases_with(LEASE, replace(LEASE, worker_id="w2"))
    slots = leases.choose(DIGEST, "acme", ("w2",))
    assert slots is not None
    leases.started(slots)
    clock.now_s += 2.0
    leases.sweep()
    assert [found.lease.worker_id for found in leases.slots()] == ["w1"]
    leases.ended(slots)
    leases.sweep()
    assert not list(leases.slots())
