"""What waits, what passes what, and how each placement ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.errors import (
    FairwayError,
    InvalidInput,
    NoWorkerAvailable,
    Overloaded,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
    ShareExceeded,
)
from services.core.fleet import PlacementRefused, ReportSnapshot, SequenceUsage
from services.core.generation import Grant, PlaceSpec
from services.core.records import Priority
from services.scheduler.policy.queue.fair_order import OrderPolicy
from services.scheduler.queue.index import QueueLimits
from services.scheduler.queue.waiting import OpenGate, QueuedPlacement
from tests.unit.scheduler.model import BLOCK, DIGEST, place_spec
from tests.unit.scheduler.queue_rig import Rig

OTHER = "sha256:" + "b" * 64


def test_a_big_one_does_not_hold_small_ones_up_for_ever_nor_is_it_starved() -> None:
    rig = Rig(10)
    rig.ask(8)
    rig.turn()
    big = rig.ask(9)
    small = [rig.ask(1) for _ in range(6)]
    assert list(rig.turn()) == small[:2], "two blocks are free, and the big one needs nine"
    rig.free(0, 1)
    assert list(rig.turn()) == small[2:3]
    rig.free(0, 1)  # passed three times: now it is waited for
    assert rig.turn() == {}
    late = rig.ask(1)
    assert rig.turn() == {}
    rig.free(0, rig.reserved[0])
    assert list(rig.turn()) == [big, small[3]]
    rig.free(0, 10)
    assert list(rig.turn()) == [*small[4:], late]


def test_higher_classes_and_earlier_arrivals_go_first_even_past_one_that_is_waited_for() -> None:
    rig = Rig(10, order=OrderPolicy(max_bypasses=1, lookahead=8))
    rig.ask(9)
    rig.turn()
    big = rig.ask(10)
    rig.ask(1)
    rig.turn()
    urgent = rig.ask(1, priority=Priority.INTERACTIVE)
    waiting = rig.ask(1)
    rig.free(0, 2)
    assert list(rig.turn()) == [urgent]
    rig.free(0, rig.reserved[0])
    assert list(rig.turn()) == [big]
    rig.free(0, 10)
    assert list(rig.turn()) == [waiting]


def test_withdrawing_the_one_that_is_waited_for_lets_the_others_go() -> None:
    rig = Rig(10, order=OrderPolicy(max_bypasses=0, lookahead=8))
    rig.ask(9)
    rig.turn()
    big, small = rig.ask(5), rig.ask(1)
    assert rig.turn() == {}
    rig.queue.cancel(1, big, rig.now_s)
    assert list(rig.turn()) == [small]


def test_one_whose_workers_are_all_excluded_holds_nobody_up() -> None:
    rig = Rig(10, order=OrderPolicy(max_bypasses=0, lookahead=8))
    lost = rig.ask(1, excluded=("w0",), ttl=5.0)
    other = rig.ask(1)
    assert list(rig.turn()) == [other]
    rig.now_s += 5.0
    rig.report(0)
    error = rig.turn()[lost]
    assert isinstance(error, NoWorkerAvailable)
    assert "1 excluded by the request" in error.message


@pytest.mark.parametrize("why", ["excluded", "too small"])
def test_grants_on_a_worker_that_it_may_not_use_pass_nobody(why: str) -> None:
    """It waits for room on another worker: this one goes on serving those behind it."""
    rig = Rig(20, 10)
    rig.ask(20, excluded=("w1",))
    rig.turn()
    waiting = rig.ask(4, excluded=("w1",)) if why == "excluded" else rig.ask(15)
    small = [rig.ask(1) for _ in range(8)]
    assert list(rig.turn()) == small
    rig.free(0, 20)
    assert list(rig.turn()) == [waiting]


def test_sequence_slots_bound_like_room() -> None:
    rig = Rig(100, slots=2)
    asked = [rig.ask(1) for _ in range(3)]
    assert list(rig.turn()) == asked[:2]
    assert rig.fleet.candidates(DIGEST)["w0"].slots == 0
    assert len(rig.queue) == 1


def test_places_spread_over_equal_workers() -> None:
    rig = Rig(50, 50, 50)
    for _ in range(30):
        rig.ask(2)
    rig.turn()
    assert all(14 <= reserved <= 26 for reserved in rig.reserved)


@pytest.mark.parametrize("how", ["loading", "draining", "silent", "absent"])
def test_nobody_ready_waits_and_then_says_what_is_missing(how: str) -> None:
    rig = Rig(10)
    digest = OTHER if how == "absent" else DIGEST
    if how in {"loading", "draining"}:
        rig.report(0, ready=how != "loading", draining=how == "draining")
    elif how == "silent":
        rig.now_s += 3.0
    asked = rig.ask(1, ttl=1.0, digest=digest)
    assert rig.turn() == {}
    rig.now_s += 1.0
    error = rig.turn()[asked]
    assert isinstance(error, NoWorkerAvailable)
    texts = {"loading": "1 not ready yet", "absent": "none has the version loaded"}
    assert texts.get(how, f"1 {how}") in error.message
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 1.0


def test_a_worker_that_becomes_ready_serves_what_waits() -> None:
    rig = Rig(10)
    rig.report(0, ready=False)
    asked = rig.ask(1)
    assert rig.turn() == {}
    rig.report(0)
    assert list(rig.turn()) == [asked]


def test_what_never_fits_is_refused_at_once_unless_a_larger_worker_serves() -> None:
    rig = Rig(10, 20)
    fits, too_long = rig.ask(15), rig.ask(21)
    found = rig.turn()
    assert isinstance(found[fits], Grant)
    error = found[too_long]
    assert isinstance(error, PromptTooLong)
    assert error.metadata["limit"] == str(20 * BLOCK)


def test_without_time_to_wait_it_is_now_or_never() -> None:
    rig = Rig(10)
    first, second = rig.ask(8, ttl=0.0), rig.ask(8, ttl=0.0)
    found = rig.turn()
    assert isinstance(found[first], Grant)
    assert isinstance(found[second], QueueTimeout)


def test_bounds_of_pool_and_tenant_refuse_with_a_time_to_come_back() -> None:
    """One tenant has half of the queue: what is above is its own fault, the full queue is the platform's."""
    rig = Rig(1, limits=QueueLimits(max_per_pool=4))
    rig.ask(1)
    rig.turn()
    asked = [rig.ask(1) for _ in range(4)]
    other = [rig.ask(1, tenant="beta") for _ in range(2)]
    third = rig.ask(1, tenant="gamma")
    found = rig.turn()
    assert list(found) == [*asked[2:], third]
    assert not set(other) & found.keys()
    for number in asked[2:]:
        assert isinstance(found[number], ShareExceeded)
        assert "of this tenant are queued already, the limit is 2; wait until" in str(found[number])
    assert isinstance(found[third], QueueFull)
    assert all(isinstance(error, FairwayError) and error.retry_after_s for error in found.values())


