from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest_asyncio

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.grpc.leader_calls import GrpcQueues
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.adapters.memory.store import MemoryStore
from services.controlplane.audit_reads import AuditReader
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.core.errors import Unauthenticated
from services.core.generation import Principal
from services.core.records import (
    KEYS,
    TENANTS,
    ApiKey,
    KeyRole,
    Tag,
    Tenant,
    VersionRecord,
    dump,
    load,
    tag_key,
    version_key,
)
from services.ports.store import Put
from services.rpc.channel import open_channel
from services.rpc.server import RpcServer, RpcService
from services.runtime.fleet_state.informer import Informer
from services.runtime.identity import KeyDirectory
from simulator.stores.limiter import MemoryLimiter
from tests.integration.controlplane.plane import DIGEST, OTHER, SEALER, Plane, ScriptedUsage, TurnedClock
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane
from tests.support.registry import TOKEN


@pytest_asyncio.fixture
async def plane() -> AsyncIterator[Plane]:
    clock = TurnedClock()
    store = MemoryStore(clock, bookmark_s=0.2)
    for digest in (DIGEST, OTHER):
        record = VersionRecord("tiny", digest, 1, 0.0)
        await store.commit([Put(version_key("tiny", digest), dump(record))])
    await store.commit([Put(tag_key("tiny", "prod"), dump(Tag("tiny", "prod", DIGEST)))])
    revoked: set[str] = set()
    limiter, usage = MemoryLimiter(clock), ScriptedUsage()

    def require_current(who: Principal) -> None:
        if who.key_id in revoked:
            raise Unauthenticated("the API key is not valid any more")

    def view(prefix: str, kind: type[Any]) -> Informer[Any]:
        return Informer(store, prefix, lambda entry: load(entry.value, kind), clock, rng=Random(0))

    views = view(KEYS, ApiKey), view(TENANTS, Tenant)
    directory = KeyDirectory(*views, clock)
    following = [asyncio.create_task(each.run()) for each in views]

    def authenticate(credentials: str | None) -> Principal:
        """Take the key "admin" and the keys that a test created."""
        if credentials == "admin":
            return Principal("admin", KeyRole.ADMIN)
        return directory.authenticate(credentials)

    queues = GrpcQueues(SchedulerDirectory(store, clock), TOKEN, clock, timeout_s=0.2)
    server = RpcServer(
        [
            RpcService(
                pb.DESCRIPTOR.services_by_name["ControlPlaneService"],
                controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
                ControlPlaneServicer(
                    ControlPlaneService(store, clock, SEALER, limiter),
                    store,
                    queues,
                    usage,
                    *[NoPlane()] * 4,
                    audit=AuditReader(store, MemoryLedger()),
                    require_current=require_current,
                ),
            )
        ],
        listen="127.0.0.1:0",
        internal_token=TOKEN,
        new_incident=lambda: "inc",
        authenticate=authenticate,
    )
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    yield Plane(store, clock, controlplane_pb2_grpc.ControlPlaneServiceStub(channel), revoked, limiter, usage)
    await channel.close()
    await server.stop(0)
    for task in following:
        task.cancel()
    await asyncio.wait(following)
