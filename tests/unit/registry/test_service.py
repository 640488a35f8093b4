"""RegistryService on the in-memory ports, where the integration tests cannot reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.adapters.memory.store import MemoryStore
from services.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    IntegrityError,
    InvalidInput,
    ModelNotFound,
    StoreUnavailable,
)
from services.core.manifest import Manifest, ManifestFile, digest_of, sha256_of, weights_digest_of
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    AssignedVersion,
    Assignment,
    Deployment,
    Meta,
    dump,
    tag_key,
    version_key,
)
from services.core.rollouts.routes import ROUTES, ModelRoute, RouteArm
from services.ports.store import Committed, ConditionFailed, Delete, Put
from services.registry import service as module
from services.registry.service import RegistryService
from services.runtime.clock import SystemClock
from tests.support.memory_blobs import MemoryBlobs

CLOCK = SystemClock()


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def manifest(data: bytes) -> Manifest:
    digest = sha256_of(data)
    return Manifest((ManifestFile("config.json", len(data), digest, (digest,)),))


async def test_silent_sender_is_given_up_and_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPLOAD_IDLE_S", 0.05)
    service = RegistryService(MemoryStore(CLOCK), MemoryBlobs(), CLOCK)

    async def silent() -> AsyncIterator[bytes]:
        yield b"he"
        await asyncio.sleep(3600)

    with pytest.raises(DeadlineExceeded):
        await service.upload(sha256_of(b"hello"), 5, silent())
    assert await service.find_missing([sha256_of(b"hello")]) == (sha256_of(b"hello"),)


async def test_stored_chunk_is_not_read_again() -> None:
    service = RegistryService(MemoryStore(CLOCK), MemoryBlobs(), CLOCK)
    await service.upload(sha256_of(b"hello"), 5, pieces(b"hello"))
    read = False

    async def watched() -> AsyncIterator[bytes]:
        nonlocal read
        read = True
        yield b"hello"

    await service.upload(sha256_of(b"hello"), 5, watched())
    assert not read


async def test_full_store_is_a_clear_error_and_no_version() -> None:
    data = b"{" + b" " * 200 + b"}"
    service = RegistryService(MemoryStore(CLOCK), MemoryBlobs(capacity_bytes=250), CLOCK)
    await service.upload(sha256_of(data), len(data), pieces(data))
    with pytest.raises(StoreUnavailable):
        await service.create_version("m", manifest(data))  # the chunk fits, the manifest does not
    with pytest.raises(ModelNotFound):
        await service.get_version("m", digest_of(manifest(data)))


class Losing(MemoryStore):
    """Another registry makes the same version between this one's check and its commit."""

    async def commit(self, operations, conditions=()) -> Committed | ConditionFailed:  # type: ignore[no-untyped-def]
        await super().commit(operations, conditions)
        return await super().commit(operations, conditions)


async def test_loser_of_a_race_returns_the_winners_version() -> None:
    service = RegistryService(Losing(CLOCK), MemoryBlobs(), CLOCK)
    await service.upload(sha256_of(b"{}"), 2, pieces(b"{}"))
    record, created = await service.create_version("m", manifest(b"{}"))
    assert not created
    assert (await service.get_version("m", record.digest))[0] == record


async def test_one_digest_of_two_models_is_two_versions() -> None:
    service = RegistryService(MemoryStore(CLOCK), MemoryBlobs(), CLOCK)
    await service.upload(sha256_of(b"{}"), 2, pieces(b"{}"))
    one, _ = await service.create_version("a", manifest(b"{}"))
    with pytest.raises(ModelNotFound):
        await service.get_version("b", one.digest)
    with pytest.raises(ModelNotFound):
        await service.set_tag("b", "prod", one.digest)
    two, created = await service.create_version("b", manifest(b"{}"))
    assert created
    assert one.digest == two.digest


async def test_damaged_manifest_is_never_returned() -> None:
    blobs = MemoryBlobs()
    service = RegistryService(MemoryStore(CLOCK), blobs, CLOCK)
    await service.upload(sha256_of(b"{}"), 2, pieces(b"{}"))
    record, _ = await service.create_version("m", manifest(b"{}"))
    blobs._blobs[record.digest] = blobs._blobs[record.digest].replace(b"causal-lm", b"fixed-lm!")
    with pytest.raises(IntegrityError):
        await service.get_version("m", record.digest)


async def stored(service: RegistryService, files: dict[str, bytes], **fields: object) -> Manifest:
    """Upload the files; return the manifest of a version with them."""
    found = []
    for path, data in sorted(files.items()):
        digest = sha256_of(data)
        await service.upload(digest, len(data), pieces(data))
        found.append(ManifestFile(path, len(data), digest, (digest,)))
    weights = weights_digest_of(found)
    return Manifest(tuple(found), weights_digest=weights, **fields)  # type: ignore[arg-type]


async def test_an_adapter_holds_its_base_and_shares_its_engine() -> None:
    service = RegistryService(MemoryStore(CLOCK), MemoryBlobs(), CLOCK)
    weights = len(b"{}").to_bytes(8, "little") + b"{}"
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}
    base, _ = await service.create_version("chat", await stored(service, {"config.json": b"{}"}))
    fields = {"schema": 3, "base_model": "chat", "base_digest": base.digest}
    adapter = await stored(service, files, **fields)
    with pytest.raises(ModelNotFound):
        await service.create_version("mine", replace(adapter, base_model="other"))
    made, created = await service.create_version("mine", adapter)
    assert created
    assert made.engine == base.engine
    with pytest.raises(InvalidInput, match="is an adapter"):
        of_adapter = replace(adapter, base_model="mine", base_digest=made.digest)
        await service.create_version("mine", of_adapter)
    with pytest.raises(FailedPrecondition, match="the adapter mine"):
        await service.delete_version("chat", base.digest)
    await service.delete_version("mine", made.digest)
    await service.delete_version("chat", base.digest)
    with pytest.raises(ModelNotFound):
        await service.create_version("mine", adapter)