def test_a_share_follows_from_what_all_may_have_waiting() -> None:
    assert QueueLimits(max_per_pool=4096).max_per_tenant == 2048
    assert QueueLimits(max_per_pool=1_000_000).max_per_tenant == QueueLimits().max_total // 2
    assert QueueLimits(max_per_pool=1).max_per_tenant == 1


def test_a_tenants_bytes_are_bounded() -> None:
    rig = Rig(1, limits=QueueLimits(max_bytes_per_tenant=2500))
    rig.ask(1)
    rig.turn()
    asked = [rig.ask(1) for _ in range(3)]
    assert list(rig.turn()) == asked[2:]


def test_a_burst_that_fits_is_not_refused_for_a_short_queue() -> None:
    rig = Rig(100, limits=QueueLimits(max_per_pool=4))
    asked = [rig.ask(1) for _ in range(50)]
    found = rig.turn()
    assert list(found) == asked
    assert all(isinstance(outcome, Grant) for outcome in found.values())


def test_a_placement_id_in_use_is_refused() -> None:
    rig = Rig(1)
    rig.ask(1)
    rig.number -= 1
    number = rig.ask(1)
    rig.queue.run_pass(rig.now_s)
    outcomes = [outcome for _, outcome in rig.queue.take_outcomes()]
    assert [outcome.placement_id for outcome in outcomes] == [number, number]
    assert isinstance(outcomes[0], PlacementRefused)
    assert isinstance(outcomes[0].error, InvalidInput)


