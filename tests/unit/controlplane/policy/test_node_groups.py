"""The planner keeps the nodes of a tenant to its deployments, and these to its nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.controlplane.policy.assign import Action, PutAssignment, Unplaced, plan
from services.core.records import Assignment, IsolationTier, Node, Worker, node_group
from tests.unit.controlplane.policy.test_assign import all_ready, apply, deployment, placed, worker

GROUPS = {
    "acme": node_group("acme", IsolationTier.DEDICATED),
    "beta": node_group("beta", IsolationTier.PARTITIONED),
    "tiny": node_group("tiny", IsolationTier.PACKED),
}


def test_a_dedicated_node_runs_only_deployments_of_its_tenant_and_they_run_nowhere_else() -> None:
    workers = [worker("w0"), worker("w1"), worker("s0", slice="1g.10gb"), worker("s1", slice="0.25")]
    nodes = [Node("w0", tenant="acme"), Node("s0", tenant="beta")]
    wanted = [
        deployment("shared", 4),
        deployment("acme-llm", 2, tenant="acme"),
        deployment("beta-llm", 1, tenant="beta"),
        deployment("tiny-llm", 1, tenant="tiny"),
    ]
    actions = plan(wanted, workers, nodes, [], groups=GROUPS)
    held = apply({}, actions)
    assert placed(held, "acme-llm") == ["w0"]
    assert placed(held, "beta-llm") == ["s0"]
    assert placed(held, "shared") == ["s1", "w1"], "nobody else's replica is on the nodes of a tenant"
    assert held["w0"].node_group == "dedicated/acme"
    assert held["s0"].node_group == "partitioned/beta"
    short = {one.deployment: one for one in actions if isinstance(one, Unplaced)}
    assert short["acme-llm"].missing == 1
    assert dict(short["acme-llm"].rejected)["w1"] == (
        "ISOLATION_UNAVAILABLE: is shared, the deployment's nodes are dedicated/acme"
    )
    assert dict(short["shared"].rejected)["w0"] == "assigned_to_a_tenant: is dedicated/acme"


def test_a_node_that_is_assigned_loses_the_replicas_of_others_at_once() -> None:
    workers = [worker("w0")]
    held = apply({}, plan([deployment("d")], workers, [], []))
    ready = all_ready(workers, held)
    actions = plan([deployment("d")], ready, [Node("w0", tenant="acme")], list(held.values()), groups=GROUPS)
    held = apply(held, actions)
    assert held["w0"].versions == ()
    assert held["w0"].node_group == "dedicated/acme"
    assert any(isinstance(one, Unplaced) for one in actions), "it waits for a shared node"
    back = apply(held, plan([deployment("d")], workers, [Node("w0")], list(held.values()), groups=GROUPS))
    assert placed(back, "d") == ["w0"]
    assert back["w0"].node_group == ""


@pytest.mark.parametrize("groups", [{}, {"acme": "dedicated/acme"}])
def test_a_lost_last_node_spills_nothing(groups: dict[str, str]) -> None:
    wanted = [deployment("acme-llm", tenant="acme")]
    lost = [Assignment("w0", node_group="dedicated/acme")]
    actions = plan(wanted, [worker("w1")], [Node("w0", tenant="acme")], lost, groups=groups)
    assert not [one for one in actions if isinstance(one, PutAssignment) and one.assignment.versions]
    assert [one.missing for one in actions if isinstance(one, Unplaced)] == [1]


TENANTS = st.sampled_from(["", "acme", "beta", "tiny"])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(TENANTS, st.sampled_from(["", "1g.10gb"]), st.booleans()), min_size=1, max_size=6),
    st.lists(st.tuples(TENANTS, st.integers(0, 3)), max_size=5),
    st.lists(TENANTS, min_size=6, max_size=6),
)
def test_whatever_is_assigned_no_plan_mixes_groups_and_a_second_plan_writes_nothing(
    fleet: list[tuple[str, str, bool]], wishes: list[tuple[str, int]], later: list[str]
) -> None:
    wanted = [deployment(f"d{i}", count, tenant=tenant) for i, (tenant, count) in enumerate(wishes)]
    workers = [worker(f"w{i}", slice=piece) for i, (_, piece, _) in enumerate(fleet)]
    held: dict[str, Assignment] = {}
    for tenants in ([tenant for tenant, _, _ in fleet], later):
        nodes = [Node(f"w{i}", tenant=tenants[i]) for i in range(len(fleet))]
        live = [
            one for one, (_, _, lives) in zip(workers, fleet, strict=True) if lives or tenants is not later
        ]
        held = apply(held, plan(wanted, live, nodes, list(held.values()), groups=GROUPS))
        check(held, nodes, live, wishes)
        again: tuple[Action, ...] = plan(wanted, live, nodes, list(held.values()), groups=GROUPS)
        assert not [one for one in again if isinstance(one, PutAssignment)]


def check(
    held: dict[str, Assignment], nodes: list[Node], live: list[Worker], wishes: list[tuple[str, int]]
) -> None:
    slices = {one.worker_id: one.slice for one in live}
    for node in nodes:
        found = held.get(node.worker_id)
        if found is None or node.worker_id not in slices:
            continue
        assert found.node_group == node.group(slices[node.worker_id])
        for version in found.versions:
            tenant = wishes[int(version.deployment[1:])][0]
            assert found.node_group == GROUPS.get(tenant, ""), "a replica on a node of another group"