UNREADABLE = b"{"
OTHER = sha256_of(b"other")


def newer(record: object) -> bytes:
    """The record as a later release may write it, with a value that this one cannot read."""
    return (
        dump(record)
        .replace(b'"executor":"torch"', b'"executor":7')
        .replace(b'"worker_id":"w"', b'"worker_id":7')
    )


@pytest.mark.parametrize(
    ("records", "named"),
    [
        ({DEPLOYMENTS + "x": UNREADABLE}, DEPLOYMENTS + "x"),
        ({ASSIGNMENTS + "w": UNREADABLE}, ASSIGNMENTS + "w"),
        ({tag_key("chat", "prod"): UNREADABLE}, tag_key("chat", "prod")),
        ({version_key("lost", OTHER): UNREADABLE}, version_key("lost", OTHER)),
        (
            {DEPLOYMENTS + "x": dump(Deployment(Meta("x"), "chat", "v", OTHER, 1)), ROUTES + "x": UNREADABLE},
            ROUTES + "x",
        ),
        # What they use can be read of these, or follows from their keys.
        ({DEPLOYMENTS + "x": newer(Deployment(Meta("x"), "chat", "v", OTHER, 1))}, ""),
        ({ASSIGNMENTS + "w": newer(Assignment("w", (AssignedVersion("x", "chat", OTHER),)))}, ""),
        ({tag_key("mine", "prod"): UNREADABLE}, ""),
        (
            {DEPLOYMENTS + "x": dump(Deployment(Meta("x"), "mine", "v", OTHER, 1)), ROUTES + "x": UNREADABLE},
            "",
        ),
        ({ROUTES + "x": UNREADABLE}, ""),
    ],
)
async def test_an_unreadable_record_refuses_only_what_it_may_use(
    records: dict[str, bytes], named: str
) -> None:
    store = MemoryStore(CLOCK)
    service = RegistryService(store, MemoryBlobs(), CLOCK)
    made, _ = await service.create_version("chat", await stored(service, {"config.json": b"{}"}))
    await store.commit([Put(key, value) for key, value in records.items()])
    if named:
        with pytest.raises(FailedPrecondition, match=named) as caught:
            await service.delete_version("chat", made.digest)
        assert caught.value.metadata["key"] == named
        await store.commit([Delete(named)])
    await service.delete_version("chat", made.digest)


async def test_what_uses_a_version_is_found_in_a_record_of_a_later_release() -> None:
    store = MemoryStore(CLOCK)
    service = RegistryService(store, MemoryBlobs(), CLOCK)
    made, _ = await service.create_version("chat", await stored(service, {"config.json": b"{}"}))
    using = {
        DEPLOYMENTS + "x": newer(Deployment(Meta("x"), "chat", "v", made.digest, 1)),
        ASSIGNMENTS + "w": newer(Assignment("w", (AssignedVersion("x", "chat", made.digest),))),
    }
    for key, value in using.items():
        await store.commit([Put(key, value)])
        with pytest.raises(FailedPrecondition, match="deployment x"):
            await service.delete_version("chat", made.digest)
        await store.commit([Delete(key)])
    arms = (RouteArm("stable", OTHER), RouteArm("canary", made.digest))
    await store.commit(
        [
            Put(DEPLOYMENTS + "x", dump(Deployment(Meta("x"), "chat", "v", OTHER, 1))),
            Put(ROUTES + "x", dump(ModelRoute("x", "", arms))),
        ]
    )
    with pytest.raises(FailedPrecondition, match="a rollout of x"):
        await service.delete_version("chat", made.digest)


async def test_an_adapter_whose_record_is_unreadable_holds_its_base_by_its_manifest() -> None:
    store = MemoryStore(CLOCK)
    service = RegistryService(store, MemoryBlobs(), CLOCK)
    weights = len(b"{}").to_bytes(8, "little") + b"{}"
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}
    base, _ = await service.create_version("chat", await stored(service, {"config.json": b"{}"}))
    other, _ = await service.create_version("chat", await stored(service, {"config.json": b"[]"}))
    fields = {"schema": 3, "base_model": "chat", "base_digest": base.digest}
    made, _ = await service.create_version("mine", await stored(service, files, **fields))
    await store.commit([Put(version_key("mine", made.digest), UNREADABLE)])
    await service.delete_version("chat", other.digest)
    with pytest.raises(FailedPrecondition, match="the adapter mine"):
        await service.delete_version("chat", base.digest)
    await service.delete_version("mine", made.digest)
    await service.delete_version("chat", base.digest)


async def test_garbage_is_collected_beside_an_unreadable_record_and_errors_name_its_key() -> None:
    store = MemoryStore(CLOCK)
    service = RegistryService(store, MemoryBlobs(), CLOCK)
    made, _ = await service.create_version("chat", await stored(service, {"config.json": b"{}"}))
    key = version_key("chat", made.digest)
    await store.commit([Put(key, UNREADABLE)])
    await stored(service, {"config.json": b"[]"})
    collected = await service.collect_garbage()
    assert (collected.kept_blobs, collected.deleted_blobs) == (2, 1)
    with pytest.raises(IntegrityError, match=f"VersionRecord at {key}") as caught:
        await service.list_versions("chat")
    assert caught.value.metadata["key"] == key