def test_ended_placements_leave_nothing_behind() -> None:
    rig = Rig(2)
    for _ in range(500):
        number = rig.ask(2, ttl=3000.0)
        rig.turn()
        rig.queue.cancel(1, number, rig.now_s)
    rig.now_s += 10.0
    rig.turn()
    assert len(rig.queue) == 0
    assert len(rig.queue.waiting._deadlines) < 200
    assert not rig.queue._granted
    assert not rig.queue.waiting._tenants
    assert not rig.queue.waiting._pools


def test_one_that_was_passed_too_often_is_given_a_worker_and_the_others_go_on() -> None:
    """Of three full workers one is kept for it; what ends on the others goes to those behind."""
    rig = Rig(10, 10, 10, order=OrderPolicy(max_bypasses=2, lookahead=8))
    for _ in range(3):
        rig.ask(10)
    rig.turn()
    big = rig.ask(10)
    small = [rig.ask(1) for _ in range(12)]
    rig.free(0, 2)
    assert list(rig.turn()) == small[:2]
    kept = next(iter(rig.queue.waiting.of_version(DIGEST))).earmark
    assert kept is not None
    others = [index for index in range(3) if f"w{index}" != kept]
    rig.free(int(kept[1:]), 3)
    assert rig.turn() == {}, "nothing behind it starts there"
    rig.free(others[0], 2)
    rig.free(others[1], 2)
    granted = rig.turn()
    assert list(granted) == small[2:6]
    assert kept not in {grant.worker_id for grant in granted.values() if isinstance(grant, Grant)}
    rig.free(int(kept[1:]), 7)
    granted = rig.turn()
    assert next(iter(granted)) == big
    found = granted[big]
    assert isinstance(found, Grant)
    assert found.worker_id == kept
    assert not list(rig.queue.waiting._pools[DIGEST].earmarks), "the worker is everybody's again"


@pytest.mark.parametrize("how", ["draining", "withdrawn"])
def test_a_worker_is_kept_for_nobody_who_cannot_have_it(how: str) -> None:
    rig = Rig(10, 10, order=OrderPolicy(max_bypasses=0, lookahead=8))
    rig.ask(9)
    rig.ask(9)
    rig.turn()
    big = rig.ask(10)
    rig.turn()
    kept = next(item.earmark for item in rig.queue.waiting.of_version(DIGEST) if item.placement_id == big)
    assert kept is not None
    if how == "draining":
        rig.report(int(kept[1:]), draining=True)
        rig.free(1 - int(kept[1:]), 1)
        rig.ask(1)
        rig.turn()
        waiting = rig.queue.waiting.of_version(DIGEST)
        again = next(item.earmark for item in waiting if item.placement_id == big)
        assert again not in (kept, None)
    else:
        rig.queue.withdraw_all(1, rig.now_s)
        small = rig.ask(1)
        assert list(rig.turn()) == [small]


def test_what_only_fits_a_worker_that_is_kept_waits_for_it() -> None:
    rig = Rig(20, 10, order=OrderPolicy(max_bypasses=0, lookahead=8))
    rig.ask(5)
    rig.ask(5)
    rig.turn()
    for index in range(2):
        if not rig.reserved[index]:
            rig.reserved[index] = 5
            rig.report(index)
    first, second = rig.ask(20), rig.ask(15)
    assert rig.turn() == {}, "the second is not too long, though the worker that it fits is not for it"
    rig.free(0, rig.reserved[0])
    assert list(rig.turn()) == [first]
    rig.free(0, 20)
    assert list(rig.turn()) == [second]


def test_of_two_that_a_worker_is_kept_for_the_first_goes_first() -> None:
    rig = Rig(10, order=OrderPolicy(max_bypasses=0, lookahead=8))
    rig.ask(9)
    rig.turn()
    first, second = rig.ask(10), rig.ask(5)
    rig.ask(1)
    assert rig.turn() == {}
    rig.free(0, 6)
    assert rig.turn() == {}, "the second would fit"
    rig.free(0, 3)
    assert list(rig.turn()) == [first]
    rig.free(0, 10)
    assert second in rig.turn()


def test_a_grant_that_is_given_back_costs_its_tenant_nothing() -> None:
    rig = Rig(10)
    number = rig.ask(5)
    rig.turn()
    account = rig.queue.ledger.shares(DIGEST)[Priority.STANDARD].find("acme")
    assert account is not None
    assert account.value > 0.0
    rig.queue.cancel(1, number, rig.now_s)
    assert account.value == 0.0


