"""Nodes whose provider announces their end: they leave at once, do not stay, and do not count as present."""

from __future__ import annotations

from dataclasses import replace

from services.controlplane.policy.assign import PutAssignment, plan
from services.controlplane.scaling.policy.nodes import (
    MissingReplicas,
    NodeLimits,
    NodePlan,
    NodeSituation,
    plan_nodes,
)
from services.core.records import AssignedVersion, Assignment, Deployment, Meta, Node, Worker
from services.core.scaling import NodeOrder, OrderState
from services.ports.nodes import ProvidedNode

RUNNING = NodeOrder("o1", 10.0, state=OrderState.RUNNING, node="spot-1")


def planned(order: NodeOrder, ending_in_s: float | None, *, missing: int, unix_s: float = 100.0) -> NodePlan:
    needs = [MissingReplicas("chat", missing)] if missing else []
    provided = [ProvidedNode("o1", "spot-1", ending_in_s=ending_in_s)]
    situation = NodeSituation([order], provided, {"spot-1"}, {}, needs, 0, unix_s, unix_s)
    return plan_nodes(situation, NodeLimits(most=1), "o2")


def test_an_announced_end_makes_a_node_leave_and_room_for_another() -> None:
    (leaves,) = planned(RUNNING, 30.0, missing=0).stored
    assert (leaves.state, leaves.ends_unix_s) == (OrderState.LEAVING, 130.0)
    after = planned(leaves, 29.0, missing=1, unix_s=101.0)
    assert [one.order_id for one in after.stored] == ["o2"]  # it neither stays nor counts
    assert planned(replace(leaves, ends_unix_s=0.0), None, missing=1).stored[0].state is OrderState.RUNNING


def test_the_first_announcement_holds() -> None:
    leaves = replace(RUNNING, state=OrderState.LEAVING, ends_unix_s=130.0)
    assert planned(leaves, 50.0, missing=0).stored == ()


def test_an_assignment_carries_the_end_of_its_node() -> None:
    deployment = Deployment(Meta("chat"), "m", "v", "sha256:1", 1)
    assigned = Assignment("w", (AssignedVersion("chat", "m", "sha256:1"),))
    node = Node("w", cordoned=True, draining=True, ends_unix_s=130.0)
    (put, _) = plan([deployment], [Worker("w", "h:1")], [node], [assigned])
    assert isinstance(put, PutAssignment)
    assert put.assignment == replace(assigned, ends_unix_s=130.0)  # nobody else can serve
    again = plan([deployment], [Worker("w", "h:1")], [node], [put.assignment])
    assert not any(isinstance(one, PutAssignment) for one in again)
