"""A control plane over a store in memory, called through its gRPC stub."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.memory.store import MemoryStore
from services.controlplane.resources.accounts import Sealer
from services.core.manifest import sha256_of
from services.core.records import KEYS, ApiKey, dump, load
from services.ports.store import Put
from services.rpc.channel import auth_metadata
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from simulator.stores.limiter import MemoryLimiter

ADMIN = auth_metadata("admin")


SEALER = Sealer(b"k" * 32)


DIGEST, OTHER = sha256_of(b"1"), sha256_of(b"2")


class TurnedClock(SystemClock):
    """The real clock, ahead by what a test turned it."""

    ahead_s = 0.0

    def unix_s(self) -> float:
        return super().unix_s() + self.ahead_s

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


class ScriptedUsage:
    """Lists one record of the tenant asked for, and notes it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def page(self, request: pb.ListUsageRequest, *, forwarded: bool) -> pb.ListUsageResponse:
        self.asked.append(request.tenant)
        return pb.ListUsageResponse(records=[pb.UsageRecord(tenant=request.tenant)])


@dataclass
class Plane:
    store: MemoryStore
    clock: TurnedClock
    stub: controlplane_pb2_grpc.ControlPlaneServiceAsyncStub
    revoked: set[str]
    limiter: MemoryLimiter
    usage: ScriptedUsage

    async def call(self, method: str, request: object, *, key: str = "admin") -> object:
        try:
            return await getattr(self.stub, method)(request, metadata=auth_metadata(key), timeout=10)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc

    async def tenant(self, name: str, request_id: str = "", **fields: object) -> pb.Tenant:
        tenant = pb.Tenant(metadata=pb.Metadata(name=name), **fields)  # type: ignore[arg-type]
        answer = await self.call("CreateTenant", pb.CreateTenantRequest(tenant=tenant, request_id=request_id))
        assert isinstance(answer, pb.CreateTenantResponse)
        return answer.tenant

    async def key(
        self, name: str, tenant: str = "", request_id: str = "", **fields: object
    ) -> pb.CreateKeyResponse:
        role = pb.KEY_ROLE_TENANT if tenant else pb.KEY_ROLE_ADMIN
        key = pb.Key(metadata=pb.Metadata(name=name), role=role, tenant=tenant, **fields)  # type: ignore[arg-type]
        answer = await self.call("CreateKey", pb.CreateKeyRequest(key=key, request_id=request_id))
        assert isinstance(answer, pb.CreateKeyResponse)
        return answer

    async def deployment(
        self, name: str, version: str = "prod", request_id: str = "", **fields: object
    ) -> pb.Deployment:
        message = pb.Deployment(
            metadata=pb.Metadata(name=name),
            model="tiny",
            version=version,
            **{"replicas": 1, **fields},  # type: ignore[arg-type]
        )
        request = pb.CreateDeploymentRequest(deployment=message, request_id=request_id)
        answer = await self.call("CreateDeployment", request)
        assert isinstance(answer, pb.CreateDeploymentResponse)
        return answer.deployment

    async def budget(self, name: str, tenant: str = "acme", **fields: object) -> pb.Budget:
        budget = pb.Budget(
            metadata=pb.Metadata(name=name),
            tenant=tenant,
            **{"limit_micros": 10_000_000, **fields},  # type: ignore[arg-type]
        )
        answer = await self.call("CreateBudget", pb.CreateBudgetRequest(budget=budget))
        assert isinstance(answer, pb.CreateBudgetResponse)
        return answer.budget

    async def put(self, key: str, record: object) -> None:
        await self.store.commit([Put(key, dump(record))])

    async def stored_key(self, name: str) -> ApiKey:
        entry = await self.store.get(KEYS + name)
        assert entry is not None
        return load(entry.value, ApiKey)


class Interleaving(MemoryStore):
    """Lets a test act between the look at the keys and the deletion."""

    between = None

    async def commit(self, operations, conditions=()):  # type: ignore[no-untyped-def]
        if self.between is not None:
            act, self.between = self.between, None
            await act()
        return await super().commit(operations, conditions)
