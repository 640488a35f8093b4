"""Orders of nodes: one for each need, none twice, failed ones later and later, empty nodes given back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest

from services.controlplane.scaling.policy.nodes import (
    MissingReplicas,
    NodeLimits,
    NodePlan,
    NodeSituation,
    plan_nodes,
)
from services.core.scaling import NodeOrder, OrderState
from services.ports.nodes import ProvidedNode

LIMITS = NodeLimits(most=3, order_s=100.0, idle_s=50.0)


@dataclass
class Rounds:
    """Rounds of a leader: what it stores is what the next one reads."""

    orders: dict[str, NodeOrder] = field(default_factory=dict)
    provided: dict[str, str] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    idle_since_s: dict[str, float] = field(default_factory=dict)
    missing: int = 0
    now_s: float = 1000.0
    made: int = 0
    placed: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def run(self, seconds: float = 1.0) -> NodePlan:
        plan = NodePlan()
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.made += 1
            plan = plan_nodes(
                NodeSituation(
                    tuple(self.orders.values()),
                    [ProvidedNode(order, node) for order, node in self.provided.items()],
                    self.live,
                    self.idle_since_s,
                    [MissingReplicas("chat", self.missing)] if self.missing else [],
                    0,
                    self.now_s,
                    self.now_s,
                ),
                LIMITS,
                f"o{self.made}",
            )
            self.orders |= {one.order_id: one for one in plan.stored}
            self.placed += [one.order_id for one in plan.placed]
            for one in plan.released:
                self.released.append(one.node)
                self.provided.pop(one.order_id, None)
                if one.state is OrderState.LEAVING:
                    ended = replace(one, state=OrderState.RELEASED, ended_unix_s=self.now_s)
                    self.orders[one.order_id] = ended
        return plan

    def arrive(self) -> None:
        """Every open order gets its node, which registers with nothing assigned."""
        for one in self.orders.values():
            if one.state is OrderState.ORDERED:
                self.provided[one.order_id] = node = f"node-{one.order_id}"
                self.live.add(node)
                self.idle_since_s[node] = self.now_s

    def states(self) -> list[OrderState]:
        return [one.state for one in self.orders.values()]


def test_a_need_is_ordered_once_and_placed_until_the_provider_lists_it() -> None:
    rounds = Rounds(missing=1)
    rounds.run(10)
    assert rounds.states() == [OrderState.ORDERED]
    assert rounds.placed == ["o1"] * 10, "with the same id"
    rounds.provided["o1"] = "node-1"
    rounds.run(10)
    assert len(rounds.placed) == 10
    rounds.live.add("node-1")
    rounds.missing = 0
    rounds.run()
    assert rounds.states() == [OrderState.RUNNING]


def test_an_empty_node_that_helped_nothing_is_followed_by_no_other() -> None:
    """A selector that no node has must not buy nodes without end."""
    rounds = Rounds(missing=1)
    rounds.run()
    rounds.arrive()
    rounds.run(40)
    assert rounds.states() == [OrderState.RUNNING]


def test_the_provider_has_no_more_nodes_than_the_limit() -> None:
    rounds = Rounds(missing=9)
    rounds.run(20)
    assert len(rounds.orders) == 3


def test_an_order_without_a_node_fails_and_the_next_is_made_later_each_time() -> None:
    rounds, times = Rounds(missing=1), list[float]()
    while len(rounds.orders) < 4:
        before = len(rounds.orders)
        rounds.run()
        if len(rounds.orders) > before:
            times.append(rounds.now_s)
    assert rounds.states() == [*[OrderState.FAILED] * 3, OrderState.ORDERED]
    gaps = [later - earlier - LIMITS.order_s for earlier, later in itertools.pairwise(times)]
    assert gaps == [pytest.approx(30.0, abs=2), pytest.approx(60.0, abs=2), pytest.approx(120.0, abs=2)]
    assert "the provider lists no node" in next(iter(rounds.orders.values())).reason


def test_a_node_that_never_registers_is_given_back() -> None:
    rounds = Rounds(missing=1)
    rounds.run()
    rounds.provided["o1"] = "node-1"
    rounds.run(101)
    assert rounds.orders["o1"].state is OrderState.FAILED
    assert rounds.released == ["node-1"]


def test_an_empty_node_leaves_after_a_while_and_only_when_nothing_is_missing() -> None:
    rounds = Rounds(missing=1)
    rounds.run()
    rounds.arrive()
    rounds.missing = 0
    rounds.run(48)
    assert rounds.released == []
    rounds.run(5)
    assert rounds.released == ["node-o1"]
    assert rounds.states() == [OrderState.RELEASED]


def test_a_node_that_leaves_stays_if_it_is_needed_again() -> None:
    leaving = NodeOrder("a", 1.0, state=OrderState.LEAVING, node="node-a")
    rounds = Rounds({"a": leaving}, {"a": "node-a"}, {"node-a"}, missing=1)
    rounds.run()
    assert rounds.states() == [OrderState.RUNNING], "and none is ordered"


def test_a_node_that_the_provider_took_away_has_failed() -> None:
    running = NodeOrder("a", 1.0, state=OrderState.RUNNING, node="node-a")
    rounds = Rounds({"a": running}, {}, set())
    rounds.run()
    assert rounds.states() == [OrderState.FAILED]


def test_an_order_whose_node_was_replaced_waits_for_the_new_one() -> None:
    running = NodeOrder("a", 1.0, state=OrderState.RUNNING, node="pod-1")
    rounds = Rounds({"a": running}, {"a": "pod-2"}, {"pod-1"})
    rounds.run()
    assert rounds.orders["a"] == running, "while the worker of before is registered"
    rounds.live.clear()
    rounds.missing = 1
    rounds.run()
    assert (rounds.orders["a"].state, rounds.orders["a"].node) == (OrderState.ORDERED, "pod-2")
    rounds.run(60)
    assert (list(rounds.orders), rounds.placed) == (["a"], []), "and no other is ordered"
    rounds.live.add("pod-2")
    rounds.run()
    assert (rounds.orders["a"].state, rounds.orders["a"].node) == (OrderState.RUNNING, "pod-2")


def test_a_leaving_node_that_was_replaced_is_released_under_its_new_name() -> None:
    leaving = NodeOrder("a", 1.0, state=OrderState.LEAVING, node="pod-1")
    rounds = Rounds({"a": leaving}, {"a": "pod-2"}, {"pod-1"}, {"pod-1": 1.0})
    rounds.run()
    assert rounds.released == ["pod-2"]


def test_a_failed_order_has_the_providers_reason() -> None:
    ordered = NodeOrder("a", 900.0)
    unschedulable = ProvidedNode("a", "pod-1", "Unschedulable: no GPU is free")
    plan = plan_nodes(
        NodeSituation([ordered], [unschedulable], set(), {}, [], 0, 1000.0, 1000.0), LIMITS, "b"
    )
    (failed,) = plan.stored
    why = "no node within 100 s: its node pod-1 did not register (Unschedulable: no GPU is free)"
    assert (failed.state, failed.reason) == (OrderState.FAILED, why)
    assert [one.node for one in plan.released] == ["pod-1"]
