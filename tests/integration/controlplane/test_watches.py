"""Watches: what is there, what changes, what cannot be read, and when a watch ends."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.core.errors import Unauthenticated
from services.core.records import ASSIGNMENTS, DEPLOYMENTS, TENANTS, WORKERS, Worker, tag_key
from services.ports.store import Put
from services.rpc.status import from_rpc_error
from tests.integration.controlplane.plane import ADMIN, Plane


async def test_watch_tells_what_is_there_then_changes_and_resumes(plane: Plane) -> None:
    await plane.tenant("acme")
    stream = plane.stub.WatchResources(
        pb.WatchResourcesRequest(kinds=[pb.RESOURCE_KIND_TENANT, pb.RESOURCE_KIND_KEY]),
        metadata=ADMIN,
        timeout=10,
    )
    first = await stream.read()
    assert isinstance(first, pb.WatchResourcesResponse)
    assert first.snapshot_end
    assert [change.tenant.metadata.name for change in first.changes] == ["acme"]
    await plane.put(WORKERS + "w0", Worker("w0", "x"))  # not asked for
    secret = (await plane.key("k", "acme")).secret
    await plane.call("DeleteKey", pb.DeleteKeyRequest(name="k"))
    told: list[pb.WatchResourcesResponse] = []
    while sum(len(batch.changes) for batch in told) < 2:
        batch = await stream.read()
        assert isinstance(batch, pb.WatchResourcesResponse)
        told.append(batch)
    changes = [change for batch in told for change in batch.changes]
    assert [(c.WhichOneof("resource"), c.key.metadata.name, c.deleted) for c in changes] == [
        ("key", "k", False),
        ("key", "k", True),
    ]
    assert secret.split("_")[2].encode() not in b"".join(batch.SerializeToString() for batch in told)
    stream.cancel()
    again = plane.stub.WatchResources(
        pb.WatchResourcesRequest(after_revision=first.revision), metadata=ADMIN, timeout=10
    )
    batch = await again.read()
    assert isinstance(batch, pb.WatchResourcesResponse)
    assert not batch.snapshot_end
    again.cancel()
    plane.store.compact(10**6)
    await plane.tenant("late")
    old = plane.stub.WatchResources(pb.WatchResourcesRequest(after_revision=1), metadata=ADMIN, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await old.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("method", "request_"),
    [("WatchResources", pb.WatchResourcesRequest()), ("WatchEvents", pb.WatchEventsRequest())],
)
async def test_a_watch_ends_with_the_key_that_opened_it(plane: Plane, method: str, request_: object) -> None:
    stream: Any = getattr(plane.stub, method)(request_, metadata=ADMIN, timeout=10)
    await stream.read()
    plane.revoked.add("admin")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await stream.read()
    assert isinstance(from_rpc_error(caught.value), Unauthenticated)


async def test_a_record_that_cannot_be_read_takes_no_other_with_it(plane: Plane) -> None:
    await plane.deployment("good")
    await plane.tenant("acme")
    await plane.put(WORKERS + "w0", Worker("w0", "x"))
    bad = [DEPLOYMENTS + "bad", TENANTS + "bad", WORKERS + "w1", ASSIGNMENTS + "w2", tag_key("tiny", "prod")]
    await plane.store.commit([Put(key, b"{") for key in bad])
    deployments = (await plane.call("ListDeployments", pb.ListDeploymentsRequest())).deployments  # type: ignore[attr-defined]
    assert [found.metadata.name for found in deployments] == ["good"]
    tenants = (await plane.call("ListTenants", pb.ListTenantsRequest())).tenants  # type: ignore[attr-defined]
    assert [found.metadata.name for found in tenants] == ["acme"]
    nodes = (await plane.call("ListNodes", pb.ListNodesRequest())).nodes  # type: ignore[attr-defined]
    states = [(found.metadata.name, found.state) for found in nodes]
    assert states == [
        ("w0", pb.NODE_STATE_LIVE),
        ("w1", pb.NODE_STATE_LOST),
        ("w2", pb.NODE_STATE_LOST),
    ]
    stream = plane.stub.WatchResources(pb.WatchResourcesRequest(), metadata=ADMIN, timeout=10)
    begun: Any = await stream.read()
    told = {change.WhichOneof("resource") for change in begun.changes}
    assert (begun.snapshot_end, told) == (True, {"deployment", "node", "tenant", "model_version"})
    stream.cancel()
