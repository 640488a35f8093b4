"""Who is next: between tenants, within a tenant, between classes; and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.records import Priority
from services.scheduler.policy.queue.fair_order import FairOrder, OrderPolicy
from services.scheduler.policy.queue.fairness import MAX_ACCOUNTS, Account, FairShares
from simulator.invariants.fairness import granted_bound, service_bound

SECOND = 1_000_000


@dataclass(frozen=True)
class Item:
    number: int
    tenant: str = "a"
    priority: Priority = Priority.STANDARD
    due_us: int = 0
    arrival_us: int = 0
    weight: float = 1.0
    key: int = 0


class Rig:
    """An order, its counters, and a way to serve from it."""

    def __init__(self, policy: OrderPolicy | None = None) -> None:
        self.shares = {priority: FairShares() for priority in Priority}
        self.order: FairOrder[Item] = FairOrder(policy or OrderPolicy(), self.shares)

    def add(self, *items: Item) -> None:
        for item in items:
            self.order.add(item)

    def serve(self, count: int, *, cost: float = 100.0, now_us: int = 0) -> list[Item]:
        """Grant the first so many in one pass; each runs to its end at once."""
        served: list[Item] = []
        for item in self.order.in_order(now_us):
            account = self.shares[item.priority].find(item.tenant)
            assert account is not None
            self.shares[item.priority].advance(account, cost, "w0")
            self.order.granted(item, cost)
            self.order.discard(item)
            served.append(item)
            if len(served) == count:
                break
        for shares in self.shares.values():
            shares.check_integrity()
        return served


def numbers(items: Sequence[Item]) -> list[int]:
    return [item.number for item in items]


def test_tenants_take_turns_and_weights_are_their_shares() -> None:
    rig = Rig()
    rig.add(*(Item(number, "a") for number in range(30)))
    rig.add(*(Item(100 + number, "b", weight=2.0) for number in range(30)))
    served = rig.serve(30)
    assert abs(sum(item.tenant == "b" for item in served) - 20) <= 1


def test_within_a_tenant_the_earliest_deadline_then_arrival() -> None:
    rig = Rig()
    rig.add(
        Item(1, due_us=900, arrival_us=1),
        Item(2, due_us=300, arrival_us=9),
        Item(3, due_us=300, arrival_us=5),
        Item(4, due_us=100, arrival_us=9),
    )
    assert numbers(rig.serve(4)) == [4, 3, 2, 1]


def test_one_that_was_away_does_not_save_service_up() -> None:
    rig = Rig()
    rig.add(*(Item(number, "busy") for number in range(50)))
    rig.serve(40)
    rig.add(*(Item(100 + number, "late") for number in range(50)))
    served = rig.serve(10)
    assert 4 <= sum(item.tenant == "late" for item in served) <= 6


def test_the_higher_class_first_however_much_of_the_lower_waits() -> None:
    rig = Rig()
    rig.add(*(Item(number, priority=Priority.BATCH) for number in range(20)))
    rig.add(*(Item(50 + number, priority=Priority.INTERACTIVE) for number in range(5)))
    served = rig.serve(7, now_us=10 * SECOND)
    assert [item.priority for item in served] == [Priority.INTERACTIVE] * 5 + [Priority.BATCH] * 2


@pytest.mark.parametrize("backlog", [30, 300])
def test_a_class_that_aged_has_its_share_and_no_more(backlog: int) -> None:
    """Neither does it starve, nor does an old backlog take over."""
    rig = Rig(OrderPolicy(class_head_start_s=30.0, aged_share_ratio=0.1))
    rig.add(*(Item(number, "old", Priority.STANDARD) for number in range(backlog)))
    rig.add(
        *(Item(1000 + number, "new", Priority.INTERACTIVE, arrival_us=31 * SECOND) for number in range(500))
    )
    early = rig.serve(100, now_us=29 * SECOND)
    assert all(item.priority is Priority.INTERACTIVE for item in early), "it has not aged yet"
    served = rig.serve(200, now_us=31 * SECOND)
    assert 18 <= sum(item.priority is Priority.STANDARD for item in served) <= 22


def test_what_is_passed_does_not_end_the_order() -> None:
    """Others of the tenant are tried, then other tenants, each a bounded number."""
    rig = Rig(OrderPolicy(tenant_lookahead=3))
    rig.add(*(Item(number, "a") for number in range(5)), Item(10, "b"), Item(11, "c"))
    assert numbers(list(rig.order.in_order())) == [0, 1, 2, 10, 11]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.booleans()), max_size=60))
def test_every_item_is_in_the_order_once_whatever_leaves(actions: list[tuple[str, int, bool]]) -> None:
    rig = Rig(OrderPolicy(tenant_lookahead=1000))
    model: list[Item] = []
    for number, (tenant, due, add) in enumerate(actions):
        if add or not model:
            item = Item(number, tenant, list(Priority)[due % 3], due_us=due)
            rig.order.add(item)
            model.append(item)
        else:
            rig.order.discard(model.pop(due % len(model)))
        assert sorted(numbers(list(rig.order.in_order()))) == sorted(numbers(model))
        assert sorted(numbers(list(rig.order.items()))) == sorted(numbers(model))
        assert len(rig.order) == len(model)
        for shares in rig.shares.values():
            shares.check_integrity()
    with pytest.raises(KeyError):
        rig.order.discard(Item(10_000))


def test_reports_use_an_advance_up_and_the_rest_is_given_back() -> None:
    shares = FairShares()
    account = shares.enter("a", 2.0)
    virtual = shares.advance(account, 100.0, "w0")
    assert account.value == 50.0
    shares.charge("a", 60.0, "w0")
    assert account.value == 50.0, "paid already"
    shares.charge("a", 20.0, "w1")
    assert account.value == 60.0, "not on that worker"
    shares.close("a", "w0", virtual, used_tokens=60.0)
    assert account.value == account.settled == 40.0


def test_an_output_beyond_its_prediction_is_charged_as_it_comes() -> None:
    shares = FairShares()
    account = shares.enter("a", 1.0)
    virtual = shares.advance(account, 10.0, "w0")
    shares.charge("a", 25.0, "w0")
    assert account.value == 25.0
    shares.close("a", "w0", virtual, used_tokens=25.0)
    assert account.value == 25.0


def test_counters_restored_late_keep_what_was_charged_since() -> None:
    shares = FairShares()
    account = shares.enter("a", 1.0)
    shares.charge("a", 5.0, "w0")
    shares.restore("a", 100.0)
    shares.charge("a", 5.0, "w0")
    shares.restore("a", 103.0)
    shares.restore("a", 90.0)
    assert account.value == 113.0


def test_tokens_of_a_tenant_of_unknown_weight_wait_for_it() -> None:
    shares = FairShares()
    shares.charge("a", 100.0, "w0")
    assert shares.enter("a", 10.0).value == 10.0


def test_who_returns_starts_with_the_least_and_never_below_what_the_least_was_served() -> None:
    shares = FairShares()
    account = shares.enter("a", 1.0)
    virtual = shares.advance(account, 100.0, "w0")
    assert shares.enter("b", 1.0).value == 100.0
    shares.close("a", "w0", virtual)
    assert shares.enter("c", 1.0).value == 0.0, "as the least is now"
    shares.charge("a", 50.0, "w0")
    shares.charge("c", 60.0, "w0")
    shares.leave(account)
    for tenant in ("b", "c"):
        left = shares.find(tenant)
        assert left is not None
        shares.leave(left)
    assert shares.enter("d", 1.0).value >= 60.0, "nobody waits, and what was served still counts"


def test_who_left_far_ahead_is_remembered_until_the_others_have_caught_up() -> None:
    shares = FairShares()
    account = shares.enter("ahead", 1.0)
    slow = shares.enter("slow", 1.0)
    shares.charge("ahead", 1000.0, "w0")
    shares.leave(account)
    for number in range(300):
        shares.leave(shares.enter(f"t{number}", 1.0))
    assert shares.find("ahead") is account
    shares.charge("slow", 2000.0, "w0")
    shares.leave(slow)
    for number in range(300):
        shares.leave(shares.enter(f"u{number}", 1.0))
    assert shares.find("ahead") is None


def test_tenants_that_come_once_are_forgotten() -> None:
    shares = FairShares()
    busy = shares.enter("busy", 1.0)
    for number in range(3000):
        account = shares.enter(f"t{number}", 1.0)
        virtual = shares.advance(account, 10.0, "w0")
        shares.leave(account)
        shares.charge(account.tenant, 10.0, "w0")
        shares.close(account.tenant, "w0", virtual, used_tokens=10.0)
        shares.charge("busy", 10.0, "w0")
    assert len(shares) < 200
    assert shares.find("busy") is busy


def test_accounts_are_bounded_even_when_each_is_ahead() -> None:
    shares = FairShares()
    for number in range(MAX_ACCOUNTS + 500):
        shares.charge(f"t{number}", 10.0, "w0")
    assert len(shares) <= MAX_ACCOUNTS + 1


def test_each_of_many_tenants_is_served_once_before_any_is_twice() -> None:
    rig = Rig()
    rig.add(*(Item(number, f"t{number % 4096}") for number in range(8192)))
    first = rig.serve(4096)
    assert len({item.tenant for item in first}) == 4096


def test_the_bound_adds_up() -> None:
    apart = granted_bound(sequence_tokens=100, estimate_tokens=10, window_tokens=50, weight=2)
    assert apart == 50 + 130 / 2
    bound = service_bound(
        sequence_tokens=100, in_flight_tokens=400, window_tokens=50, weight=2, estimate_tokens=10
    )
    assert bound == 2 * (apart + 200 + 200)
    assert (
        service_bound(
            sequence_tokens=1, in_flight_tokens=1, window_tokens=0, weight=1, failovers=3, unreported_tokens=5
        )
        == 2 * (1 + 18 + 1 + 1) + 15
    )


# --- under a new leader ---------------------------------------------------------------------------


Kind = type[FairShares]


class Leader:
    """What counts under a leader; a planted bug takes its place."""

    shares: Kind = FairShares


def told(shares: FairShares) -> FairShares:
    """The counters of a new leader, whose worker says what the old one told it."""
    found = type(shares)()
    for account in shares.accounts():
        found.restore(account.tenant, shares.exported_counter(account), floor=shares.floor)
    return found


def two_apart() -> FairShares:
    """``ahead`` had 1,000 tokens more than ``behind``; both wait."""
    shares = Leader.shares()
    shares.enter("ahead", 1.0)
    shares.enter("behind", 1.0)
    shares.charge("behind", 5000.0, "w0")
    shares.charge("ahead", 6000.0, "w0")
    shares.leave(shares.enter("anybody", 1.0))  # moves the floor
    return shares


def names(shares: FairShares) -> list[str]:
    return [account.tenant for account in shares.in_order()]


@pytest.mark.parametrize("first", ["ahead", "behind"])
@pytest.mark.parametrize("asked_first", [True, False])
def test_who_was_ahead_stays_ahead_by_as_much_whoever_asks_first(first: str, asked_first: bool) -> None:
    """Gateways ask a new leader again in any order, before or after the workers speak."""
    old = two_apart()
    new = Leader.shares() if asked_first else told(old)
    for tenant in (first, *({"ahead", "behind"} - {first})):
        new.enter(tenant, 1.0)
    if asked_first:
        for account in old.accounts():
            new.restore(account.tenant, old.exported_counter(account), floor=old.floor)
    assert names(new) == ["behind", "ahead"]
    ahead, behind = new.find("ahead"), new.find("behind")
    assert ahead is not None
    assert behind is not None
    assert ahead.value - behind.value == 1000.0


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_who_is_new_under_a_new_leader_starts_where_the_others_are(when: str) -> None:
    """Else it would be served alone until it had as much as they had in the whole life of the old leader."""
    old, new = two_apart(), Leader.shares()
    words = [(account.tenant, old.exported_counter(account)) for account in old.accounts()]
    if when == "before":
        new.enter("new", 1.0)
        new.charge("new", 10.0, "w0")
    for tenant, counter in words:
        new.restore(tenant, counter, floor=old.floor)
        if when == "between" and new.find("new") is None:
            new.enter("new", 1.0)
            new.charge("new", 10.0, "w0")
    if when == "after":
        new.enter("new", 1.0)
        new.charge("new", 10.0, "w0")
    found = new.find("new")
    assert found is not None
    assert found.value == 5010.0
    new.check_integrity()


def test_who_went_idle_under_the_old_leader_saves_nothing_up() -> None:
    old = Leader.shares()
    idle = old.enter("idle", 1.0)
    old.charge("idle", 100.0, "w0")
    old.leave(idle)
    busy = old.enter("busy", 1.0)
    old.charge("busy", 9000.0, "w0")
    old.leave(old.enter("anybody", 1.0))
    old.charge("idle", 10.0, "w0")  # its last sequences still run
    new = told(old)
    new.enter("busy", 1.0)
    assert new.enter("idle", 1.0).value == busy.value


def test_who_is_awaited_is_not_forgotten_among_many_and_all_are_bounded() -> None:
    old = two_apart()
    new = told(old)
    for number in range(300):
        new.leave(new.enter(f"t{number}", 1.0))
    assert new.enter("ahead", 1.0).value == 6000.0
    assert new.enter("behind", 1.0).value == 5000.0
    new.stop_waiting()
    for number in range(MAX_ACCOUNTS + 500):
        new.restore(f"u{number}", 10.0, floor=20.0)
    assert len(new) <= MAX_ACCOUNTS + 1


def test_who_does_not_ask_a_new_leader_for_long_returns_from_idle() -> None:
    new = told(two_apart())
    busy = new.enter("ahead", 1.0)
    new.stop_waiting()
    new.charge("ahead", 3000.0, "w0")
    assert new.enter("behind", 1.0).value == busy.value == 9000.0


class ForgetsFloor(FairShares):
    def restore(self, tenant: str, counter: float, *, floor: float = 0.0) -> None:
        super().restore(tenant, counter)


class LiftsAll(FairShares):
    """Takes whoever asks a new leader again for one that returns from idle."""

    def _start_value(self, account: Account) -> float:
        return max(self.floor, self._order[0][0]) if self._order else self.floor


class ForgetsAwaited(FairShares):
    def restore(self, tenant: str, counter: float, *, floor: float = 0.0) -> None:
        super().restore(tenant, counter, floor=floor)
        self._accounts.pop(tenant)


class AwaitsForever(FairShares):
    def stop_waiting(self) -> None: ...


class TellsSettled(FairShares):
    def exported_counter(self, account: Account) -> float:
        return account.settled


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (
            ForgetsFloor,
            lambda: test_who_is_new_under_a_new_leader_starts_where_the_others_are("before"),
        ),
        (
            LiftsAll,
            lambda: test_who_was_ahead_stays_ahead_by_as_much_whoever_asks_first("ahead", False),
        ),
        (ForgetsAwaited, test_who_is_awaited_is_not_forgotten_among_many_and_all_are_bounded),
        (AwaitsForever, test_who_does_not_ask_a_new_leader_for_long_returns_from_idle),
        (TellsSettled, test_who_went_idle_under_the_old_leader_saves_nothing_up),
    ],
    ids=lambda found: getattr(found, "__name__", ""),
)
def test_a_bug_planted_in_a_failover_is_caught(kind: Kind, test: Callable[[], None]) -> None:
    Leader.shares = kind
    try:
        with pytest.raises(AssertionError):
            test()
    finally:
        Leader.shares = FairShares
