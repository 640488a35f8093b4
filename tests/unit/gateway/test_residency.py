"""What keeps a tenant's data in its region: the gateway, the deployment, and the last check of a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.core.errors import ResidencyUnavailable, Unauthenticated
from services.core.generation import NotAdmittedReason
from services.core.records import DEPLOYMENTS, TENANTS, WORKERS, Deployment, Meta, Tenant, Worker
from services.gateway.residency import ResidentWorkers
from services.runtime.identity import KeyDirectory

DIGEST = "sha256:" + "ab" * 32


class Sent:
    """Implements the workers and the sink of a test: what was sent, and what was answered."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.refused: list[NotAdmittedReason] = []

    def start(self, spec: Any, sink: Any) -> Any:
        self.sent.append(spec.grant.address)
        return self

    def start_row(self, address: str, spec: Any, sink: Any) -> Any:
        self.sent.append(address)
        return self

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self.refused.append(reason)


class Spec:
    """A sequence of a tenant under a grant."""

    def __init__(self, tenant_id: str, address: str) -> None:
        self.tenant_id = tenant_id
        self.grant = self
        self.address = address


@pytest.fixture
def regions(fleet: Any) -> Any:
    for name, region in (("berlin", "eu"), ("boston", "us"), ("free", "")):
        fleet.tenants.put(TENANTS + name, Tenant(Meta(name), residency=region))
    for name, labels in (("e", {"region": "eu"}), ("u", {"region": "us"}), ("n", {})):
        fleet.workers.put(WORKERS + name, Worker(name, f"{name}:1", labels=labels))
    return fleet


@pytest.mark.parametrize("face", ["sequence", "row"])
async def test_nothing_is_sent_to_a_worker_outside_of_the_region(regions: Any, face: str) -> None:
    workers: Any = Sent()
    resident = ResidentWorkers(workers, regions.workers, regions.identity.residency)

    def send(tenant: str, address: str) -> Any:
        spec: Any = Spec(tenant, address)
        return (
            resident.start(spec, workers)
            if face == "sequence"
            else resident.start_row(address, spec, workers)
        )

    for address in ("u:1", "n:1", "unknown:1"):
        send("berlin", address)
    cancelled = send("berlin", "u:1")
    cancelled.cancel()
    assert (workers.sent, workers.refused) == ([], []), "a sink is not called before its start returned"
    await asyncio.sleep(0)
    assert workers.refused == [NotAdmittedReason.DRAINING] * 3
    for tenant, address in (("berlin", "e:1"), ("boston", "u:1"), ("free", "n:1")):
        send(tenant, address)
    assert workers.sent == ["e:1", "u:1", "n:1"]


def test_a_gateway_serves_the_residents_of_its_region_alone(regions: Any) -> None:
    def directory(region: str | None) -> KeyDirectory:
        return KeyDirectory(regions.keys, regions.tenants, regions.clock, region=region)

    for region, served in (("eu", {"berlin", "free"}), ("us", {"boston", "free"}), ("", {"free"})):
        here = directory(region)
        for tenant in ("berlin", "boston", "free"):
            assert here.may_hold(tenant) == (tenant in served)
            if tenant in served:
                assert here.tenant(tenant).meta.name == tenant
            else:
                with pytest.raises(ResidencyUnavailable, match=f"use a gateway of {here.residency(tenant)}"):
                    here.tenant(tenant)
    assert directory(None).may_hold("berlin"), "a role that stores nothing of tenants serves all"
    with pytest.raises(Unauthenticated):
        directory("eu").tenant("nobody")


def test_a_deployment_that_may_run_elsewhere_is_refused_by_name(regions: Any) -> None:
    catalog = regions.catalog
    with pytest.raises(ResidencyUnavailable, match="selector region=eu") as refused:
        catalog.require_servable(catalog.resolve("chat-small"), "eu")
    assert refused.value.metadata == {"model": "chat-small", "residency": "eu"}
    catalog.require_servable(catalog.resolve("chat-small"))
    bound = Deployment(Meta("chat-small"), "tiny", "v1", DIGEST, 1, node_selector={"region": "eu"})
    regions.deployments.put(DEPLOYMENTS + "chat-small", bound)
    catalog.require_servable(catalog.resolve("chat-small"), "eu")
    with pytest.raises(ResidencyUnavailable):
        catalog.require_servable(catalog.resolve("chat-small"), "us")
