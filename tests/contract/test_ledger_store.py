"""What every ``TileStore`` does, checked on a folder, on a real S3 server and in memory alike."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from services.adapters.ledger_stores import FolderLedger, S3Ledger
from services.core.errors import NotFound, StoreUnavailable
from services.ports.usage import TileStore
from tests.support.memory_ledger import MemoryLedger
from tests.support.object_store import ObjectStore
from tests.support.tiny_disk import tiny_disk


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TileStore:
    if request.param == "folder":
        return FolderLedger(tmp_path / "ledger")
    if request.param == "memory":
        return MemoryLedger()
    server: ObjectStore = request.getfixturevalue("object_store")
    return S3Ledger(server.bucket(prefix=hashlib.sha256(request.node.name.encode()).hexdigest()[:16]))


async def test_a_name_is_taken_once(store: TileStore) -> None:
    assert await store.create("segments/0001", b"first")
    assert not await store.create("segments/0001", b"second")
    assert await store.read("segments/0001") == b"first"


async def test_one_of_many_writers_gets_the_name(store: TileStore) -> None:
    texts = [bytes([number]) * 1000 for number in range(8)]
    created = await asyncio.gather(*(store.create("segments/0002", text) for text in texts))
    assert sum(created) == 1
    assert await store.read("segments/0002") == texts[created.index(True)]


async def test_names_are_sorted_and_start_after_a_name(store: TileStore) -> None:
    for number in (3, 1, 2):
        await store.create(f"segments/000{number}", b"x")
    await store.create("hours/0001-1", b"y")
    assert await store.names("segments/") == ("segments/0001", "segments/0002", "segments/0003")
    assert await store.names("segments/", "segments/0001") == ("segments/0002", "segments/0003")
    assert await store.names("segments/", "segments/00015") == ("segments/0002", "segments/0003")
    assert await store.names("hours/0001-") == ("hours/0001-1",)
    assert await store.names("checkpoints/") == ()


async def test_a_deleted_name_is_free_and_a_missing_one_ignored(store: TileStore) -> None:
    await store.create("segments/0001", b"first")
    await store.delete(["segments/0001", "segments/0009"])
    with pytest.raises(NotFound):
        await store.read("segments/0001")
    assert await store.names("segments/") == ()
    assert await store.create("segments/0001", b"second")


async def test_an_object_is_replaced_and_names_may_be_deep(store: TileStore) -> None:
    for name in ("checkpoint", "tile/0/x001/234.p/5", "tile/0/x001/234"):
        await store.replace(name, b"first")
        await store.replace(name, b"second")
        assert await store.read(name) == b"second"
        assert not await store.create(name, b"third")
    await store.delete(["tile/0/x001/234.p/5"])
    assert await store.create("tile/0/x001/234.p/5", b"again")


async def test_large_and_empty_objects(store: TileStore) -> None:
    large = bytes(range(256)) * 20_000
    await store.create("hours/1-1", large)
    await store.create("hours/1-2", b"")
    assert await store.read("hours/1-1") == large
    assert await store.read("hours/1-2") == b""


async def test_a_full_disk_stores_nothing(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", 256 * 1024):
        store = FolderLedger(tmp_path / "disk" / "ledger")
        await store.create("segments/1", b"small")
        with pytest.raises(StoreUnavailable):
            await store.create("segments/2", b"x" * 1024 * 1024)
        assert await store.names("segments/") == ("segments/1",)
        assert await store.create("segments/2", b"small")


async def test_what_an_interrupted_write_left_is_removed(tmp_path: Path) -> None:
    FolderLedger(tmp_path)
    (tmp_path / "unfinished" / "tmpabc").write_bytes(b"half")
    FolderLedger(tmp_path)
    assert not list((tmp_path / "unfinished").iterdir())


async def test_an_unreachable_object_store_is_unavailable(object_store: ObjectStore) -> None:
    store = S3Ledger(object_store.bucket(endpoint="http://127.0.0.1:1"), quick_s=0.5, bulk_s=0.5)
    for call in (store.create("segments/1", b"x"), store.names("segments/"), store.read("segments/1")):
        with pytest.raises(StoreUnavailable):
            await call
