"""Chunks that are sent while connections break."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from fairway.client.errors import STATUS_LOST
from fairway.client.publish.publish import Chunk, Transfer
from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc

DATA = b"weights"
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()

Breaking = Callable[["Registry", "Call"], Awaitable[None]]


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

    def UploadChunk(self, **_: object) -> Call:
        self.uploads += 1
        return Call(self, self._breaks.pop(0) if self._breaks else None)


class Call:
    """What grpc.aio returns for a stream of requests: written to, then awaited."""

    def __init__(self, registry: Registry, breaks: Breaking | None) -> None:
        self.data = b""
        self.error: grpc.aio.AioRpcError | None = None
        self._registry = registry
        self._breaks = breaks
        self._noted: Callable[[Call], None] | None = None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._noted = callback

    async def write(self, message: pb.UploadChunkRequest) -> None:
        self.data += message.data

    async def done_writing(self) -> None:
        if self._breaks is not None:
            await self._breaks(self._registry, self)
        self._registry.stored.add(self.data)

    def cancel(self) -> bool:
        return True

    def __await__(self) -> Generator[Any, None, pb.UploadChunkResponse]:
        if self.error is not None:
            raise self.error
        return pb.UploadChunkResponse(digest=DIGEST)
        yield

    def ends(self, code: grpc.StatusCode, details: str = "") -> None:
        """The server's status arrives."""
        self.error = failure(code, details)
        assert self._noted is not None
        self._noted(self)

    def write_fails(self) -> grpc.aio.AioRpcError:
        """Return what the write raises. grpc.aio then reports the same as the status of the call."""
        self.error = failure(grpc.StatusCode.INTERNAL, STATUS_LOST)
        return self.error

    async def code(self) -> grpc.StatusCode:
        assert self.error is not None
        return self.error.code()

    async def details(self) -> str | None:
        assert self.error is not None
        return self.error.details()

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()


def failure(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


async def breaks_off(registry: Registry, call: Call) -> None:
    """No status arrives: the write fails first."""
    raise call.write_fails()


async def stores_and_breaks_off(registry: Registry, call: Call) -> None:
    registry.stored.add(call.data)
    raise call.write_fails()


async def refuses(registry: Registry, call: Call) -> None:
    """The server's status arrives, then the write that was under way fails."""
    call.ends(grpc.StatusCode.PERMISSION_DENIED, "not yours")
    raise call.write_fails()


async def stores_early(registry: Registry, call: Call) -> None:
    """Another publisher was faster: the server ends the call well, and the write fails."""
    registry.stored.add(call.data)
    call.ends(grpc.StatusCode.OK)
    raise call.write_fails()


async def hangs(registry: Registry, call: Call) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def chunks(tmp_path: Path) -> dict[str, Chunk]:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    return {DIGEST: Chunk(path, 0, len(DATA))}


def transfer_to(registry: Registry, told: list[int]) -> Transfer:
    stub = cast("registry_pb2_grpc.RegistryServiceAsyncStub", cast("Any", registry))
    return Transfer(stub, (), sent=told.append)


async def test_a_call_without_a_status_is_made_again(chunks: dict[str, Chunk]) -> None:
    registry, told = Registry(breaks_off), list[int]()
    await transfer_to(registry, told).upload(chunks)
    assert registry.stored == {DATA}
    assert registry.uploads == 2
    assert sum(told) == len(DATA)


async def test_a_chunk_that_arrived_before_the_connection_broke_is_not_sent_again(
    chunks: dict[str, Chunk],
) -> None:
    registry, told = Registry(stores_and_breaks_off), list[int]()
    await transfer_to(registry, told).upload(chunks)
    assert registry.uploads == 1
    assert sum(told) == len(DATA)


async def test_the_servers_status_is_raised_when_a_write_fails_after_it(chunks: dict[str, Chunk]) -> None:
    registry, told = Registry(refuses), list[int]()
    with pytest.raises(grpc.aio.AioRpcError, match="not yours") as caught:
        await transfer_to(registry, told).upload(chunks)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert registry.uploads == 1
    assert sum(told) == 0


async def test_a_write_that_fails_after_the_call_ended_well_is_no_failure(chunks: dict[str, Chunk]) -> None:
    registry, told = Registry(stores_early), list[int]()
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
