from __future__ import annotations

from collections.abc import AsyncIterator

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
from services.core.records import Tag, VersionRecord, dump, tag_key, version_key
from services.ports.store import Put
from services.rpc.channel import open_channel
from services.rpc.server import RpcServer, RpcService
from simulator.stores.limiter import MemoryLimiter
from tests.integration.controlplane.plane import DIGEST, OTHER, SEALER, Plane, TurnedClock
from tests.support.memory_ledger import MemoryLedger
from tests.support.registry import TOKEN, authenticate
from tests.support.slis import NoSlis
from tests.support.usage_ledgers import NoUsage


@pytest_asyncio.fixture
async def plane() -> AsyncIterator[Plane]:
    clock = TurnedClock()
    store = MemoryStore(clock, bookmark_s=0.2)
    for digest in (DIGEST, OTHER):
        record = VersionRecord("tiny", digest, 1, 0.0)
        await store.commit([Put(version_key("tiny", digest), dump(record))])
    await store.commit([Put(tag_key("tiny", "prod"), dump(Tag("tiny", "prod", DIGEST)))])
    revoked: set[str] = set()
    limiter = MemoryLimiter(clock)

    def require_current(who: Principal) -> None:
        if who.key_id in revoked:
            raise Unauthenticated("the API key is not valid any more")

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
                    NoUsage(),
                    NoSlis(),
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
    yield Plane(store, clock, controlplane_pb2_grpc.ControlPlaneServiceStub(channel), revoked, limiter)
    await channel.close()
    await server.stop(0)
