"""Whom gateways are told of: workers that take requests, some of many, others for each gateway."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.policy.step_time import StepTimes
from services.scheduler.term import MAX_LISTED, MAX_MEMBERS, PER_POOL, Term, members_of, sample_of
from services.scheduler.term_streams import GatewaySession
from tests.unit.scheduler.model import SETTINGS, ManualClock

POOL = PoolSnapshot(
    digest="d0",
    kv_blocks_total=100,
    kv_blocks_reserved=40,
    block_size=16,
    running=2,
    waiting=1,
    max_sequences=8,
    max_model_len=512,
)


def fleet_of(*reports: ReportSnapshot) -> FleetView:
    fleet = FleetView(5, FleetLimits(), StepTimes())
    for stream, report in enumerate(reports, 1):
        fleet.apply(stream, report, 100.0)
    return fleet


def report(name: str, *pools: PoolSnapshot, epoch: int = 5, draining: bool = False) -> ReportSnapshot:
    return ReportSnapshot(name, 7, f"{name}:1", pools=pools, epoch=epoch, draining=draining)


def told_of(session: GatewaySession) -> list[tuple[str, str]]:
    return [(member.worker_id, member.digest) for member in session.members or ()]


def test_a_member_is_what_a_gateway_needs_to_place() -> None:
    (member,) = sample_of(members_of(fleet_of(report("w1", POOL))), Random(1))
    assert (member.worker_id, member.address, member.incarnation, member.digest) == ("w1", "w1:1", 7, "d0")
    assert (member.kv_tokens_room, member.kv_tokens_total, member.block_size) == (960, 1600, 16)
    assert (member.slots, member.max_model_len) == (5, 512)


FULL = replace(POOL, kv_blocks_reserved=110)
CROWDED = replace(POOL, running=7)


def test_only_workers_that_take_requests_are_told_of() -> None:
    fleet = fleet_of(
        report("loading", replace(POOL, ready=False)),
        report("draining", POOL, draining=True),
        report("another leader's", POOL, epoch=4),
        report("ejected", POOL),
        report("good", POOL),
    )
    assert fleet.bar("ejected", "d0", barred=True)
    assert [member.worker_id for member in sample_of(members_of(fleet), Random(1))] == ["good"]
    assert fleet.expire(200.0)
    assert members_of(fleet) == {}, "it fell silent"


def test_workers_without_room_are_told_of_behind_those_with() -> None:
    fleet = members_of(fleet_of(report("full", FULL), report("crowded", CROWDED), report("good", POOL)))
    members = sample_of(fleet, Random(1))
    assert [member.worker_id for member in members] == ["good", "full", "crowded"]
    assert [(member.kv_tokens_room, member.slots) for member in members] == [(960, 5), (0, 5), (960, 0)]
    few = sample_of(fleet, Random(1), per_pool=2)
    assert few[0].worker_id == "good"
    assert len(few) == 2


def test_of_many_each_gateway_is_told_of_others() -> None:
    fleet = members_of(fleet_of(*(report(f"w{number}", POOL) for number in range(200))))
    rng = Random(1)
    told = [{member.worker_id for member in sample_of(fleet, rng)} for _ in range(8)]
    assert {len(one) for one in told} == {PER_POOL}
    assert len(set.union(*told)) > 150
    assert told[0] != told[1]


def test_a_frame_is_bounded_over_all_versions() -> None:
    pools = [replace(POOL, digest=f"d{number}") for number in range(60)]
    fleet = members_of(fleet_of(*(report(f"w{number}", *pools) for number in range(40))))
    members = sample_of(fleet, Random(1))
    assert len(members) <= MAX_MEMBERS
    assert {member.digest for member in members} == {pool.digest for pool in pools}


def test_gateways_that_connect_together_are_told_after_one_look_at_the_fleet() -> None:
    clock = ManualClock()
    term = Term(5, SETTINGS, clock, Random(1))

    def told(name: str) -> list[str]:
        return [member.worker_id for member in term.streams.open_session(name, lambda: None).members or ()]

    term.fleet.apply(1, report("w1", POOL), clock.now_s)
    assert told("g1") == ["w1"]
    term.fleet.apply(2, report("w2", POOL), clock.now_s)
    assert told("g2") == ["w1"]
    clock.now_s += 0.25
    assert told("g3") == ["w1", "w2"]


def test_a_fleet_that_stays_full_is_told_of_with_every_beat() -> None:
    clock = ManualClock()
    term = Term(5, SETTINGS, clock, Random(1))
    other = replace(POOL, digest="d1")
    session = term.streams.open_session("g1", lambda: None)
    for _ in range(150):
        clock.now_s += 1.0
        term.fleet.apply(1, report("w1", FULL, other), clock.now_s)
        session.members = None
        term.step()
        assert told_of(session) == [("w1", "d0"), ("w1", "d1")], "room in one does not push the other out"


def test_many_gateways_are_told_in_turn_and_each_of_the_pressure_with_every_beat() -> None:
    clock = ManualClock()
    term = Term(5, SETTINGS, clock, Random(1))
    sessions = [term.streams.open_session(f"g{number}", lambda: None) for number in range(300)]
    for number in range(PER_POOL):
        term.fleet.apply(number + 1, report(f"w{number}", POOL), clock.now_s)
    told: list[int] = []
    for _ in range(3):
        clock.now_s += 1.0
        for number in range(PER_POOL):
            term.fleet.apply(number + 1, report(f"w{number}", POOL), clock.now_s)
        term.step()
        fresh = [number for number, session in enumerate(sessions) if session.members]
        assert PER_POOL * len(fresh) <= MAX_LISTED
        assert all(session.pressures is not None for session in sessions)
        told += fresh
        for session in sessions:
            session.members = session.pressures = None
    assert set(told) == set(range(300)), "whoever was told longest ago is told first"