def test_a_tenant_far_ahead_does_not_go_past_one_that_is_short_of_room() -> None:
    order = OrderPolicy(max_bypasses=100, lookahead=64, bypass_window_tokens=3 * BLOCK)
    rig = Rig(20, order=order)
    rig.ask(10, tenant="big")
    rig.turn()
    big = rig.ask(20, tenant="big")
    small = [rig.ask(1, tenant="small") for _ in range(30)]
    assert list(rig.turn()) == small[:3], "there is room for ten, and it began where the other was"
    rig.free(0, 5)
    assert rig.turn() == {}, "it is as far ahead as it may be"
    rig.free(0, rig.reserved[0])
    assert next(iter(rig.turn())) == big
    rig.free(0, rig.reserved[0])
    assert list(rig.turn()) == small[3:23]


def test_earliest_deadline_first_within_a_tenant_and_none_without_waits_for_ever() -> None:
    rig = Rig(1)
    rig.ask(1)
    rig.turn()
    plain = rig.ask(1, ttl=3000.0)
    late, soon = rig.ask(1, left_s=50.0), rig.ask(1, left_s=5.0)
    for expected in (soon, late):
        rig.free(0, 1)
        assert list(rig.turn()) == [expected]
    rig.now_s += 601.0
    rig.ask(1, left_s=50.0)
    rig.free(0, 1)
    assert list(rig.turn()) == [plain]


def test_no_worker_idles_while_anything_that_fits_waits() -> None:
    """Tenants with one big placement each in front; one small at the very end."""
    rig = Rig(10, order=OrderPolicy(max_bypasses=100, lookahead=64))
    rig.ask(9)
    rig.turn()
    for number in range(50):
        rig.ask(9, tenant=f"t{number}")
    small = rig.ask(1, tenant="last")
    assert list(rig.turn()) == [small]


def test_long_prompts_of_one_tenant_take_their_share_of_the_pool() -> None:
    rig = Rig(700, 700, 600)
    long = [rig.ask(300, tenant="flood") for _ in range(6)]
    granted = list(rig.turn())
    assert granted == long[:3], "half of 2,000 blocks"
    other = [rig.ask(300, tenant="other"), rig.ask(1, tenant="flood")]
    assert sorted(rig.turn()) == other


def test_room_is_reserved_for_the_outputs_that_come() -> None:
    rig = Rig(1000, limits=QueueLimits(predicted_output_tokens=256))
    first = rig.ask(1, output=1000)
    found = rig.turn()[first]
    assert isinstance(found, Grant)
    assert found.kv_blocks == 17, "the default, while nothing is known"
    ended = tuple(
        SequenceUsage(f"seq_{number}", 0, "acme", DIGEST, 10, 30, ended=True) for number in range(64)
    )
    rig.queue.reported(ReportSnapshot("w0", 1, "h:1", epoch=1, usage=ended))
    second = rig.ask(1, output=1000)
    found = rig.turn()[second]
    assert isinstance(found, Grant)
    assert found.kv_blocks == 3


class FullGate(OpenGate):
    """Takes nobody over quota, and counts."""

    def __init__(self) -> None:
        self.present = 0

    def admit(
        self, spec: PlaceSpec, predicted_tokens: int, now_s: float, *, settled: bool = True
    ) -> FairwayError | None:
        return Overloaded("over quota") if spec.over_quota else None

    def entered(self, item: QueuedPlacement, now_s: float) -> None:
        self.present += 1

    def left(self, item: QueuedPlacement, now_s: float) -> None:
        self.present -= 1


def test_the_gate_refuses_at_once_and_victims_are_refused_from_the_queue() -> None:
    rig = Rig(1)
    gate = rig.queue._gate = FullGate()
    rig.ask(1)
    rig.turn()
    victim = rig.ask(1)
    assert gate.present == 1
    spec = replace(place_spec(), over_quota=True)
    rig.queue.submit(1, 99, spec, spec.arrival_unix_us, rig.now_s)
    rig.queue.evict(next(rig.queue.waiting.of_version(DIGEST)), Overloaded("shed"), rig.now_s)
    found = rig.turn()
    assert all(isinstance(found[number], Overloaded) for number in (99, victim))
    assert gate.present == 0
