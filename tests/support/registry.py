"""A registry for tests: the real service and server on loopback, on any blob store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc

from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc
from services.adapters.grpc.registry_client import RegistryClient
from services.core.errors import Unauthenticated
from services.core.generation import Principal
from services.core.records import KeyRole
from services.ports.blob_store import BlobStore
from services.ports.clock import Clock
from services.ports.store import Store
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from services.rpc.channel import auth_metadata, open_channel
from services.rpc.server import RpcServer, RpcService

TOKEN: Final = "t" * 40
ADMIN: Final = auth_metadata("admin")


@dataclass(frozen=True, slots=True)
class Served:
    service: RegistryService
    servicer: RegistryServicer
    channel: grpc.aio.Channel
    address: str
    server: RpcServer

    @property
    def stub(self) -> registry_pb2_grpc.RegistryServiceAsyncStub:
        return registry_pb2_grpc.RegistryServiceStub(self.channel)

    @property
    def client(self) -> RegistryClient:
        return RegistryClient(lambda: self.channel, TOKEN)


@asynccontextmanager
async def served(
    store: Store,
    blobs: BlobStore,
    clock: Clock,
    *,
    make_servicer: Callable[[RegistryService], RegistryServicer] = RegistryServicer,
) -> AsyncIterator[Served]:
    """Yield a running registry; the admin's key is "admin", the services' is ``TOKEN``."""
    service = RegistryService(store, blobs, clock)
    servicer = make_servicer(service)
    server = RpcServer(
        [
            RpcService(
                pb.DESCRIPTOR.services_by_name["RegistryService"],
                registry_pb2_grpc.add_RegistryServiceServicer_to_server,
                servicer,
            )
        ],
        listen="127.0.0.1:0",
        internal_token=TOKEN,
        new_incident=lambda: "inc",
        authenticate=authenticate,
    )
    await server.start()
    channel = open_channel(f"127.0.0.1:{server.port}")
    try:
        yield Served(service, servicer, channel, f"127.0.0.1:{server.port}", server)
    finally:
        await channel.close()
        await server.stop(0)


def authenticate(credentials: str | None) -> Principal:
    """Take the key "admin" and no other."""
    if credentials is None or not credentials.endswith("admin"):
        raise Unauthenticated("no")
    return Principal("admin", KeyRole.ADMIN)
