"""How many nodes are kept without a replica, and when they are ordered and released."""

from __future__ import annotations

from typing import Any

import pytest

from services.controlplane.scaling.policy.nodes import (
    MissingReplicas,
    NodeLimits,
    NodeSituation,
    plan_nodes,
    warm_nodes,
)
from services.controlplane.scaling.policy.scaler import PoolScaler, ReplicaBounds, ScalerTuning, Supply
from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import Priority
from services.core.scaling import NodeOrder, OrderState
from services.ports.nodes import ProvidedNode

LIMITS = NodeLimits(idle_s=60.0)


@pytest.mark.parametrize(
    ("busy", "variance", "warm"),
    [
        (0, 9.0, 0),
        (1, 0.0, 0),
        (1, 0.01, 1),
        (5, 9.0, 1),
        (10, 0.0, 1),
        (10, 9.0, 2),
        (30, 1.0, 3),
        (30, 4.0, 5),
    ],
)
def test_the_pool_follows_the_growth_between_its_bounds(busy: int, variance: float, warm: int) -> None:
    assert warm_nodes(busy, variance, LIMITS) == warm


def running(name: str) -> NodeOrder:
    return NodeOrder(f"order-{name}", 0.0, state=OrderState.RUNNING, node=name)


def situation(nodes: str, idle: str, **fields: Any) -> NodeSituation:
    values: dict[str, Any] = {"needs": [], "warm": 1, **fields}
    return NodeSituation(
        [running(name) for name in nodes],
        [ProvidedNode(f"order-{name}", name) for name in nodes],
        {*nodes},
        {name: float(position) for position, name in enumerate(idle)},
        values["needs"],
        values["warm"],
        1000.0,
        1000.0,
    )


def test_the_pool_is_kept_and_the_rest_leaves_after_its_time() -> None:
    plan = plan_nodes(situation("abc", "bc"), LIMITS, "new")
    assert [(one.node, one.state) for one in plan.stored] == [("b", OrderState.LEAVING)], "idle the longest"
    assert plan_nodes(situation("abc", "c"), LIMITS, "new").stored == ()
    plan = plan_nodes(situation("abc", "bc", warm=0), LIMITS, "new")
    assert [one.node for one in plan.stored] == ["b", "c"]


def test_what_the_pool_lacks_is_ordered_once() -> None:
    plan = plan_nodes(situation("ab", ""), LIMITS, "new")
    assert [(one.order_id, one.reason) for one in plan.placed] == [("new", "warm pool")]
    ordered = situation("ab", "")
    ordered = NodeSituation(
        [*ordered.orders, *plan.stored], ordered.provided, ordered.live, {}, [], 1, 1001.0, 1001.0
    )
    assert plan_nodes(ordered, LIMITS, "more").stored == ()


def test_a_replica_without_a_node_is_not_served_by_an_empty_node() -> None:
    plan = plan_nodes(situation("ab", "b", needs=[MissingReplicas("chat", 2, "big")]), LIMITS, "new")
    assert [(one.node_type, one.reason) for one in plan.placed] == [("big", "chat")]


def test_the_variance_is_that_of_the_growth_within_a_start() -> None:
    scaler = PoolScaler(ScalerTuning(rate_window_s=1.0, growth_window=4.0))
    supply, bounds = Supply(4, start_s=30.0), ReplicaBounds(most=9)
    arrived = 0.0

    def run(seconds: range, work_per_s: float) -> None:
        nonlocal arrived
        for second in seconds:
            arrived += work_per_s
            load = PoolLoad((ClassLoad(Priority.STANDARD, 10.0, arrived=arrived),), rate=10.0)
            scaler.decide(load, supply, bounds, float(second))

    run(range(301), 20.0)
    calm = scaler.growth_variance
    run(range(301, 361), 30.0)
    assert scaler.growth_variance - calm * (3 / 4) ** 2 == pytest.approx(0.25 * 0.75, rel=0.1)
    assert scaler.busy == pytest.approx(3.0, rel=0.01)
