"""Nodes: cordoned, drained, given back."""

from __future__ import annotations

import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.core.errors import FailedPrecondition, NotFound
from services.core.records import WORKERS, Worker
from tests.integration.controlplane.plane import Plane


async def test_nodes_are_cordoned_drained_and_given_back(plane: Plane) -> None:
    with pytest.raises(NotFound):
        await plane.call("CordonNode", pb.CordonNodeRequest(name="w0"))
    await plane.put(WORKERS + "w0", Worker("w0", "127.0.0.1:9", zone="a", labels={"gpu": "x"}))
    steps = [
        ("CordonNode", pb.CordonNodeRequest(name="w0"), (True, False)),
        ("DrainNode", pb.DrainNodeRequest(name="w0"), (True, True)),
        ("CordonNode", pb.CordonNodeRequest(name="w0"), (True, True)),
        ("UncordonNode", pb.UncordonNodeRequest(name="w0"), (False, False)),
    ]
    for method, request, expected in steps:
        node = (await plane.call(method, request)).node  # type: ignore[attr-defined]
        assert (node.cordoned, node.draining) == expected
        assert (node.address, node.zone, dict(node.metadata.labels)) == ("127.0.0.1:9", "a", {"gpu": "x"})
    listed = await plane.call("ListNodes", pb.ListNodesRequest())
    assert [node.metadata.name for node in listed.nodes] == ["w0"]  # type: ignore[attr-defined]
    got = await plane.call("GetNode", pb.GetNodeRequest(name="w0"))
    assert got.node.incarnation > 0  # type: ignore[attr-defined]


async def test_a_node_is_assigned_to_a_tenant_whose_isolation_it_offers(plane: Plane) -> None:
    for name, isolation in (
        ("acme", pb.ISOLATION_DEDICATED),
        ("beta", pb.ISOLATION_PARTITIONED),
        ("c", pb.ISOLATION_PACKED),
    ):
        tenant = pb.Tenant(metadata=pb.Metadata(name=name), isolation=isolation)
        await plane.call("CreateTenant", pb.CreateTenantRequest(tenant=tenant))
    await plane.put(WORKERS + "w0", Worker("w0", "127.0.0.1:9"))
    await plane.put(WORKERS + "s0", Worker("s0", "127.0.0.1:9", slice="1g.10gb"))
    for name, wrong in (("w0", "beta"), ("s0", "acme"), ("w0", "c")):
        with pytest.raises(FailedPrecondition, match="--isolation"):
            await plane.call("AssignNode", pb.AssignNodeRequest(name=name, tenant=wrong))
    with pytest.raises(NotFound, match="there is no tenant nobody"):
        await plane.call("AssignNode", pb.AssignNodeRequest(name="w0", tenant="nobody"))
    for name, owner, piece in (("w0", "acme", ""), ("s0", "beta", "1g.10gb"), ("w0", "", "")):
        answer = await plane.call("AssignNode", pb.AssignNodeRequest(name=name, tenant=owner))
        assert (answer.node.tenant, answer.node.slice) == (owner, piece)  # type: ignore[attr-defined]
