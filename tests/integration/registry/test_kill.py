"""SIGKILL of a real registry, a publisher and a fetcher amid a transfer: what arrived is not sent again."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from fairway.client.publish.publish import Metadata, Published, PublishProgress, publish
from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.model_files.cache import ModelFiles
from services.core.manifest import CHUNK_BYTES
from services.rpc.channel import open_channel
from services.runtime.clock import SystemClock
from tests.support.model_folder import write_model
from tests.support.object_store import ObjectStore
from tests.support.registry_process import TOKEN, CountingProxy, RegistryProcess

WEIGHT_BYTES: Final = 10 * CHUNK_BYTES
HALF: Final = WEIGHT_BYTES // 2
MODEL: Final = "kill-test"
# Frames, headers, the manifest, and what is asked and answered besides.
OVERHEAD_BYTES: Final = 512 * 1024


def overhead(size_bytes: int) -> int:
    return size_bytes + size_bytes // 50 + OVERHEAD_BYTES


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, etcd_endpoint: str) -> Iterator[RegistryProcess]:
    """One for all: a test leaves it running."""
    process = RegistryProcess(tmp_path_factory.mktemp("registry"), etcd_endpoint, {})
    try:
        asyncio.run(process.make_admin())
        process.start()
        yield process
    finally:
        process.kill()


@pytest_asyncio.fixture
async def proxy(registry: RegistryProcess) -> AsyncIterator[CountingProxy]:
    async with CountingProxy(registry.address).running() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    seed = int.from_bytes(hashlib.sha256(request.node.name.encode()).digest()[:4], "big")
    return write_model(tmp_path / "model", weight_bytes=WEIGHT_BYTES, seed=seed)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def missing_bytes(registry: RegistryProcess, folder: Path) -> int:
    """Return how many bytes of the folder the registry has not stored."""
    stored = {path.name for path in (registry.blobs / "sha256").rglob("*") if path.is_file()}
    wanted: dict[str, int] = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            wanted[hashlib.sha256(chunk).hexdigest()] = len(chunk)
    return sum(size for name, size in wanted.items() if name not in stored)


async def publish_through(address: str, folder: Path, admin: Metadata) -> tuple[Published, PublishProgress]:
    told: list[PublishProgress] = []
    async with open_channel(address) as channel:
        done = await publish(
            channel, folder, MODEL, "latest", told.append, metadata=admin, for_another_engine=True
        )
    return done, told[-1]


async def test_a_registry_that_is_killed_amid_an_upload_gets_only_what_it_lacks(
    registry: RegistryProcess, proxy: CountingProxy, folder: Path
) -> None:
    publishing = asyncio.ensure_future(publish_through(proxy.address, folder, registry.admin))
    await until(lambda: proxy.up > HALF)
    registry.kill()
    missing = missing_bytes(registry, folder)
    assert 0 < missing < WEIGHT_BYTES, "it was not killed amid the upload"
    proxy.reset()
    await registry.start_beside()
    done, progress = await publishing
    assert done.created
    # What was in buffers on its way when the registry died still passes the proxy.
    assert proxy.up <= overhead(missing) + CHUNK_BYTES
    assert progress.sent_bytes == progress.to_send_bytes == done.uploaded_bytes
    assert not list((registry.blobs / "unfinished").iterdir())

    proxy.reset()
    again, progress = await publish_through(proxy.address, folder, registry.admin)
    assert (again.digest, again.created, again.uploaded_bytes) == (done.digest, False, 0)
    assert progress.sent_bytes == progress.to_send_bytes == 0
    assert proxy.up < OVERHEAD_BYTES


_PUBLISHER = """
import asyncio, sys
from pathlib import Path
from fairway.client.publish.publish import publish
from services.rpc.channel import open_channel
async def main():
    async with open_channel(sys.argv[1]) as channel:
        key = ((sys.argv[4], sys.argv[5]),)
        await publish(channel, Path(sys.argv[2]), sys.argv[3], metadata=key, for_another_engine=True)
