"""What a publisher may send to a registry: little stored does not claim much, and verification is bounded.

Beside every attack somebody else reads from the same registry all the while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from fairway.client.publish.publish import PublishRefused, publish
from fairway.formats.safetensors import MAX_TENSORS
from fairway.formats.version_files import FREE_BYTES, MAX_RATIO
from fairway.v1 import registry_pb2 as pb
from services.adapters.memory.store import MemoryStore
from services.core.errors import FailedPrecondition, InvalidInput, Unavailable
from services.core.manifest import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    Manifest,
    ManifestFile,
    sha256_of,
    weights_digest_of,
)
from services.registry.service import RegistryService
from services.registry.verification import MAX_WAITING
from services.rpc.convert.registry import manifest_to_proto
from services.rpc.status import from_rpc_error
from services.runtime.clock import SystemClock
from tests.support.memory_blobs import MemoryBlobs
from tests.support.registry import ADMIN, served
from tests.support.waiting import until

CLOCK = SystemClock()
GAP_S = 1.0


@asynccontextmanager
async def canary(service: RegistryService) -> AsyncIterator[None]:
    """Somebody reads from the registry; while a read waits, the process computes no longer than the bound.

    Processor time: what other processes take of a loaded machine is not the registry's.
    """
    worst_s, reads = 0.0, 0

    async def read() -> None:
        nonlocal worst_s, reads
        while True:
            start_s = time.process_time()
            await service.tags("m")
            await asyncio.sleep(0.002)
            worst_s, reads = max(worst_s, time.process_time() - start_s), reads + 1

    task = asyncio.create_task(read())
    await until(lambda: reads)
    try:
        yield
        before = reads
        await until(lambda: reads > max(2, before))
    finally:
        task.cancel()
        await asyncio.wait({task})
    assert reads > 2
    assert worst_s < GAP_S


async def store(service: RegistryService, data: bytes) -> tuple[str, ...]:
    """Return the chunks of a file, stored."""
    chunks = []
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        chunks.append(sha256_of(piece))

        async def pieces(piece: bytes = piece) -> AsyncIterator[bytes]:
            yield piece

        await service.upload(chunks[-1], len(piece), pieces())
    return tuple(chunks)


def manifest_of(*files: ManifestFile) -> Manifest:
    return Manifest(
        tuple(sorted(files, key=lambda file: file.path)),
        kind="fixed-cost",
        weights_digest=weights_digest_of(files),
    )


def tensor_file(tensors: int) -> bytes:
    """A true file of so many tensors of a byte."""
    lines = (b'"%d":{"dtype":"U8","shape":[],"data_offsets":[%d,%d]}' % (n, n, n + 1) for n in range(tensors))
    header = b"{" + b",".join(lines) + b"}"
    return len(header).to_bytes(8, "little") + header + b"\0" * tensors


@pytest.fixture
def service() -> RegistryService:
    return RegistryService(MemoryStore(CLOCK), MemoryBlobs(), CLOCK)


async def test_two_stored_chunks_cannot_claim_gigabytes(service: RegistryService) -> None:
    chunks = await store(service, b"\0" * CHUNK_BYTES) + await store(service, b"\1" * CHUNK_BYTES)
    many = chunks * 500
    claimed = ManifestFile("model.safetensors", CHUNK_BYTES * len(many), sha256_of(b"?"), many)
    async with canary(service):
        start_s = time.process_time()
        with pytest.raises(InvalidInput, match=f"of which {2 * CHUNK_BYTES} differ"):
            await service.create_version("m", manifest_of(claimed))
        assert time.process_time() - start_s < GAP_S, "it was read before it was refused"


async def test_a_chunk_counts_with_its_smallest_size() -> None:
    """A chunk that has one byte in one place counts as one byte everywhere."""
    short, long = sha256_of(b"x"), sha256_of(b"y")
    files = [
        ManifestFile(f"a{number:03}.txt", CHUNK_BYTES + 1, sha256_of(b"%d" % number), (short, long))
        for number in range(50)
    ]
    service = RegistryService(MemoryStore(CLOCK), MemoryBlobs(), CLOCK)
    with pytest.raises(InvalidInput, match=f"of which {CHUNK_BYTES + 1} differ"):
        await service.create_version("m", manifest_of(*files))


async def test_true_repetition_passes(service: RegistryService) -> None:
    """One file under four names, and padding."""
    data = tensor_file(3)
    chunks = await store(service, data)
    texts = await store(service, b" " * (2 * CHUNK_BYTES))
    files = [
        ManifestFile(f"copy{number}.safetensors", len(data), sha256_of(data), chunks)
        for number in range(MAX_RATIO)
    ]
    padded = ManifestFile("padding.txt", 2 * CHUNK_BYTES, sha256_of(b" " * (2 * CHUNK_BYTES)), texts)
    _, created = await service.create_version("m", manifest_of(*files, padded))
    assert created


async def test_the_publisher_refuses_repetition_before_a_byte_is_sent(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "tokenizer.model").open("wb") as stream:
        stream.write(b"\n")
        stream.truncate(FREE_BYTES + 10 * CHUNK_BYTES * MAX_RATIO)
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(PublishRefused, match="differ"):
            await publish(channel, folder, "m", metadata=ADMIN)


@pytest.mark.parametrize("tensors", [MAX_TENSORS + 1, 550_000])
async def test_a_header_of_too_many_tensors_is_refused_in_time(
    service: RegistryService, tensors: int
) -> None:
    data = tensor_file(tensors)
    chunks = await store(service, data)
    file = ManifestFile("model.safetensors", len(data), sha256_of(data), chunks)
    async with canary(service):
        start_s = time.process_time()
        with pytest.raises(InvalidInput, match=r"tensors|header claims"):
            await service.create_version("m", manifest_of(file))
        assert time.process_time() - start_s < 3.0


async def test_the_largest_header_that_passes_stalls_nobody(service: RegistryService) -> None:
    data = tensor_file(MAX_TENSORS)
    chunks = await store(service, data)
    file = ManifestFile("model.safetensors", len(data), sha256_of(data), chunks)
    async with canary(service):
        _, created = await service.create_version("m", manifest_of(file))
    assert created


async def test_a_manifest_of_all_chunks_there_may_be_stalls_nobody(service: RegistryService) -> None:
    chunks = tuple(sha256_of(b"%d" % number) for number in range(MAX_CHUNKS))
    file = ManifestFile("model.safetensors", CHUNK_BYTES * len(chunks), sha256_of(b"?"), chunks)
    manifest = manifest_of(file)
    async with canary(service):
        with pytest.raises(FailedPrecondition, match=f"{MAX_CHUNKS} of {MAX_CHUNKS} chunks are not stored"):
            await service.create_version("m", manifest)


class SlowBlobs(MemoryBlobs):
    """Answers a read once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = asyncio.Event()
        self.reading = 0

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        self.reading += 1
        await self.let_go.wait()
        async for piece in super().get(digest, offset_bytes):
            yield piece


