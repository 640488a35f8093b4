"""The standard health service of every role, with plain stubs and no credential."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc
from tests.support.stack import Stack, metadata


async def test_every_role_lists_its_services_without_a_credential(stack: Stack) -> None:
    addresses = {role: stack.endpoints[role] for role in ("grpc", "registry", "controlplane", "scheduler")}
    async with stack.channel(stack.endpoints["controlplane"]) as channel:
        nodes = await controlplane_pb2_grpc.ControlPlaneServiceStub(channel).ListNodes(
            cp.ListNodesRequest(), metadata=metadata(stack.endpoints["admin_key"]), timeout=5
        )
    addresses |= {node.metadata.name: node.address for node in nodes.nodes if node.address}
    assert len(addresses) == 6
    for role, address in addresses.items():
        is_gateway = address == stack.endpoints["grpc"]
        async with grpc.aio.insecure_channel(address) if is_gateway else stack.channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request: Any = health_pb2.HealthListRequest()  # type: ignore[attr-defined]
            statuses = (await stub.List(request, timeout=5)).statuses
            assert statuses[""].status == health_pb2.HealthCheckResponse.SERVING, role
            assert any(name.startswith("fairway.v1.") for name in statuses), role
    logs = [path.read_text(errors="replace") for path in (stack.state / "logs").rglob("*.log")]
    assert logs
    assert not any("/grpc.health.v1.Health/List" in log for log in logs), "nothing is logged for a probe"