asyncio.run(main())
"""


async def test_a_publisher_that_is_killed_goes_on_where_it_was(
    registry: RegistryProcess, proxy: CountingProxy, folder: Path
) -> None:
    ((name, value),) = registry.admin
    arguments = ("-c", _PUBLISHER, proxy.address, str(folder), MODEL, name, value)
    child = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        await until(lambda: proxy.up > HALF)
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
    # The registry notices the broken streams and removes what they left.
    await until(lambda: not list((registry.blobs / "unfinished").iterdir()))
    missing = missing_bytes(registry, folder)
    assert 0 < missing < WEIGHT_BYTES, "it was not killed amid the upload"
    proxy.reset()
    done, progress = await publish_through(proxy.address, folder, registry.admin)
    assert done.created
    assert done.uploaded_bytes == progress.to_send_bytes == missing
    assert progress.skipped_chunks == progress.chunks - done.uploaded_chunks > 0
    assert proxy.up <= overhead(missing)


_FETCHER = """
import asyncio, sys
from pathlib import Path
from services.adapters.model_files.cache import ModelFiles
from services.adapters.grpc.registry_client import RegistryClient
from services.rpc.channel import RoleChannel
from services.runtime.clock import SystemClock
async def main():
    address, root, model, digest, token = sys.argv[1:]
    client = RegistryClient(RoleChannel(address), token)
    files = ModelFiles(client, Path(root), SystemClock(), max_bytes=10**9)
    await files.fetch(model, digest)
asyncio.run(main())
"""


async def test_fetches_outlast_a_kill_of_either_side(
    registry: RegistryProcess, proxy: CountingProxy, folder: Path, tmp_path: Path
) -> None:
    done, _ = await publish_through(registry.address, folder, registry.admin)
    cache = tmp_path / "cache"
    arguments = ("-c", _FETCHER, proxy.address, str(cache), MODEL, done.digest, TOKEN)
    child = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    try:
        await until(lambda: proxy.down > HALF // 2)
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
    kept = sum(
        path.stat().st_size // CHUNK_BYTES * CHUNK_BYTES
        for path in (cache / "partial").rglob("*.safetensors")
    )
    assert 0 < kept < WEIGHT_BYTES, "it was not killed amid the download"
    proxy.reset()
    async with open_channel(proxy.address) as channel:
        files = ModelFiles(RegistryClient(lambda: channel, TOKEN), cache, SystemClock(), max_bytes=10**9)
        fetching = asyncio.ensure_future(files.fetch(MODEL, done.digest))
        await until(lambda: proxy.down > HALF // 2)
        registry.kill()
        await registry.start_beside()
        ready = await fetching
        files.close()
    assert (ready / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    # What was on its way when the registry died is all that may come twice.
    assert proxy.down <= overhead(done.size_bytes - kept) + CHUNK_BYTES


async def test_a_registry_on_an_object_store(
    tmp_path: Path, etcd_endpoint: str, object_store: ObjectStore
) -> None:
    (tmp_path / "registry").mkdir()
    registry = RegistryProcess(
        tmp_path / "registry", etcd_endpoint, object_store.settings(prefix="a-registry")
    )
    folder = write_model(tmp_path / "model", weight_bytes=2 * CHUNK_BYTES + 99, seed=99)
    try:
        await registry.make_admin()
        await registry.start_beside()
        done, _ = await publish_through(registry.address, folder, registry.admin)
        again, _ = await publish_through(registry.address, folder, registry.admin)
        assert (again.digest, again.created, again.uploaded_bytes) == (done.digest, False, 0)
        async with open_channel(registry.address) as channel:
            client = RegistryClient(lambda: channel, TOKEN)
            files = ModelFiles(client, tmp_path / "cache", SystemClock(), max_bytes=10**9)
            ready = await files.fetch(MODEL, done.digest)
            assert (ready / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    finally:
        registry.kill()
    assert not registry.blobs.exists()
