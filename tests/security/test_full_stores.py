"""A process whose disk has only its reserve left: it serves, reports it, and refuses what would be stored."""

from __future__ import annotations

import asyncio
import hashlib
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc
from services.core.errors import StorageFull
from services.rpc.status import from_rpc_error
from tests.support.registry_process import RegistryProcess

CHUNK = b"weights"


def page(address: str, path: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}{path}", timeout=5) as answer:
        return str(answer.read().decode())


async def requests() -> AsyncIterator[pb.UploadChunkRequest]:
    digest = "sha256:" + hashlib.sha256(CHUNK).hexdigest()
    yield pb.UploadChunkRequest(header=pb.ChunkHeader(digest=digest, size_bytes=len(CHUNK)))
    yield pb.UploadChunkRequest(data=CHUNK)


async def test_a_disk_at_its_reserve_is_reported_and_takes_no_chunk(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    registry = RegistryProcess(tmp_path, etcd_endpoint, {"FAIRWAY_DISK_RESERVE_BYTES": str(2**60)})
    await registry.make_admin()
    try:
        await registry.start_beside()
        ready = await asyncio.to_thread(page, registry.metrics, "/readyz")
        assert ready.startswith("ready\nstorage: no room in state_dir: ")
        assert "delete files, add disk, or lower FAIRWAY_DISK_RESERVE_BYTES" in ready
        metrics = await asyncio.to_thread(page, registry.metrics, "/metrics")
        assert 'fairway_storage_reserve_reached{store="state_dir"} 1.0' in metrics
        assert 'fairway_storage_reserve_reached{store="etcd"} 0.0' in metrics
        async with grpc.aio.insecure_channel(registry.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            whole = await health.Check(health_pb2.HealthCheckRequest())
            storage = await health.Check(health_pb2.HealthCheckRequest(service="storage"))
            assert whole.status == health_pb2.HealthCheckResponse.SERVING
            assert storage.status == health_pb2.HealthCheckResponse.NOT_SERVING
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.UploadChunk(requests(), metadata=registry.admin, timeout=10)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(refused.value)
        assert isinstance(error, StorageFull)
        assert error.retry_after_s
        assert error.message.startswith("no room in state_dir: ")
        assert await asyncio.to_thread(registry.stop) == 0
    finally:
        registry.kill()
