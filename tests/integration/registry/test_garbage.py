"""Deleting versions and collecting garbage, against publishers that do not wait for either."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from fairway.v1 import registry_pb2 as pb
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.etcd.store import EtcdStore
from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.controlplane.resources.deployments import Deployments
from services.core.errors import Conflict, FailedPrecondition, FairwayError, InvalidInput, NotFound
from services.core.manifest import Manifest, ManifestFile, sha256_of
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    AssignedVersion,
    Assignment,
    Deployment,
    Meta,
    dump,
    tag_key,
)
from services.ports.blob_store import StoredBlob
from services.ports.store import Committed, Condition, ConditionFailed, Entry, Listing, Operation, Put
from services.registry.garbage import LEASE_S, SWEEPING, SweepFence
from services.registry.service import RegistryService
from services.runtime.clock import SystemClock
from tests.conftest import Server
from tests.integration.registry.harness import publish_any
from tests.support.memory_blobs import MemoryBlobs
from tests.support.model_folder import write_model
from tests.support.registry import ADMIN, Served, served

CLOCK = SystemClock()
DAY_S = 24 * 3600.0


class Registry:
    """A registry on a folder whose files a test can age."""

    def __init__(self, root: Path, running: Served, store: MemoryStore) -> None:
        self.root = root
        self.running = running
        self.store = store
        self.service = running.service

    def age(self, seconds: float) -> None:
        """Everything in the folder was written that long ago."""
        then = CLOCK.unix_s() - seconds
        for path in self.root.rglob("*"):
            if path.is_file():
                os.utime(path, (then, then))

    def blobs(self) -> set[str]:
        return {"sha256:" + path.name for path in (self.root / "sha256").rglob("*") if path.is_file()}

    async def publish(self, folder: Path, model: str = "tiny", tag: str = "") -> str:
        return (await publish_any(self.running.channel, folder, model, tag, metadata=ADMIN)).digest

    async def collect(self, *, dry_run: bool = False) -> pb.CollectGarbageResponse:
        request = pb.CollectGarbageRequest(dry_run=dry_run)
        return await self.running.stub.CollectGarbage(request, metadata=ADMIN, timeout=30)

    async def delete(self, model: str, digest: str) -> None:
        request = pb.DeleteVersionRequest(model=model, digest=digest)
        await self.running.stub.DeleteVersion(request, metadata=ADMIN, timeout=30)


@pytest_asyncio.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    store = MemoryStore(CLOCK)
    async with served(store, FolderBlobs(tmp_path / "blobs"), CLOCK) as running:
        yield Registry(tmp_path / "blobs", running, store)


async def test_what_no_version_needs_goes_and_the_rest_stays(registry: Registry, tmp_path: Path) -> None:
    one = await registry.publish(write_model(tmp_path / "one", seed=1))
    two = await registry.publish(write_model(tmp_path / "two", seed=2))
    everything = registry.blobs()
    assert len(everything) == 7 + 1 + 2, "what versions share is stored once"
    registry.age(2 * DAY_S)
    assert (await registry.collect()).deleted_blobs == 0
    await registry.delete("tiny", one)
    assert registry.blobs() == everything, "deleting a version deletes no bytes by itself"

    would = await registry.collect(dry_run=True)
    assert registry.blobs() == everything
    done = await registry.collect()
    assert (would.deleted_blobs, would.deleted_bytes) == (done.deleted_blobs, done.deleted_bytes)
    assert (done.deleted_blobs, done.kept_blobs, done.young_blobs) == (2, 8, 0)
    assert len(registry.blobs()) == 8
    files = ModelFiles(registry.running.client, tmp_path / "cache", CLOCK, max_bytes=10**8)
    folder = await files.fetch("tiny", two)
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    with pytest.raises(NotFound):
        await files.fetch("tiny", one)
    assert await registry.publish(tmp_path / "one") == one, "it can be published again, under the same name"


async def test_one_digest_under_two_models_is_kept_for_the_other(registry: Registry, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "one")
    digest = await registry.publish(folder, "a")
    assert await registry.publish(folder, "b") == digest
    registry.age(2 * DAY_S)
    await registry.delete("a", digest)
    assert (await registry.collect()).deleted_blobs == 0
    assert (await registry.service.get_version("b", digest))[0].digest == digest


async def test_what_is_young_stays(registry: Registry, tmp_path: Path) -> None:
    digest = await registry.publish(write_model(tmp_path / "one"))
    await registry.delete("tiny", digest)
    registry.age(DAY_S - 600)
    done = await registry.collect()
    assert (done.deleted_blobs, done.young_blobs) == (0, 8)
    with pytest.raises(InvalidInput, match="at least 3600"):
        await registry.service.collect_garbage(min_age_s=3599)
    assert (await registry.service.collect_garbage(min_age_s=3599, dry_run=True)).deleted_blobs == 8
    assert (await registry.service.collect_garbage(min_age_s=DAY_S - 3600)).deleted_blobs == 8


async def test_leftovers_go_when_they_are_old(registry: Registry) -> None:
    (registry.root / "unfinished" / "tmpcrash").write_bytes(b"half")
    (registry.root / "damaged" / "x.1").write_bytes(b"rot")
    assert (await registry.collect()).deleted_leftovers == 0
    registry.age(2 * DAY_S)
    assert (await registry.collect(dry_run=True)).deleted_leftovers == 2
    assert (await registry.collect()).deleted_leftovers == 2
    assert not list((registry.root / "unfinished").iterdir())


async def test_nothing_is_deleted_while_a_manifest_cannot_be_read(registry: Registry, tmp_path: Path) -> None:
    digest = await registry.publish(write_model(tmp_path / "one"))
    (registry.root / "sha256" / digest[7:9] / digest[7:]).unlink()
    before = registry.blobs()
    registry.age(2 * DAY_S)
    with pytest.raises(grpc.aio.AioRpcError, match="publish the version again or delete it"):
        await registry.collect()
    assert registry.blobs() == before
    await registry.publish(tmp_path / "one")
    assert (await registry.collect()).deleted_blobs == 0


async def test_a_version_that_is_used_is_not_deleted(registry: Registry, tmp_path: Path) -> None:
    digest = await registry.publish(write_model(tmp_path / "one"), tag="prod")
    with pytest.raises(grpc.aio.AioRpcError, match="the tag prod of tiny points at"):
        await registry.delete("tiny", digest)
    await registry.service.delete_tag("tiny", "prod")
    deployment = Deployment(Meta("chat"), "tiny", digest, digest, replicas=0)
    await registry.store.commit([Put(DEPLOYMENTS + "chat", dump(deployment))])
    with pytest.raises(grpc.aio.AioRpcError, match="the deployment chat runs"):
        await registry.delete("tiny", digest)
    await registry.store.commit(
        [Put(DEPLOYMENTS + "chat", dump(Deployment(Meta("chat"), "x", digest, digest, 1)))]
    )
    assigned = Assignment("w0", (AssignedVersion("chat", "tiny", digest, retiring=True),))
    await registry.store.commit([Put(ASSIGNMENTS + "w0", dump(assigned))])
    with pytest.raises(grpc.aio.AioRpcError, match="serves the deployment chat until its update is over"):
        await registry.delete("tiny", digest)
    await registry.store.commit([Put(ASSIGNMENTS + "w0", dump(Assignment("w0")))])
    await registry.delete("tiny", digest)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.delete("tiny", digest)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


class Between(MemoryStore):
    """Lets a test do something right before a commit that deletes."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.before: list[object] = []

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        if self.before and not isinstance(operations[0], Put):
            await self.before.pop()()  # type: ignore[operator]
        return await super().commit(operations, conditions)


