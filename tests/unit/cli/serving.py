"""A control plane of the tests, told what to answer, behind the command line's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from fairway.cli.calls import admin_client
from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2_grpc


@asynccontextmanager
async def serving(
    service: controlplane_pb2_grpc.ControlPlaneServiceServicer, port: int = 0
) -> AsyncIterator[int]:
    """Yield the port of a server that answers with ``service``."""
    server = grpc.aio.server()
    controlplane_pb2_grpc.add_ControlPlaneServiceServicer_to_server(service, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@asynccontextmanager
async def admin_of(service: controlplane_pb2_grpc.ControlPlaneServiceServicer) -> AsyncIterator[AdminClient]:
    """Yield an open client of a server that answers with ``service``."""
    async with serving(service) as port, admin_client(f"127.0.0.1:{port}", admin_key="k") as admin:
        yield admin
