"""The baselines decide as their names say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.records import Priority
from services.scheduler.policy.placement.candidate import Candidate, PlaceQuery, demand_of
from services.scheduler.policy.placement.choose import Chosen, choose
from services.scheduler.policy.queue.fair_order import MICROSECONDS, OrderPolicy
from services.scheduler.policy.queue.fairness import FairShares
from services.scheduler.queue.rules import PRODUCTION
from services.scheduler.queue.waiting import QueuedPlacement
from services.scheduler.term import TermSettings
from simulator.lab import baselines

NAMES = ("a", "b", "c", "d")


def worker(name: str, *, room: int = 100_000, ahead: int = 0) -> Candidate:
    return Candidate(
        name,
        kv_tokens_total=100_000,
        kv_tokens_room=room,
        block_size=16,
        slots=8,
        max_model_len=16_384,
        queued_prefill_tokens=ahead,
    )


def place(settings: TermSettings, fleet: list[Candidate], *, cached: Mapping[str, int] | None = None) -> str:
    query = PlaceQuery(demand_of(1000, 100, 100))
    found = choose(query, fleet, settings.profile, Random(1), cached_tokens=cached or {})
    assert isinstance(found, Chosen)
    return found.worker_id


def test_round_robin_takes_turns() -> None:
    settings = baselines.round_robin()
    fleet = [worker(name) for name in NAMES]
    assert "".join(place(settings, fleet) for _ in range(10)) == "abcdabcdab"


def test_round_robin_passes_over_one_without_room_and_goes_on_behind_the_one_it_took() -> None:
    settings = baselines.round_robin()
    fleet = [worker(name) for name in NAMES]
    full = [worker(name, room=0 if name == "c" else 100_000) for name in NAMES]
    assert "".join(place(settings, fleet) for _ in range(2)) == "ab"
    assert place(settings, full) == "d"
    assert "".join(place(settings, fleet) for _ in range(4)) == "abcd"


def test_round_robin_does_not_look_at_load_or_cache() -> None:
    settings = baselines.round_robin()
    fleet = [worker("a", room=5000, ahead=1500), worker("b")]
    assert "".join(place(settings, fleet, cached={"a": 900}) for _ in range(4)) == "abab"


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        ([worker("a", room=40_000), worker("b", room=60_000)], "b"),
        ([worker("a", ahead=1500), worker("b", ahead=100)], "b"),
    ],
)
def test_least_loaded_goes_where_the_room_is(fleet: list[Candidate], expected: str) -> None:
    assert place(baselines.least_loaded(), fleet, cached={"a": 900}) == expected


def test_prefix_only_follows_the_cache_whatever_the_load() -> None:
    fleet = [worker("a", room=5000, ahead=1500), worker("b"), worker("c", room=50_000)]
    assert place(baselines.prefix_only(), fleet, cached={"a": 640, "b": 576}) == "a"
    assert place(baselines.prefix_only(), fleet) == "b"


def test_first_come_changes_the_order_alone() -> None:
    ours, settings = baselines.ours(), baselines.first_come()
    assert settings == replace(ours, discipline=baselines.ARRIVAL)


def test_an_ablation_lacks_one_rule_and_nothing_else() -> None:
    for policy, rule in zip(baselines.ABLATIONS, PRODUCTION.rules, strict=True):
        settings = policy.settings()
        assert set(PRODUCTION.rules) - set(settings.discipline.rules) == {rule}
        assert replace(settings, discipline=PRODUCTION) == baselines.ours()


@dataclass(frozen=True, eq=False)
class Waiting:
    """A placement as the order reads it."""

    number: int
    priority: Priority
    arrival_us: int
    due_us: int = 0
    tenant: str = "acme"
    weight: float = 1.0


def arrival_order() -> baselines.ArrivalOrder:
    policy = OrderPolicy(class_head_start_s=30.0)
    return baselines.ArrivalOrder(policy, {priority: FairShares() for priority in Priority})


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(Priority), st.booleans()), max_size=40))
def test_the_order_of_arrival_is_that_of_a_sort(actions: list[tuple[int, Priority, bool]]) -> None:
    order = arrival_order()
    model: list[QueuedPlacement] = []
    for number, (arrival_s, priority, add) in enumerate(actions):
        if add or not model:
            item = cast(QueuedPlacement, Waiting(number, priority, arrival_s * MICROSECONDS))
            order.add(item)
            model.append(item)
        else:
            order.discard(model.pop(arrival_s % len(model)))
        model.sort(key=lambda each: (each.arrival_us - each.priority.rank * 30 * MICROSECONDS, each.number))
        assert list(order.in_order()) == model
        assert len(order) == len(model)


def test_the_item_yielded_last_may_be_discarded_meanwhile() -> None:
    order = arrival_order()
    for number in range(6):
        order.add(cast(QueuedPlacement, Waiting(number, Priority.STANDARD, 0)))
    seen = []
    for item in order.in_order():
        seen.append(item.number)
        if item.number % 2:
            order.discard(item)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [item.number for item in order.in_order()] == [0, 2, 4]


def test_every_run_takes_turns_from_its_own_start() -> None:
    fleet = [worker(name) for name in NAMES]
    assert place(baselines.round_robin(), fleet) == place(baselines.round_robin(), fleet) == "a"
    assert len({policy.name for policy in baselines.POLICIES}) == 5