async def test_one_publisher_does_not_hold_every_turn() -> None:
    blobs = SlowBlobs()
    service = RegistryService(MemoryStore(CLOCK), blobs, CLOCK)
    manifests = []
    for number in range(MAX_WAITING + 2):
        text = b"%d" % number
        (chunk,) = await store(service, text)
        manifests.append(manifest_of(ManifestFile("notes.txt", len(text), chunk, (chunk,))))
    greedy = [
        asyncio.create_task(service.create_version("m", manifest, publisher="greedy"))
        for manifest in manifests[:MAX_WAITING]
    ]
    await until(lambda: blobs.reading)
    await asyncio.sleep(0.2)
    assert blobs.reading == 1, "one at a time"
    with pytest.raises(Unavailable, match="are being verified"):
        await service.create_version("m", manifests[-2], publisher="greedy")
    other = asyncio.create_task(service.create_version("m", manifests[-1], publisher="other"))
    await until(lambda: blobs.reading == 2)  # another publisher has its turn at once
    blobs.let_go.set()
    assert (await other)[1]
    assert all(created for _, created in await asyncio.gather(*greedy))


async def test_the_refusal_over_the_wire_says_what_to_change() -> None:
    async with served(MemoryStore(CLOCK), MemoryBlobs(), CLOCK) as registry:
        chunks = (sha256_of(b"\0" * CHUNK_BYTES),) * 100
        file = ManifestFile("model.safetensors", CHUNK_BYTES * 100, sha256_of(b"?"), chunks)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry.stub.CreateVersion(
                pb.CreateVersionRequest(model="m", manifest=manifest_to_proto(manifest_of(file))),
                metadata=ADMIN,
                timeout=10,
            )
        error = from_rpc_error(caught.value)
        assert error.reason == "INVALID_INPUT"
        assert error.metadata["field"] == "manifest.files"