async def test_a_tag_or_a_deployment_that_comes_between_saves_the_version() -> None:
    store, blobs = Between(), MemoryBlobs()
    service = RegistryService(store, blobs, CLOCK)
    control = Deployments(store, CLOCK)
    digest = await _version(service, b"{}")

    async def tag() -> None:
        await service.set_tag("m", "prod", digest)

    async def deploy() -> None:
        await control.create(Deployment(Meta("d"), "m", digest, "", 1))

    async def redeploy() -> None:
        await control.update(Deployment(Meta("d"), "m", digest, "", 1))

    store.before = [tag]
    with pytest.raises(FailedPrecondition, match="the tag prod"):
        await service.delete_version("m", digest)
    await service.delete_tag("m", "prod")
    store.before = [deploy]
    with pytest.raises(FailedPrecondition, match="the deployment d"):
        await service.delete_version("m", digest)
    other = await _version(service, b"[]")
    await control.update(Deployment(Meta("d"), "m", other, "", 1))
    store.before = [redeploy]
    with pytest.raises(FailedPrecondition, match="the deployment d"):
        await service.delete_version("m", digest)


async def _version(service: RegistryService, data: bytes, model: str = "m") -> str:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    digest = sha256_of(data)
    await service.upload(digest, len(data), pieces())
    manifest = Manifest((ManifestFile("config.json", len(data), digest, (digest,)),))
    return (await service.create_version(model, manifest))[0].digest


# --- publishers and collectors at once ---------------------------------------------------------------


class Jitter:
    """Lets others run for a random number of turns."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    async def __call__(self) -> None:
        for _ in range(self._rng.choice((0, 0, 0, 1, 2, 5, 20, 90))):
            await asyncio.sleep(0)


class SlowStore(MemoryStore):
    def __init__(self, jitter: Jitter) -> None:
        super().__init__(CLOCK)
        self._jitter = jitter

    async def get(self, key: str) -> Entry | None:
        await self._jitter()
        found = await super().get(key)
        await self._jitter()
        return found

    async def list(self, prefix: str) -> Listing:
        found = await super().list(prefix)
        await self._jitter()
        return found

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        await self._jitter()
        done = await super().commit(operations, conditions)
        await self._jitter()
        return done


class SlowBlobs(MemoryBlobs):
    """Everything in it is old: nothing but the fence keeps a publisher's chunks."""

    def __init__(self, jitter: Jitter) -> None:
        super().__init__()
        self._jitter = jitter

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        await self._jitter()
        await super().put(digest, data, size_bytes)

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        await self._jitter()
        async for piece in super().get(digest, offset_bytes):
            yield piece

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        await self._jitter()
        found = await super().missing(digests)
        await self._jitter()
        return found

    async def stored(self) -> AsyncGenerator[tuple[StoredBlob, ...], None]:
        async for page in super().stored():
            yield page
            await self._jitter()

    async def delete(self, blobs: Sequence[StoredBlob]) -> tuple[str, ...]:
        gone: tuple[str, ...] = ()
        for blob in blobs:
            await self._jitter()
            gone += await super().delete([blob])
        return gone


