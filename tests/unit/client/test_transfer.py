"""Chunks that are sent while connections break."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from fairway.client.folder import Chunk
from fairway.client.transfer import Transfer
from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc

DATA = b"weights"
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()

Breaking = Callable[["Registry", bytes], Awaitable[None]]


class Registry:
    """As much of the stub as uploads use; ``breaks`` run one by one, each instead of an answer."""

    def __init__(self, *breaks: Breaking) -> None:
        self.stored: set[bytes] = set()
        self.uploads = 0
        self._breaks = list(breaks)

    async def FindMissingChunks(
        self, request: pb.FindMissingChunksRequest, **_: object
    ) -> pb.FindMissingChunksResponse:
        stored = {"sha256:" + hashlib.sha256(data).hexdigest() for data in self.stored}
        return pb.FindMissingChunksResponse(digests=[name for name in request.digests if name not in stored])

    async def UploadChunk(
        self, messages: AsyncIterator[pb.UploadChunkRequest], **_: object
    ) -> pb.UploadChunkResponse:
        self.uploads += 1
        data = b"".join([message.data async for message in messages])
        if self._breaks:
            await self._breaks.pop(0)(self, data)
        self.stored.add(data)
        return pb.UploadChunkResponse(digest=DIGEST)


async def cancels(registry: Registry, data: bytes) -> None:
    """What grpc.aio does with a call when a write of it fails."""
    raise asyncio.CancelledError


async def stores_and_cancels(registry: Registry, data: bytes) -> None:
    registry.stored.add(data)
    raise asyncio.CancelledError


async def hangs(registry: Registry, data: bytes) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def chunks(tmp_path: Path) -> dict[str, Chunk]:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    return {DIGEST: Chunk(path, 0, len(DATA))}


def transfer_to(registry: Registry, told: list[int]) -> Transfer:
    stub = cast("registry_pb2_grpc.RegistryServiceAsyncStub", cast("Any", registry))
    return Transfer(stub, (), sent=told.append)


async def test_a_call_that_a_failed_write_cancelled_is_made_again(chunks: dict[str, Chunk]) -> None:
    registry, told = Registry(cancels), list[int]()
    await transfer_to(registry, told).upload(chunks)
    assert registry.stored == {DATA}
    assert registry.uploads == 2
    assert sum(told) == len(DATA)


async def test_a_chunk_that_arrived_before_the_connection_broke_is_not_sent_again(
    chunks: dict[str, Chunk],
) -> None:
    registry, told = Registry(stores_and_cancels), list[int]()
    await transfer_to(registry, told).upload(chunks)
    assert registry.uploads == 1
    assert sum(told) == len(DATA)


async def test_a_caller_that_is_cancelled_ends_the_upload(chunks: dict[str, Chunk]) -> None:
    registry, told = Registry(hangs), list[int]()
    uploading = asyncio.ensure_future(transfer_to(registry, told).upload(chunks))
    while not registry.uploads:
        await asyncio.sleep(0)
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    assert not registry.stored
    assert registry.uploads == 1
    assert sum(told) == 0
