"""What every ``VersionSource`` does: the registry in this process, and over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.memory.store import MemoryStore
from services.core.errors import IntegrityError, InvalidInput, NotFound, Unavailable
from services.core.manifest import Manifest, ManifestFile, canonical_json, digest_of, sha256_of
from services.ports.registry import VersionSource
from services.registry.service import RegistryService
from services.rpc.channel import open_channel
from services.runtime.clock import SystemClock
from tests.support.memory_blobs import MemoryBlobs
from tests.support.registry import TOKEN, served

CLOCK = SystemClock()
DATA = b'"' + b"x" * 1_000_000 + b'"'
CHUNK = sha256_of(DATA)
MANIFEST = Manifest((ManifestFile("config.json", len(DATA), CHUNK, (CHUNK,)),))


@dataclass(frozen=True, slots=True)
class Rig:
    source: VersionSource
    blobs: MemoryBlobs
    service: RegistryService

    async def read(self, digest: str, offset_bytes: int = 0) -> bytes:
        async with aclosing(self.source.download(digest, offset_bytes)) as pieces:
            return b"".join([piece async for piece in pieces])


@pytest.fixture(params=["grpc", "local"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    blobs = MemoryBlobs()
    async with served(MemoryStore(CLOCK), blobs, CLOCK) as running:
        source: VersionSource = running.client if request.param == "grpc" else running.service
        found = Rig(source, blobs, running.service)
        await running.service.upload(CHUNK, len(DATA), _pieces())
        await running.service.create_version("m", MANIFEST)
        await running.service.set_tag("m", "latest", digest_of(MANIFEST))
        yield found


async def _pieces() -> AsyncIterator[bytes]:
    for start in range(0, len(DATA), 100_000):
        yield DATA[start : start + 100_000]


@pytest.mark.parametrize("version", ["latest", digest_of(MANIFEST)])
async def test_a_version_is_found_by_tag_and_by_digest(rig: Rig, version: str) -> None:
    record, manifest = await rig.source.get_version("m", version)
    assert record.digest == digest_of(manifest) == digest_of(MANIFEST)
    assert manifest == MANIFEST
    assert (record.model, record.size_bytes) == ("m", len(DATA))
    assert record.create_unix_s > 0


@pytest.mark.parametrize("version", ["nightly", sha256_of(b"no version")])
@pytest.mark.parametrize("model", ["m", "other"])
async def test_what_is_not_there_is_said_so(rig: Rig, model: str, version: str) -> None:
    with pytest.raises(NotFound):
        await rig.source.get_version(model, version)


@pytest.mark.parametrize("version", ["../x", "sha256:ab", "Latest"])
async def test_what_is_no_version_is_refused(rig: Rig, version: str) -> None:
    with pytest.raises(InvalidInput):
        await rig.source.get_version("m", version)


@pytest.mark.parametrize("offset", [0, 1, 262_144, 999_999, len(DATA)])
async def test_a_chunk_comes_from_any_offset(rig: Rig, offset: int) -> None:
    assert await rig.read(CHUNK, offset) == DATA[offset:]


async def test_a_reader_may_stop_and_go_on_elsewhere(rig: Rig) -> None:
    async with aclosing(rig.source.download(CHUNK)) as pieces:
        first = await anext(pieces)
    assert first + await rig.read(CHUNK, len(first)) == DATA


async def test_a_chunk_that_is_not_stored_is_said_so(rig: Rig) -> None:
    with pytest.raises(NotFound):
        await rig.read(sha256_of(b"never stored"))


async def test_a_damaged_chunk_is_never_given_out(rig: Rig) -> None:
    rig.blobs._blobs[CHUNK] = DATA[:-2] + b'y"'
    with pytest.raises(IntegrityError):
        await rig.read(CHUNK)
    with pytest.raises(NotFound):
        await rig.read(CHUNK)


async def test_a_damaged_manifest_is_never_given_out(rig: Rig) -> None:
    rig.blobs._blobs[digest_of(MANIFEST)] = canonical_json(MANIFEST).replace(b"causal-lm", b"fixed-lm!")
    with pytest.raises(IntegrityError, match="publish"):
        await rig.source.get_version("m", "latest")


async def test_a_source_that_is_away_is_unavailable() -> None:
    """Over the wire only: in one process neither is without the other."""
    channel = open_channel("127.0.0.1:1")
    try:
        client = RegistryClient(lambda: channel, TOKEN)
        with pytest.raises(Unavailable):
            await client.get_version("m", "latest")
        with pytest.raises(Unavailable):
            await anext(client.download(CHUNK))
    finally:
        await channel.close()
