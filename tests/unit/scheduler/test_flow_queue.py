"""What waits, what passes what, and how each placement ends."""

from __future__ import annotations

from random import Random

import pytest
from prometheus_client import generate_latest

from services.core.errors import (
    FairwayError,
    InvalidInput,
    NoWorkerAvailable,
    PromptTooLong,
    QueueFull,
    QueueTimeout,
)
from services.core.fleet import Granted, PoolSnapshot, Refused, ReportSnapshot
from services.core.generation import Grant
from services.core.records import Priority
from services.runtime.metrics import Metrics
from services.scheduler.fleet_view import FleetLimits, FleetView
from services.scheduler.flow_queue import FlowQueue, QueueLimits
from services.scheduler.policy.placement import PlacementProfile
from services.scheduler.policy.queue_order import OrderPolicy
from services.scheduler.telemetry import SchedulerTelemetry
from tests.support.metrics import values
from tests.unit.scheduler.model import BLOCK, DIGEST, ManualClock, place_spec

OTHER = "sha256:" + "b" * 64


class Rig:
    """A queue over workers of one pool each, on a clock of the test's."""

    def __init__(
        self,
        *totals: int,
        limits: QueueLimits | None = None,
        order: OrderPolicy | None = None,
        slots: int = 64,
    ) -> None:
        self.now_s = 1000.0
        self.slots = slots
        self.fleet = FleetView(1, FleetLimits())
        self.metrics = Metrics()
        self.telemetry = SchedulerTelemetry(self.metrics, ManualClock())
        self.queue = FlowQueue(
            self.fleet,
            limits if limits is not None else QueueLimits(),
            order if order is not None else OrderPolicy(max_bypasses=3, lookahead=8),
            PlacementProfile(),
            Random(1),
            observer=self.telemetry,
        )
        self.totals = list(totals)
        self.reserved = [0] * len(totals)
        self.seen: list[list[int]] = [[] for _ in totals]
        self.number = 0
        for index in range(len(totals)):
            self.report(index)

    def report(self, index: int, *, ready: bool = True, draining: bool = False, digest: str = DIGEST) -> None:
        pool = PoolSnapshot(
            digest,
            self.totals[index],
            self.reserved[index],
            BLOCK,
            0,
            0,
            self.slots,
            self.totals[index] * BLOCK,
            ready=ready,
        )
        seen, self.seen[index] = tuple(self.seen[index]), []
        snapshot = ReportSnapshot(
            f"w{index}", 1, "h:1", pools=(pool,), epoch=1, grants_seen=seen, draining=draining
        )
        self.queue.touch(self.fleet.apply(index, snapshot, self.now_s))

    def ask(
        self,
        blocks: int,
        *,
        priority: Priority = Priority.STANDARD,
        ttl: float = 60.0,
        excluded: tuple[str, ...] = (),
        digest: str = DIGEST,
        tenant: str = "acme",
    ) -> int:
        self.number += 1
        spec = place_spec(
            prompt_tokens=blocks * BLOCK - 1,
            max_output_tokens=1,
            priority=priority,
            arrival_s=self.now_s,
            queue_ttl_s=ttl,
            excluded_workers=excluded,
            digest=digest,
            tenant=tenant,
        )
        self.queue.submit(1, self.number, spec, spec.arrival_unix_us, self.now_s)
        return self.number

    def turn(self) -> dict[int, Grant | FairwayError]:
        """One turn of the owner; grants start on their workers at once."""
        self.queue.touch(self.fleet.expire(self.now_s))
        self.queue.run_pass(self.now_s)
        self.queue.expire(self.now_s)
        self.queue.run_pass(self.now_s)
        self.queue.check_integrity()
        assert sum(self.counted("fairway_scheduler_queue_placements").values()) == len(self.queue)
        self.fleet.check_integrity()
        found: dict[int, Grant | FairwayError] = {}
        for _, outcome in self.queue.take_outcomes():
            assert outcome.placement_id not in found
            if isinstance(outcome, Granted):
                grant = found[outcome.placement_id] = outcome.grant
                index = int(grant.worker_id[1:])
                self.reserved[index] += grant.kv_blocks
                self.seen[index].append(grant.sequence)
            else:
                assert isinstance(outcome, Refused)
                found[outcome.placement_id] = outcome.error
        return found

    def counted(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        return values(generate_latest(self.metrics.registry).decode(), name)

    def free(self, index: int, blocks: int) -> None:
        self.reserved[index] -= blocks
        self.report(index)


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
    limits = QueueLimits(max_per_pool=4, max_per_tenant=3, max_bytes_per_tenant=1 << 20)
    rig = Rig(1, limits=limits)
    rig.ask(1)
    rig.turn()
    asked = [rig.ask(1) for _ in range(4)]
    other = [rig.ask(1, tenant="beta") for _ in range(2)]
    found = rig.turn()
    assert list(found) == [asked[3], other[1]]
    for error in found.values():
        assert isinstance(error, QueueFull)
        assert error.retry_after_s


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
    assert isinstance(outcomes[0], Refused)
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
    assert len(rig.queue._deadlines) < 200
    assert not rig.queue._granted
    assert not rig.queue._tenants
    assert not rig.queue._pools
