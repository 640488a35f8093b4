"""Uploads of chunks: whole or not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from fairway.v1 import registry_pb2 as pb
from services.core.errors import FairwayError, IntegrityError, InvalidInput
from services.core.manifest import CHUNK_BYTES, sha256_of
from tests.integration.registry.harness import Registry, publish_any, upload
from tests.support.registry import ADMIN
from tests.support.waiting import until


@pytest.mark.parametrize(
    ("size", "parts", "error"),
    [
        (5, (b"hellO",), IntegrityError),  # a flipped bit
        (5, (b"hel",), IntegrityError),  # truncated
        (4, (b"hello",), IntegrityError),  # a size that lies low
        (6, (b"hello",), IntegrityError),  # a size that lies high
        (5, (b"hello", b"more"), IntegrityError),
        (5, (), IntegrityError),
        (0, (b"hello",), InvalidInput),
        (CHUNK_BYTES + 1, (b"hello",), InvalidInput),
        (5, (b"", b"hello"), InvalidInput),
    ],
)
async def test_upload_is_whole_or_not_there(
    registry: Registry, size: int, parts: tuple[bytes, ...], error: type[FairwayError]
) -> None:
    digest = sha256_of(b"hello")
    with pytest.raises(error):
        await upload(registry, digest, size, *parts)
    answer = await registry.stub.FindMissingChunks(
        pb.FindMissingChunksRequest(digests=[digest, digest]), metadata=ADMIN, timeout=5
    )
    assert list(answer.digests) == [digest]
    await upload(registry, digest, 5, b"he", b"llo")
    assert await registry.service.find_missing([digest]) == ()


async def test_upload_needs_its_header_first_and_once(registry: Registry) -> None:
    header = pb.UploadChunkRequest(header=pb.ChunkHeader(digest=sha256_of(b"x"), size_bytes=1))
    for messages in ([], [pb.UploadChunkRequest(data=b"x")], [header, header]):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry.stub.UploadChunk(iter(messages), metadata=ADMIN, timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_upload_killed_half_way_leaves_nothing_and_goes_through_later(
    registry: Registry, folder: Path
) -> None:
    data = (folder / "model.safetensors").read_bytes()[:CHUNK_BYTES]
    digest = sha256_of(data)
    started, unfinished = asyncio.Event(), registry.blobs_root / "unfinished"

    async def half() -> AsyncIterator[pb.UploadChunkRequest]:
        yield pb.UploadChunkRequest(header=pb.ChunkHeader(digest=digest, size_bytes=len(data)))
        yield pb.UploadChunkRequest(data=data[: 1024 * 1024])
        started.set()
        await asyncio.sleep(3600)

    call = registry.stub.UploadChunk(half(), metadata=ADMIN, timeout=30)
    await started.wait()
    await until(lambda: any(unfinished.iterdir()))
    call.cancel()
    await until(lambda: not any(unfinished.iterdir()))
    assert await registry.service.find_missing([digest]) == (digest,)
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    assert done.created
