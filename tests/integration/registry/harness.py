"""A registry whose parts a test can reach, and the model files that a worker fetches from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from fairway.client.publish.publish import publish
from fairway.v1 import registry_pb2 as pb
from fairway.v1 import registry_pb2_grpc
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.core.errors import FairwayError, Unavailable
from services.core.manifest import Manifest, ManifestFile, sha256_of
from services.core.records import VersionRecord
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from tests.support.registry import ADMIN, Served

# The folders of these tests are no checkpoints.
publish_any = partial(publish, for_another_engine=True)
MAX_BYTES = 64 * 1024 * 1024


@dataclass
class Registry:
    """A registry in memory and a folder of blobs, served on loopback."""

    store: MemoryStore
    blobs: FolderBlobs
    blobs_root: Path
    servicer: Faltering
    served: Served

    @property
    def service(self) -> RegistryService:
        return self.served.service

    @property
    def channel(self) -> grpc.aio.Channel:
        return self.served.channel

    @property
    def address(self) -> str:
        return self.served.address

    @property
    def stub(self) -> registry_pb2_grpc.RegistryServiceAsyncStub:
        return self.served.stub

    @property
    def client(self) -> RegistryClient:
        return self.served.client

    def blob(self, digest: str) -> Path:
        name = digest.removeprefix("sha256:")
        return self.blobs_root / "sha256" / name[:2] / name


class Faltering(RegistryServicer):
    """Answers UNAVAILABLE to as many uploads as a test says."""

    falters = 0

    async def UploadChunk(self, request_iterator: Any, context: Any) -> pb.UploadChunkResponse:
        if self.falters:
            self.falters -= 1
            raise Unavailable("a moment")
        return await super().UploadChunk(request_iterator, context)


class Counting:
    """A VersionSource before the real client: counts, breaks, damages or stalls downloads."""

    def __init__(self, inner: RegistryClient) -> None:
        self.inner = inner
        self.downloads: list[tuple[str, int]] = []
        self.broken = 0
        self.error: type[FairwayError] = Unavailable
        self.flip: dict[str, int] = {}
        self.stop_after = -1
        self.stopped = asyncio.Event()

    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        return await self.inner.get_version(model, version)

    async def download(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        self.downloads.append((digest, offset_bytes))
        if len(self.downloads) == self.stop_after:
            self.stopped.set()
            await asyncio.sleep(3600)
        async with aclosing(self.inner.download(digest, offset_bytes)) as pieces:
            async for piece in pieces:
                if self.flip.get(digest, 0) > 0:
                    self.flip[digest] -= 1
                    piece = bytes([piece[0] ^ 1]) + piece[1:]
                yield piece
                if self.broken:
                    self.broken -= 1
                    raise self.error("cut")


def files(registry: Any, root: Path, **options: Any) -> ModelFiles:
    return ModelFiles(registry, root, SystemClock(), max_bytes=options.get("max_bytes", MAX_BYTES))


def same(left: Path, right: Path) -> bool:
    names = sorted(
        p.relative_to(left).as_posix() for p in left.rglob("*") if p.is_file() and ".cache" not in str(p)
    )
    assert names == sorted(p.relative_to(right).as_posix() for p in right.rglob("*") if p.is_file())
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


async def upload(registry: Registry, digest: str, size: int, *parts: bytes) -> None:
    async def messages() -> AsyncIterator[pb.UploadChunkRequest]:
        yield pb.UploadChunkRequest(header=pb.ChunkHeader(digest=digest, size_bytes=size))
        for part in parts:
            yield pb.UploadChunkRequest(data=part)

    try:
        await registry.stub.UploadChunk(messages(), metadata=ADMIN, timeout=10)
    except grpc.aio.AioRpcError as exc:
        raise from_rpc_error(exc) from exc


def manifest_of(*entries: ManifestFile, **fields: Any) -> Manifest:
    return Manifest(tuple(sorted(entries, key=lambda file: file.path)), **fields)


def file_of(path: str, data: bytes) -> ManifestFile:
    return ManifestFile(path, len(data), sha256_of(data), (sha256_of(data),) if data else ())


async def store_blobs(registry: Registry, *blobs: bytes) -> None:
    for data in blobs:
        await upload(registry, sha256_of(data), len(data), data)