class Quick(SystemClock):
    """Waits for others by turns, not by time."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


async def _publish_until_made(service: RegistryService, number: int) -> None:
    for _ in range(50):
        try:
            await _version(service, b'{"n": %d}' % number, f"m{number}")
            return
        except FailedPrecondition:
            continue  # as a client: what is missing is sent again
    raise AssertionError("garbage collection starves the publisher")


def _chunk(number: int) -> tuple[str, AsyncIterator[bytes], int]:
    data = b'{"n": %d}' % number

    async def pieces() -> AsyncIterator[bytes]:
        yield data

    return sha256_of(data), pieces(), len(data)


async def _collect_after(jitter: Jitter, service: RegistryService) -> None:
    await jitter()
    try:
        await service.collect_garbage()
    except Conflict:
        return


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
async def test_no_order_of_events_leaves_a_version_without_its_chunks(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        jitter = Jitter(seed)
        store, blobs = SlowStore(jitter), SlowBlobs(jitter)
        services = [RegistryService(store, blobs, Quick()) for _ in range(3)]
        for number in range(3):  # uploads of long ago whose versions come only now
            await blobs.put(*_chunk(number))
        await asyncio.gather(
            *(_publish_until_made(services[number % 2], number) for number in range(3)),
            *(_collect_after(jitter, service) for service in (services[2], services[0], services[2])),
        )
        for number in range(3):
            (record,), _ = await services[0].list_versions(f"m{number}")
            _, manifest = await services[0].get_version(f"m{number}", record.digest)
            lost = await blobs.missing([chunk for file in manifest.files for chunk in file.chunks])
            assert lost == (), f"seed {seed}"


class Turned(SystemClock):
    """Ahead by what the deletions of a slow store took."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s


async def test_a_slow_store_deletes_nothing_once_the_fence_may_be_down() -> None:
    clock, store, fenced = Turned(), MemoryStore(CLOCK), []

    class Slow(MemoryBlobs):
        async def delete(self, blobs: Sequence[StoredBlob]) -> tuple[str, ...]:
            fenced.append(clock.ahead_s)
            clock.ahead_s += 20.0 * len(blobs)  # two requests that are answered at the last moment
            return await super().delete(blobs)

    blobs = Slow()
    for number in range(5):
        await blobs.put(*_chunk(number))
    service = RegistryService(store, blobs, clock)
    assert (await service.collect_garbage()).deleted_blobs == 2
    assert max(fenced) + 20.0 < LEASE_S, "a deletion outlasted the fence"
    assert (await service.collect_garbage()).deleted_blobs == 2, "the next collection goes on"


async def test_a_sweep_waits_for_no_one_and_makers_wait_for_it() -> None:
    store = MemoryStore(CLOCK)
    fence, other = SweepFence(store, Quick()), SweepFence(store, Quick())
    async with fence.sweeping():
        with pytest.raises(Conflict, match="another registry"):
            async with other.sweeping():
                raise AssertionError
        waiting = asyncio.ensure_future(other.conditions())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
    conditions = await waiting
    assert isinstance(await store.commit([Put("x", b"")], conditions), Committed)
    async with other.sweeping():
        pass
    assert isinstance(await store.commit([Put("x", b"")], conditions), ConditionFailed)


async def test_on_a_real_etcd_a_dead_collector_frees_the_fence(own_etcd: Server) -> None:
    """The lease ends by itself; here it is revoked, which is what etcd does then."""
    store = EtcdStore((own_etcd.address,), CLOCK)
    try:
        fence = SweepFence(store, CLOCK)
        async with fence.sweeping():
            entry = await store.get(SWEEPING)
            assert entry is not None
            assert entry.lease_id
            await store.revoke_lease(entry.lease_id)
            await fence.conditions()
        service = RegistryService(store, MemoryBlobs(), CLOCK)
        digest = await _version(service, b"{}", "fence-model")
        await service.set_tag("fence-model", "prod", digest)
        with pytest.raises(FairwayError, match="points at"):
            await service.delete_version("fence-model", digest)
        await service.delete_tag("fence-model", "prod")
        await service.delete_version("fence-model", digest)
        assert await store.get(tag_key("fence-model", "prod")) is None
        assert (await service.collect_garbage()).deleted_blobs == 2
    finally:
        await store.close()
