"""Tenants that hold much leave prefill and slots to those that hold less."""

from __future__ import annotations

from dataclasses import replace

from services.core.generation import Grant
from services.core.records import Priority
from services.scheduler.policy.queue.fair_order import OrderPolicy
from tests.unit.scheduler.model import BLOCK, DIGEST, place_spec
from tests.unit.scheduler.queue_rig import Rig


def two_workers() -> Rig:
    return Rig(10_000, 10_000, order=OrderPolicy(max_bypasses=3))


def granted_of_whale(rig: Rig, tenant: str = "whale", priority: Priority = Priority.STANDARD) -> int:
    """Return how many of 60 placements of 50 blocks, 799 tokens, start in one turn on two empty workers."""
    asked = [rig.ask(50, tenant=tenant, priority=priority) for _ in range(60)]
    found = rig.turn()
    assert all(isinstance(found[number], Grant) for number in found)
    return sum(number in found for number in asked)


def test_a_standing_queue_leaves_prefill_to_those_who_hold_less() -> None:
    alone = granted_of_whale(two_workers())
    rig = two_workers()
    rig.ask(1, tenant="minnow")
    rig.turn()
    granted = granted_of_whale(rig)
    assert 2 <= granted < alone, "each worker computes for it, and no more is queued there"
    late = [rig.ask(50, tenant=f"late-{number}") for number in range(2)]
    assert sorted(rig.turn()) == late, "there is room for those who do not give way, at once"


def test_those_who_are_passed_for_it_wait_as_for_room() -> None:
    rig = two_workers()
    rig.ask(1, tenant="minnow")
    rig.turn()
    granted_of_whale(rig)
    for number in range(4):
        rig.ask(50, tenant=f"late-{number}")
    rig.turn()
    passed = [item for item in rig.queue.waiting.of_version(DIGEST) if item.bypassed]
    assert passed, "they are given a worker after so many, as any that is passed"
    assert {item.tenant for item in passed} == {"whale"}


def test_a_higher_class_does_not_give_way_to_a_lower_one() -> None:
    rig = two_workers()
    rig.ask(1, tenant="minnow", priority=Priority.BATCH)
    rig.turn()
    alone = granted_of_whale(two_workers(), priority=Priority.INTERACTIVE)
    assert granted_of_whale(rig, priority=Priority.INTERACTIVE) == alone
    below = two_workers()
    below.ask(1, tenant="minnow", priority=Priority.INTERACTIVE)
    below.turn()
    assert granted_of_whale(below, priority=Priority.BATCH) < alone


def full_of(tenant: str, *totals: int) -> Rig:
    """Return workers of four slots, each taken by the tenant, which would have more."""
    rig = Rig(*totals, slots=4)
    for _ in range(4 * len(totals)):
        rig.ask(1, tenant=tenant)
    assert len(rig.turn()) == 4 * len(totals)
    for index in range(len(totals)):
        rig.report(index, running=4, yields=Priority.STANDARD.rank)
    for _ in range(20):
        rig.ask(1, tenant=tenant)
    assert rig.turn() == {}
    return rig


def test_a_tenant_below_its_share_has_slots_of_the_one_that_holds_all() -> None:
    rig = full_of("whale", 100, 100)
    asked = [rig.ask(1, tenant="canary") for _ in range(8)]
    granted: list[int] = []
    for _ in range(4):
        granted += rig.turn()
        for index in range(2):
            rig.report(index, running=4, yields=Priority.STANDARD.rank)
    assert granted == asked[: len(granted)]
    assert len(granted) == 7, "one more would be more than half of the fifteen that are held"
    rig.ask(1, tenant="canary")
    assert rig.turn() == {}, "it has its share"


def test_no_slot_is_taken_from_a_higher_class_nor_without_kv() -> None:
    rig = full_of("whale", 4)
    rig.ask(1, tenant="canary")
    assert rig.turn() == {}, "no KV"
    rig = full_of("whale", 100)
    low = rig.ask(1, tenant="canary", priority=Priority.BATCH)
    assert rig.turn() == {}
    high = rig.ask(1, tenant="canary", priority=Priority.INTERACTIVE)
    assert list(rig.turn()) == [high]
    rig.report(0, running=3)
    assert low not in rig.turn()


def test_a_placement_that_was_refused_such_a_slot_waits_for_a_free_one() -> None:
    rig = full_of("whale", 100)
    asked = rig.ask(1, tenant="canary")
    (grant,) = rig.turn().values()
    assert isinstance(grant, Grant)
    rig.report(0, running=4, yields=Priority.STANDARD.rank)
    spec = place_spec(prompt_tokens=BLOCK - 1, arrival_s=rig.now_s, queue_ttl_s=60.0, tenant="canary")
    rig.number += 1
    again = replace(spec, request_id=f"req_{asked}")
    rig.queue.submit(1, rig.number, again, spec.arrival_unix_us, rig.now_s)
    assert rig.turn() == {}
    rig.report(0, running=1)
    assert rig.number in rig.turn(), "one slot is the whale's, who waits for longer"
