"""Rot in the blob store: never served, named clearly, healed by publishing again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from fairway.client.publish.publish import CHUNK_BYTES, PublishRefused
from fairway.v1 import registry_pb2 as pb
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.core.errors import IntegrityError, InvalidInput, NotFound
from services.core.manifest import Manifest, ManifestFile, sha256_of, weights_digest_of
from services.runtime.clock import SystemClock
from tests.integration.registry.harness import publish_any
from tests.support.model_folder import safetensors, write_model
from tests.support.registry import ADMIN, Served, served

CLOCK = SystemClock()


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(MemoryStore(CLOCK), FolderBlobs(tmp_path / "blobs"), CLOCK) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", weight_bytes=2 * CHUNK_BYTES + 5)


def blob(tmp_path: Path, digest: str) -> Path:
    return tmp_path / "blobs" / "sha256" / digest[7:9] / digest[7:]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])


async def fetch(registry: Served, tmp_path: Path, digest: str) -> Path:
    files = ModelFiles(registry.client, tmp_path / "cache", CLOCK, max_bytes=10**8)
    try:
        return await files.fetch("tiny", digest)
    finally:
        files.close()


@pytest.mark.parametrize("ruin", [flip, cut, Path.unlink])
@pytest.mark.parametrize("seen", [True, False])
async def test_a_ruined_chunk_is_healed_by_publishing_again(
    registry: Served, folder: Path, tmp_path: Path, ruin: object, seen: bool
) -> None:
    """Whether a worker met the damage before or nobody did."""
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    _, manifest = await registry.client.get_version("tiny", done.digest)
    weights = next(file for file in manifest.files if file.path == "model.safetensors")
    ruin(blob(tmp_path, weights.chunks[1]))  # type: ignore[operator]
    if seen:
        with pytest.raises((IntegrityError, NotFound), match="publish"):
            await fetch(registry, tmp_path, done.digest)
    again = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    assert (again.digest, again.created, again.uploaded_chunks) == (done.digest, False, 1)
    ready = await fetch(registry, tmp_path, done.digest)
    assert (ready / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("ruin", [flip, cut, Path.unlink])
async def test_a_ruined_manifest_is_healed_by_publishing_again(
    registry: Served, folder: Path, tmp_path: Path, ruin: object
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    ruin(blob(tmp_path, done.digest))  # type: ignore[operator]
    with pytest.raises(IntegrityError, match="publish the version again"):
        await registry.client.get_version("tiny", done.digest)
    again = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    assert (again.digest, again.created) == (done.digest, False)
    assert (await registry.client.get_version("tiny", done.digest))[0].digest == done.digest


async def test_a_chunk_is_resumed_by_readers_only_while_it_is_whole(
    registry: Served, folder: Path, tmp_path: Path
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    _, manifest = await registry.client.get_version("tiny", done.digest)
    chunk = next(file for file in manifest.files if file.path == "model.safetensors").chunks[0]
    whole = b"".join([piece async for piece in registry.client.download(chunk)])
    rest = b"".join([piece async for piece in registry.client.download(chunk, 1000)])
    assert rest == whole[1000:]
    flip(blob(tmp_path, chunk))
    with pytest.raises(IntegrityError):
        assert [piece async for piece in registry.client.download(chunk, 3_000_000)] == []


async def _send(registry: Served, data: bytes) -> None:
    async def messages() -> AsyncIterator[pb.UploadChunkRequest]:
        yield pb.UploadChunkRequest(header=pb.ChunkHeader(digest=sha256_of(data), size_bytes=len(data)))
        yield pb.UploadChunkRequest(data=data)

    await registry.stub.UploadChunk(messages(), metadata=ADMIN, timeout=10)


GOOD = safetensors(500)


@pytest.mark.parametrize(
    ("path", "data", "problem"),
    [
        ("notes.txt", b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00.", "pickled objects"),
        ("notes.txt", b"PK\x03\x04" + bytes(40), "zip"),
        ("a.safetensors", b"PK\x03\x04" + bytes(40), "claims"),
        ("a.safetensors", GOOD[:-1], "truncated"),
        ("a.safetensors", GOOD + b"x", "follow its last tensor"),
        ("tokenizer.json", b"{", "not JSON"),
        ("engine_limits.json", b'{"max_sequences": "many"}', "engine limits"),
    ],
)
async def test_a_publisher_that_checks_nothing_is_refused_by_the_registry(
    registry: Served, path: str, data: bytes, problem: str
) -> None:
    """The registry reads what it makes a version of; it does not trust the other side's checks."""
    for body in (b"{}", data):
        await _send(registry, body)
    files = tuple(
        sorted(
            (ManifestFile(name, len(body), sha256_of(body), (sha256_of(body),)) for name, body in
             (("config.json", b"{}"), (path, data))),
            key=lambda file: file.path,
        )
    )  # fmt: skip
    pins = {"tokenizer.json": "tokenizer_digest", "engine_limits.json": "engine_limits_digest"}
    manifest = Manifest(files, weights_digest=weights_digest_of(files))
    if path in pins:
        manifest = replace(manifest, **{pins[path]: sha256_of(data)})  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=problem):
        await registry.service.create_version("tiny", manifest)
    assert await registry.service.list_models() == ((), "")


async def test_a_folder_that_changes_while_it_is_published_makes_no_version(
    registry: Served, folder: Path
) -> None:
    def change(progress: object) -> None:
        if getattr(progress, "phase", "") == "upload":
            (folder / "tokenizer.json").write_text('{"version": "9.9"}')

    with pytest.raises(PublishRefused, match=r"tokenizer\.json changed while") as caught:
        await publish_any(registry.channel, folder, "tiny", "", change, metadata=ADMIN)
    assert caught.value.next_step
    assert await registry.service.list_models() == ((), "")
    assert (await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)).created
