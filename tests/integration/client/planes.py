"""Control planes and a registry of one fleet, for the tests of the operators' client: real, on one store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from fairway.client import AdminClient, ClientOptions, RetryPolicy
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.grpc.leader_calls import GrpcQueues
from services.adapters.links.scheduler_directory import SchedulerDirectory
from services.adapters.memory.store import MemoryStore
from services.controlplane.audit_reads import AuditReader
from services.controlplane.event_log import EventRecorder
from services.controlplane.objectives.servicer import SliListing
from services.controlplane.resources.accounts import Sealer
from services.controlplane.service import ControlPlaneService
from services.controlplane.servicer import ControlPlaneServicer
from services.core.errors import Unauthenticated
from services.core.generation import Principal
from services.core.records import KeyRole, dump
from services.ports.store import Put
from services.rpc.server import RpcServer, RpcService, ServerTls
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from simulator.stores.limiter import MemoryLimiter
from tests.support.memory_ledger import MemoryLedger
from tests.support.no_plane import NoPlane
from tests.support.registry import TOKEN, served
from tests.support.slis import Measurements

CLOCK = SystemClock()
QUICK = RetryPolicy(first_delay_s=0.01, max_delay_s=0.05)


class Servicer(ControlPlaneServicer):
    """The real one. ``lost``: how many answers to these methods do not arrive; ``frozen``: none does."""

    def __init__(self, store: MemoryStore, measured: Measurements) -> None:
        queues = GrpcQueues(SchedulerDirectory(store, CLOCK), TOKEN, CLOCK, timeout_s=0.2)
        service = ControlPlaneService(store, CLOCK, Sealer(b"k" * 32), MemoryLimiter(CLOCK))
        slis = SliListing(measured.store, NoPlane())
        audit = AuditReader(store, MemoryLedger())
        super().__init__(
            service,
            store,
            queues,
            NoPlane(),
            slis,
            *[NoPlane()] * 3,
            audit=audit,
            require_current=lambda _: None,
        )
        self.lost: dict[str, int] = {}
        self.frozen = False
        self.held = 0
        self.resumed: list[int] = []

    async def CreateKey(self, request: Any, context: Any) -> Any:
        return await self._maybe("CreateKey", await super().CreateKey(request, context), context)

    async def RotateKey(self, request: Any, context: Any) -> Any:
        return await self._maybe("RotateKey", await super().RotateKey(request, context), context)

    async def UpdateTenant(self, request: Any, context: Any) -> Any:
        return await self._maybe("UpdateTenant", await super().UpdateTenant(request, context), context)

    async def ListTenants(self, request: Any, context: Any) -> Any:
        return await self._maybe("ListTenants", await super().ListTenants(request, context), context)

    async def WatchResources(self, request: Any, context: Any) -> Any:
        self.resumed.append(request.after_revision)
        await self._hold()
        await super().WatchResources(request, context)

    async def _hold(self) -> None:
        if self.frozen:
            self.held += 1
            await asyncio.Event().wait()

    async def _maybe(self, method: str, answer: Any, context: Any) -> Any:
        await self._hold()
        if self.lost.get(method, 0):
            self.lost[method] -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return answer


class Plane:
    """One control plane, which may be stopped and started again at its port."""

    def __init__(self, store: MemoryStore, measured: Measurements) -> None:
        self.servicer = Servicer(store, measured)
        self.port = 0
        self.tls: ServerTls | None = None
        self._server: RpcServer | None = None
        self._guarding: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = RpcServer(
            [
                RpcService(
                    cp.DESCRIPTOR.services_by_name["ControlPlaneService"],
                    controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server,
                    self.servicer,
                )
            ],
            listen=f"127.0.0.1:{self.port}",
            internal_token=TOKEN,
            new_incident=lambda: "inc",
            authenticate=_authenticate,
            tls=self.tls,
        )
        await self._server.start()
        self._guarding = asyncio.create_task(self._server.guard_connections(CLOCK))
        self.port = self._server.port

    async def stop(self) -> None:
        if self._guarding is not None:
            self._guarding.cancel()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None


@dataclass(frozen=True, slots=True)
class Fleet:
    store: MemoryStore
    planes: tuple[Plane, Plane]
    registry: str
    measured: Measurements

    def client(self, *, timeout_s: float = 20.0, **options: Any) -> AdminClient:
        found = ClientOptions(timeout_s=timeout_s, **{"retry": QUICK, **options})
        addresses = [plane.address for plane in self.planes]
        return AdminClient(addresses, admin_key="admin", registry=self.registry, options=found)

    async def put(self, key: str, record: object) -> None:
        await self.store.commit([Put(key, dump(record))])


@asynccontextmanager
async def fleet(blobs: Any) -> AsyncIterator[Fleet]:
    store = MemoryStore(CLOCK, bookmark_s=0.2)
    supervisor, measured = Supervisor(CLOCK), Measurements(CLOCK)
    planes = Plane(store, measured), Plane(store, measured)
    await measured.start(supervisor)
    async with served(store, FolderBlobs(blobs), CLOCK) as registry:
        for plane in planes:
            await plane.start()
        supervisor.spawn("recorder", EventRecorder(store, CLOCK).run())
        try:
            yield Fleet(store, planes, registry.address, measured)
        finally:
            for plane in planes:
                await plane.stop()
            await supervisor.close()


def _authenticate(credentials: str | None) -> Principal:
    if credentials is None or not credentials.endswith("admin"):
        raise Unauthenticated("no")
    return Principal("admin", KeyRole.ADMIN)
