"""A worker's cache of model files when its disk is full, its bound too small, or another process has it."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from fairway.client.publish.publish import CHUNK_BYTES
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.core.errors import StoreUnavailable
from services.core.manifest import Manifest
from services.core.records import VersionRecord
from services.ports.registry import VersionSource
from services.runtime.clock import SystemClock
from tests.integration.registry.harness import publish_any
from tests.support.model_folder import write_model
from tests.support.registry import ADMIN, TOKEN, Served, served
from tests.support.tiny_disk import fill, tiny_disk

CLOCK = SystemClock()
MIB = 1024 * 1024


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(MemoryStore(CLOCK), FolderBlobs(tmp_path / "blobs"), CLOCK) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", weight_bytes=3 * CHUNK_BYTES)


def cache(source: VersionSource, root: Path, max_bytes: int = 10**9) -> ModelFiles:
    return ModelFiles(source, root, CLOCK, max_bytes=max_bytes)


def left(root: Path, *parts: str) -> list[Path]:
    return [path for part in parts for path in (root / part).rglob("*") if path.is_file()]


async def assert_sound(files: ModelFiles, root: Path) -> None:
    files.check_integrity()
    assert files.kept_bytes == 0
    assert left(root, "partial", "ready") == []
    assert [path for path in (root / "manifests").iterdir() if path.suffix != ".json"] == []


class Fills(VersionSource):
    """Somebody else fills the disk while the second chunk of the weights is on its way."""

    def __init__(self, inner: RegistryClient, disk: Path) -> None:
        self._inner = inner
        self._disk = disk
        self._chunks = 0
        self.filler: Path | None = None

    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        return await self._inner.get_version(model, version)

    async def download(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        self._chunks += 1
        if self._chunks == 7 and self.filler is None:
            self.filler = await asyncio.to_thread(fill, self._disk)
        async with aclosing(self._inner.download(digest, offset_bytes)) as pieces:
            async for piece in pieces:
                yield piece


async def test_a_disk_that_fills_up_amid_a_fetch(registry: Served, folder: Path, tmp_path: Path) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    disk = tmp_path / "disk"
    with tiny_disk(disk, 96 * MIB):
        source = Fills(registry.client, disk)
        files = cache(source, disk / "cache")
        with pytest.raises(StoreUnavailable, match=r"is full: .* point FAIRWAY_STATE_DIR to") as caught:
            await files.fetch("tiny", done.digest)
        assert caught.value.retry_after_s
        assert source.filler is not None
        await assert_sound(files, disk / "cache")
        with pytest.raises(StoreUnavailable, match=f"is full: .* {done.size_bytes} needed"):
            await files.fetch("tiny", done.digest)  # refused before a byte is asked for
        await assert_sound(files, disk / "cache")
        source.filler.unlink()
        ready = await files.fetch("tiny", done.digest)
        assert (ready / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        files.check_integrity()
        files.close()


@contextmanager
def no_file_over(size_bytes: int) -> Iterator[None]:
    """The system refuses what would make a file larger, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_write_that_the_system_refuses(registry: Served, folder: Path, tmp_path: Path) -> None:
    """The same where nothing can be mounted."""
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    files = cache(registry.client, tmp_path / "cache")
    for limit in (2 * CHUNK_BYTES + 100, 10):  # amid the weights; amid the manifest
        with no_file_over(limit), pytest.raises(StoreUnavailable, match="is full"):
            await files.fetch("tiny", done.digest)
        await assert_sound(files, tmp_path / "cache")
    ready = await files.fetch("tiny", done.digest)
    assert (ready / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


async def test_a_full_disk_leaves_what_is_in_use_alone(
    registry: Served, folder: Path, tmp_path: Path
) -> None:
    first = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    other = write_model(tmp_path / "other", weight_bytes=3 * CHUNK_BYTES, seed=8)
    second = await publish_any(registry.channel, other, "tiny", metadata=ADMIN)
    files = cache(registry.client, tmp_path / "cache")
    used = await files.fetch("tiny", first.digest)
    files.pin(used)
    with no_file_over(2 * CHUNK_BYTES), pytest.raises(StoreUnavailable, match="is full"):
        await files.fetch("tiny", second.digest)
    assert (used / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert left(tmp_path / "cache", "partial") == []
    files.check_integrity()


async def test_versions_in_use_beyond_the_bound_are_an_error_that_names_sizes(
    registry: Served, tmp_path: Path
) -> None:
    sizes = []
    files = cache(registry.client, tmp_path / "cache", max_bytes=25_000)
    for number in range(3):
        folder = write_model(tmp_path / f"m{number}", weight_bytes=10_000, seed=number)
        done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
        sizes.append(done.size_bytes)
        if number < 2:
            files.pin(await files.fetch("tiny", done.digest))
            continue
        with pytest.raises(StoreUnavailable) as caught:
            await files.fetch("tiny", done.digest)
        told = caught.value.message
        # Equal files are there once: a further version adds its weights.
        for size in (10_000, 25_000, sizes[0] + 10_000):
            assert str(size) in told
        assert "FAIRWAY_MODEL_CACHE_BYTES" in told
        assert caught.value.retry_after_s
    files.check_integrity()


_OWNER = """
import asyncio, sys
from pathlib import Path
from services.adapters.model_files.cache import ModelFiles
from services.adapters.grpc.registry_client import RegistryClient
from services.rpc.channel import RoleChannel
from services.runtime.clock import SystemClock
async def main():
    address, root, digest, token = sys.argv[1:]
    client = RegistryClient(RoleChannel(address), token)
    files = ModelFiles(client, Path(root), SystemClock(), max_bytes=10**9)
    print("ready", await files.fetch("tiny", digest), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


async def test_a_second_process_is_told_and_harms_nothing(
    registry: Served, folder: Path, tmp_path: Path
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    root = tmp_path / "cache"
    arguments = ("-c", _OWNER, registry.address, str(root), done.digest, TOKEN)
    owner = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    try:
        async with asyncio.timeout(60):
            while not (line := (await owner.stdout.readline()).decode()).startswith("ready "):
                assert line, "the owner ended"
        ready = Path(line.removeprefix("ready ").strip())
        before = {path: path.stat().st_mtime_ns for path in left(root, "ready", "manifests")}
        files = cache(registry.client, root)
        for _ in range(3):  # it is no readier the second time
            with pytest.raises(StoreUnavailable, match="give each its own FAIRWAY_STATE_DIR"):
                await files.fetch("tiny", done.digest)
        assert {path: path.stat().st_mtime_ns for path in left(root, "ready", "manifests")} == before
        assert (ready / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    finally:
        owner.send_signal(signal.SIGKILL)
        await owner.wait()
    assert await files.fetch("tiny", done.digest) == ready, "its death gives the folder back"
