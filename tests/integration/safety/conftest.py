"""Safety packs over a real etcd: registry, control plane, a leader's loops, and a gateway's packs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest_asyncio

from fairway.client.publish.publish import publish
from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.etcd.store import EtcdStore
from services.adapters.grpc.leader_calls import GrpcQueues
from services.adapters.model_files.cache import ModelFiles
from services.controlplane.audit_reads import AuditReader
from services.controlplane.event_log import EventRecorder
from services.controlplane.fleet import FleetRecord, decode
from services.controlplane.objectives.store import SliStore
from services.controlplane.reconciler import Reconciler
from services.controlplane.resources.accounts import Sealer
from services.controlplane.rollouts.controller import RolloutController
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.core.aliases import ALIASES, Alias
from services.core.generation import Principal
from services.core.records import (
    DEPLOYMENTS,
    ROOT,
    SCALED,
    TENANTS,
    WORKERS,
    Deployment,
    KeyRole,
    Leader,
    Tenant,
    Worker,
    dump,
    leader_key,
    load,
)
from services.core.rollouts.routes import ROUTES, ModelRoute
from services.core.scaling import Scaled
from services.gateway.catalog import ModelCatalog
from services.gateway.safety.packs import SafetyPacks
from services.gateway.splits import Splits
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.server import RpcServer, RpcService
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from services.runtime.fleet_state.informer import Informer
from services.runtime.fleet_state.leadership import Election
from simulator.stores.limiter import MemoryLimiter
from tests.integration.scheduler_fleet import TOKEN, StaticDirectory
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane
from tests.support.registry import ADMIN, Served, served
from tests.support.waiting import until

CLOCK = SystemClock()
KEY = leader_key("controlplane")


def policy(*phrases: str, action: str = "block") -> dict[str, Any]:
    """Return a pack that finds these phrases in one category."""
    return {"categories": {"bad": {"action": action}}, "lists": [{"category": "bad", "phrases": phrases}]}


@dataclass
class Installation:
    """Control plane, registry, and what a gateway has of safety packs."""

    store: EtcdStore
    store_address: str
    address: str  # the control plane's
    registry: Served
    stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub
    slis: SliStore
    catalog: ModelCatalog
    packs: SafetyPacks
    tenants: Informer[Tenant]
    folder: Path

    async def call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, metadata=auth_metadata("admin"), timeout=20.0)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc

    async def publish(self, content: Any, name: str = "strict", tag: str = "latest") -> str:
        """Publish a pack and return its digest."""
        file = self.folder / "policy.json"
        file.write_text(json.dumps(content))
        channel = self.registry.channel
        done = await publish(channel, file, name, tag, metadata=ADMIN, kind="safety-pack")
        return done.digest

    async def deploy(self, name: str = "strict", version: str = "latest", **fields: Any) -> pb.Deployment:
        wanted = pb.Deployment(metadata=pb.Metadata(name=name), model=name, version=version, **fields)
        answer = await self.call("CreateDeployment", pb.CreateDeploymentRequest(deployment=wanted))
        await until(lambda: DEPLOYMENTS + name in self.catalog._deployments.view)
        return answer.deployment  # type: ignore[no-any-return]

    async def tenant(self, name: str = "acme", pack: str = "strict", *, new: bool = True) -> Tenant:
        """Store a tenant with a safety pack, and return it as gateways have it."""
        tenant = pb.Tenant(metadata=pb.Metadata(name=name), safety_pack=pack)
        if new:
            await self.call("CreateTenant", pb.CreateTenantRequest(tenant=tenant))
        else:
            await self.call("UpdateTenant", pb.UpdateTenantRequest(tenant=tenant))

        def found() -> bool:
            held = self.tenants.view.get(TENANTS + name)
            return held is not None and held.record.safety_pack == pack

        await until(found)
        return self.tenants.view[TENANTS + name].record

    async def rollout(self, version: str, **fields: Any) -> pb.Rollout:
        arms = [pb.RolloutArm(name="canary", version=version)]
        wanted = pb.Rollout(metadata=pb.Metadata(name="r"), deployment="strict", arms=arms, **fields)
        return (await self.call("CreateRollout", pb.CreateRolloutRequest(rollout=wanted))).rollout  # type: ignore[no-any-return]

    async def phase(self, *phases: pb.RolloutPhase.ValueType) -> pb.Rollout:
        """Return the rollout once it is in one of the phases."""
        async with asyncio.timeout(20.0):
            while True:
                found = (await self.call("GetRollout", pb.GetRolloutRequest(name="r"))).rollout
                if found.phase in phases:
                    return found  # type: ignore[no-any-return]
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture
async def installation(own_etcd: Any, tmp_path: Path) -> AsyncIterator[Installation]:
    store = EtcdStore([own_etcd.address], CLOCK, progress_s=0.2)
    views = [_view(store, *each) for each in _VIEWS]
    deployments, workers, scaled, aliases, routes, tenants = views
    fleet: Informer[FleetRecord | None] = Informer(store, ROOT, decode, CLOCK)
    election = Election(store, KEY, dump(Leader("p", "")), 5, CLOCK)
    slis, events = SliStore(MemoryLedger(), CLOCK, election, dict), EventRecorder(store, CLOCK)
    loops = [
        *(view.run() for view in (*views, fleet)),
        election.run(),
        slis.run(),
        events.run(),
        Reconciler(store, fleet, election, CLOCK, events=events).run(),
        RolloutController(store, fleet, election, CLOCK, slis=slis).run(),
    ]
    tasks = [asyncio.ensure_future(one) for one in loops]
    server = _control_plane(store)
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    async with served(store, FolderBlobs(tmp_path / "blobs"), CLOCK) as registry:
        files = ModelFiles(registry.client, tmp_path / "files", CLOCK, max_bytes=1 << 26)
        texts: Any = None
        catalog = ModelCatalog(
            deployments,
            workers,
            files,
            CLOCK,
            texts=texts,
            splits=Splits(routes),
            scaled=scaled,
            sized=aliases,
        )
        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)
        packs = SafetyPacks(catalog, files, CLOCK)
        await until(lambda: slis.leads and events.revision > 0)
        addresses = own_etcd.address, f"127.0.0.1:{server.port}"
        yield Installation(store, *addresses, registry, stub, slis, catalog, packs, tenants, tmp_path)
        files.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await channel.close()
    await server.stop(0)
    await store.close()


_VIEWS: tuple[tuple[str, type[Any]], ...] = (
    (DEPLOYMENTS, Deployment),
    (WORKERS, Worker),
    (SCALED, Scaled),
    (ALIASES, Alias),
    (ROUTES, ModelRoute),
    (TENANTS, Tenant),
)


def _view(store: EtcdStore, prefix: str, kind: type[Any]) -> Informer[Any]:
    return Informer(store, prefix, lambda entry: load(entry.value, kind), CLOCK)


def _control_plane(store: EtcdStore) -> RpcServer:
    servicer = ControlPlaneServicer(
        ControlPlaneService(store, CLOCK, Sealer(b"k" * 32), MemoryLimiter(CLOCK)),
        store,
        GrpcQueues(StaticDirectory(), TOKEN, CLOCK, timeout_s=1.0),
        *[NoPlane()] * 5,
        audit=AuditReader(store, MemoryLedger()),
        require_current=lambda _: None,
    )
    return RpcServer(
        [
            RpcService(
                pb.DESCRIPTOR.services_by_name["ControlPlaneService"],
                controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
                servicer,
            )
        ],
        listen="127.0.0.1:0",
        internal_token=TOKEN,
        new_incident=lambda: "inc",
        authenticate=lambda _: Principal("admin", KeyRole.ADMIN),
    )
