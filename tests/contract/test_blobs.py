"""What every ``BlobStore`` does, checked on a folder, on a real S3 server and in memory alike."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage

import obstore
import pytest

from services.adapters.blobs.folder import FolderBlobs
from services.adapters.blobs.s3 import S3Blobs
from services.core.errors import IntegrityError, InvalidInput, NotFound, StorageFull, StoreUnavailable
from services.ports.blob_store import BlobStore, StoredBlob
from services.runtime.clock import SystemClock
from services.runtime.reserve import Reserve
from tests.support.memory_blobs import MemoryBlobs
from tests.support.object_store import ObjectStore
from tests.support.tiny_disk import tiny_disk

PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Kind:
    """One implementation, and how a test ruins a stored blob of it behind its back."""

    blobs: BlobStore
    spoil: Callable[[str, bytes], Awaitable[None]]


@pytest.fixture(params=["folder", "memory", "s3"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "folder":
        return _folder(tmp_path / "blobs")
    if request.param == "memory":
        return _memory()
    return _s3(request.getfixturevalue("object_store"), request.node.name)


@pytest.fixture
def blobs(kind: Kind) -> BlobStore:
    return kind.blobs


def _folder(root: Path) -> Kind:
    async def spoil(digest: str, data: bytes) -> None:
        path = root / "sha256" / digest[7:9] / digest[7:]
        path.chmod(0o600)
        path.write_bytes(data)

    return Kind(FolderBlobs(root), spoil)


def _memory() -> Kind:
    blobs = MemoryBlobs()

    async def spoil(digest: str, data: bytes) -> None:
        blobs._blobs[digest] = data

    return Kind(blobs, spoil)


def _s3(server: ObjectStore, test: str) -> Kind:
    bucket = server.bucket(prefix=hashlib.sha256(test.encode()).hexdigest()[:16])

    async def spoil(digest: str, data: bytes) -> None:
        await obstore.put_async(bucket, "sha256/" + digest[7:], data)

    return Kind(S3Blobs(bucket), spoil)


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def bytes_of(size: int) -> bytes:
    return bytes(number * 31 % 251 for number in range(997)) * (size // 997) + b"x" * (size % 997)


async def pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        await asyncio.sleep(0)
        yield data[start : start + size]


async def read(blobs: BlobStore, digest: str, offset_bytes: int = 0) -> list[bytes]:
    async with aclosing(blobs.get(digest, offset_bytes)) as received:
        return [piece async for piece in received]


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path != root / "lock"]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 3_000_001])
async def test_what_was_put_comes_back_in_bounded_pieces(blobs: BlobStore, size: int) -> None:
    data = bytes_of(size)
    await blobs.put(digest_of(data), pieces(data), size)
    received = await read(blobs, digest_of(data))
    assert b"".join(received) == data
    assert all(0 < len(piece) <= PIECE_BYTES for piece in received)


@pytest.mark.parametrize("offset", [1, PIECE_BYTES, 299_999, 300_000, 400_000])
async def test_get_starts_at_an_offset(blobs: BlobStore, offset: int) -> None:
    data = bytes_of(300_000)
    await blobs.put(digest_of(data), pieces(data), len(data))
    assert b"".join(await read(blobs, digest_of(data), offset)) == data[offset:]


async def test_what_is_not_there_is_said_so(blobs: BlobStore) -> None:
    here, gone = digest_of(b"here"), digest_of(b"gone")
    await blobs.put(here, pieces(b"here"), 4)
    assert await blobs.missing([gone, here, digest_of(b"")]) == (gone, digest_of(b""))
    with pytest.raises(NotFound):
        await read(blobs, gone)


@pytest.mark.parametrize(
    ("sent", "announced"),
    [(b"other", 5), (b"right and more", 5), (b"righ", 5), (b"", 5), (b"right", 4), (b"right", 6)],
)
async def test_bytes_that_are_not_as_announced_are_not_stored(
    blobs: BlobStore, sent: bytes, announced: int
) -> None:
    digest = digest_of(b"right")
    with pytest.raises(IntegrityError):
        await blobs.put(digest, pieces(sent), announced)
    assert await blobs.missing([digest]) == (digest,)
    await blobs.put(digest, pieces(b"right"), 5)
    assert await read(blobs, digest) == [b"right"]


async def test_too_many_bytes_are_refused_before_the_end(blobs: BlobStore) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            assert sent < 100
            yield bytes(1000)

    with pytest.raises(IntegrityError):
        await blobs.put(digest_of(b"x"), endless(), 10_000)


async def test_a_stored_blob_stays_as_it_is(blobs: BlobStore) -> None:
    digest = digest_of(b"first")
    await blobs.put(digest, pieces(b"first"), 5)
    await blobs.put(digest, pieces(b"wrong"), 5)
    with pytest.raises(IntegrityError):
        await blobs.put(digest, pieces(b"longer"), 6)
    assert await read(blobs, digest) == [b"first"]


async def test_simultaneous_puts_of_one_blob_all_succeed(blobs: BlobStore) -> None:
    data = bytes_of(2_000_000)
    await asyncio.gather(*(blobs.put(digest_of(data), pieces(data), len(data)) for _ in range(4)))
    assert b"".join(await read(blobs, digest_of(data))) == data


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "sha256:",
        "sha256:" + "A" * 64,
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 65,
        "sha256:" + "a" * 64 + "\n",
        "sha512:" + "a" * 64,
        "sha256:../../" + "a" * 58,
        "/etc/passwd",
        "sha256:" + "\u0663" * 64,  # digits, but not ASCII
    ],
)
async def test_only_a_digest_names_a_blob(blobs: BlobStore, digest: str) -> None:
    with pytest.raises(InvalidInput):
        await blobs.put(digest, pieces(b"x"), 1)
    with pytest.raises(InvalidInput):
        await read(blobs, digest)
    with pytest.raises(InvalidInput):
        await blobs.missing([digest])


async def stored(blobs: BlobStore) -> list[StoredBlob]:
    async with aclosing(blobs.stored()) as pages:
        return [blob async for page in pages for blob in page]


@pytest.mark.parametrize("damage", [b"wronk", b"wro", b"", b"wrong and more"])
async def test_a_damaged_blob_is_never_read_and_can_be_put_again(kind: Kind, damage: bytes) -> None:
    digest = digest_of(b"right")
    await kind.blobs.put(digest, pieces(b"right"), 5)
    await kind.spoil(digest, damage)
    received: list[bytes] = []
    with pytest.raises(IntegrityError, match="publish"):
        async with aclosing(kind.blobs.get(digest, 1)) as pieces_:
            received.extend([piece async for piece in pieces_])
    assert received == []
    assert await kind.blobs.missing([digest]) == (digest,)
    with pytest.raises(NotFound):
        await read(kind.blobs, digest)
    await kind.blobs.put(digest, pieces(b"right"), 5)
    assert await read(kind.blobs, digest) == [b"right"]


async def test_a_blob_that_was_cut_short_is_replaced_by_the_next_put(kind: Kind) -> None:
    digest = digest_of(b"right")
    await kind.blobs.put(digest, pieces(b"right"), 5)
    await kind.spoil(digest, b"rig")
    await kind.blobs.put(digest, pieces(b"right"), 5)
    assert await read(kind.blobs, digest) == [b"right"]


async def test_what_is_stored_is_listed_once_with_its_size(blobs: BlobStore) -> None:
    wanted = {digest_of(b"x" * size): size for size in range(1, 30)}
    for size in range(1, 30):
        await blobs.put(digest_of(b"x" * size), pieces(b"x" * size), size)
    listed = await stored(blobs)
    assert len(listed) == len(wanted)
    assert {blob.digest: blob.size_bytes for blob in listed} == wanted


async def test_what_is_not_named_as_a_blob_is_nobodys(tmp_path: Path, object_store: ObjectStore) -> None:
    folder, digest = FolderBlobs(tmp_path), digest_of(b"blob")
    bucket = object_store.bucket(prefix="strangers")
    for blobs in (folder, S3Blobs(bucket)):
        await blobs.put(digest, pieces(b"blob"), 4)
        (tmp_path / "sha256" / digest[7:9] / ".nfs0001").write_bytes(b"x")
        (tmp_path / "sha256" / "notes").write_bytes(b"x")
        await obstore.put_async(bucket, "sha256/notes", b"x")
        assert [blob.digest for blob in await stored(blobs)] == [digest]


async def test_a_deleted_blob_is_gone_and_the_others_stay(blobs: BlobStore) -> None:
    one, two = digest_of(b"one"), digest_of(b"two")
    await blobs.put(one, pieces(b"one"), 3)
    await blobs.put(two, pieces(b"two"), 3)
    listed = {blob.digest: blob for blob in await stored(blobs)}
    assert await blobs.delete([listed[one]]) == (one,)
    assert await blobs.delete([listed[one]]) == ()
    assert await blobs.missing([one, two]) == (one,)
    await blobs.put(one, pieces(b"one"), 3)
    assert await read(blobs, one) == [b"one"]


async def test_discarded_blobs_are_gone_and_may_be_discarded_again(blobs: BlobStore) -> None:
    one, two = digest_of(b"one"), digest_of(b"two")
    await blobs.put(one, pieces(b"one"), 3)
    await blobs.put(two, pieces(b"two"), 3)
    await blobs.discard([one, digest_of(b"never stored")])
    await blobs.discard([one])
    assert await blobs.missing([one, two]) == (one,)


async def test_a_blob_that_was_written_since_it_was_listed_is_not_deleted(blobs: BlobStore) -> None:
    digest = digest_of(b"new")
    await blobs.put(digest, pieces(b"new"), 3)
    (listed,) = await stored(blobs)
    assert await blobs.delete([replace(listed, written_unix_s=listed.written_unix_s - 5)]) == ()
    assert await blobs.missing([digest]) == ()


async def test_a_bucket_whose_listing_is_finer_than_its_looks_can_be_cleaned(
    object_store: ObjectStore,
) -> None:
    blobs, digest = S3Blobs(object_store.bucket(prefix="finer")), digest_of(b"old")
    await blobs.put(digest, pieces(b"old"), 3)
    (listed,) = await stored(blobs)
    assert await blobs.delete([replace(listed, written_unix_s=listed.written_unix_s + 0.9)]) == (digest,)


async def test_a_sweep_leaves_blobs_alone(kind: Kind) -> None:
    digest, bad = digest_of(b"good"), digest_of(b"bad")
    await kind.blobs.put(digest, pieces(b"good"), 4)
    await kind.blobs.put(bad, pieces(b"bad"), 3)
    await kind.spoil(bad, b"bax")
    with pytest.raises(IntegrityError):
        await read(kind.blobs, bad)
    assert await kind.blobs.sweep(1.0) == 0, "nothing is that old"
    would = await kind.blobs.sweep(1e12, dry_run=True)
    assert await kind.blobs.sweep(1e12) == would
    assert await kind.blobs.sweep(1e12) == 0
    assert await read(kind.blobs, digest) == [b"good"]


async def test_no_blob_is_larger_than_the_bound(blobs: BlobStore) -> None:
    with pytest.raises(InvalidInput, match="at most"):
        await blobs.put(digest_of(b"x"), pieces(b"x"), 10**12)


# --- the folder --------------------------------------------------------------------------------------


async def test_a_source_that_fails_leaves_nothing(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)

    async def failing() -> AsyncIterator[bytes]:
        yield bytes(1_500_000)
        raise TimeoutError("the peer went away")

    with pytest.raises(TimeoutError):
        await blobs.put(digest_of(b"x"), failing(), 10_000_000)
    assert files(tmp_path) == []


async def test_a_cancelled_put_leaves_nothing(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    started = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield bytes(1_500_000)
        started.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(blobs.put(digest_of(b"x"), stuck(), 10_000_000))
    await started.wait()
    assert len(files(tmp_path)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert files(tmp_path) == []


async def test_cancelling_at_any_moment_leaves_the_blob_or_nothing(tmp_path: Path) -> None:
    data = bytes_of(2_500_000)
    for step in range(25):
        root = tmp_path / str(step)
        blobs = FolderBlobs(root)
        task = asyncio.create_task(blobs.put(digest_of(data), pieces(data), len(data)))
        for _ in range(step * 4):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        left = files(root)
        assert all(path.read_bytes() == data and path.parent.parent.name == "sha256" for path in left)


@contextmanager
def full_disk_after(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow over that: the system refuses the write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_is_said_clearly_and_leaves_nothing(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    data = bytes_of(3_000_000)
    with full_disk_after(1_500_000), pytest.raises(StoreUnavailable, match="disk of the blob store is full"):
        await blobs.put(digest_of(data), pieces(data), len(data))
    assert files(tmp_path) == []
    await blobs.put(digest_of(data), pieces(data), len(data))
    assert len(files(tmp_path)) == 1


async def test_a_full_memory_store_is_said_clearly() -> None:
    with pytest.raises(StoreUnavailable, match="full"):
        await MemoryBlobs(capacity_bytes=3).put(digest_of(b"four"), pieces(b"four"), 4)


async def test_the_start_removes_what_a_crash_left_and_nothing_that_is_written_now(tmp_path: Path) -> None:
    first = FolderBlobs(tmp_path)
    (tmp_path / "unfinished" / "from-a-crash").write_bytes(b"half")
    started, going_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"slo"
        started.set()
        await going_on.wait()
        yield b"w"

    writing = asyncio.create_task(first.put(digest_of(b"slow"), slow(), 4))
    await started.wait()
    assert len(files(tmp_path)) == 2
    second = FolderBlobs(tmp_path)
    assert len(files(tmp_path)) == 1
    going_on.set()
    await writing
    assert await read(second, digest_of(b"slow")) == [b"slow"]
    assert len(files(tmp_path)) == 1


async def test_a_folder_that_cannot_be_made_is_said_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable) as caught:
        FolderBlobs(tmp_path / "file" / "blobs")
    assert str(tmp_path) not in str(caught.value)


async def test_a_sweep_spares_what_is_being_written(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    started, going_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"slo"
        started.set()
        await going_on.wait()
        yield b"w"

    writing = asyncio.create_task(blobs.put(digest_of(b"slow"), slow(), 4))
    await started.wait()
    (tmp_path / "unfinished" / "from-a-crash").write_bytes(b"half")
    assert await blobs.sweep(1e12) == 1
    going_on.set()
    await writing
    assert await read(blobs, digest_of(b"slow")) == [b"slow"]


async def test_a_damaged_blob_that_was_put_again_meanwhile_stays(tmp_path: Path) -> None:
    first, second = FolderBlobs(tmp_path), FolderBlobs(tmp_path)
    digest = digest_of(b"right")
    await first.put(digest, pieces(b"right"), 5)
    path = tmp_path / "sha256" / digest[7:9] / digest[7:]
    path.chmod(0o600)
    path.write_bytes(b"wrong")
    inode = path.stat().st_ino
    with pytest.raises(IntegrityError):
        await read(second, digest)
    await second.put(digest, pieces(b"right"), 5)
    first._set_aside(digest, inode)  # the first one found the damage, too, and is late
    assert await read(first, digest) == [b"right"]


async def test_a_disk_that_is_really_full_is_said_clearly_and_leaves_nothing(tmp_path: Path) -> None:
    data = bytes_of(3_000_000)
    with tiny_disk(tmp_path / "disk", 2_000_000):
        blobs = FolderBlobs(tmp_path / "disk" / "blobs")
        with pytest.raises(StoreUnavailable, match="is full: free some space") as caught:
            await blobs.put(digest_of(data), pieces(data), len(data))
        assert caught.value.metadata["errno"] == errno.errorcode[errno.ENOSPC]
        assert files(tmp_path / "disk" / "blobs") == []
        await blobs.put(digest_of(data[:9]), pieces(data[:9]), 9)
        assert os.listdir(tmp_path / "disk" / "blobs" / "unfinished") == []


async def test_blobs_leave_the_reserve_of_their_disk_to_others(tmp_path: Path) -> None:
    """Only what is stored is refused: blobs are read and deleted, others write, and room is used again."""
    data = [bytes_of(300_000 + number) for number in range(20)]
    with tiny_disk(tmp_path / "disk", 4_000_000):
        reserve = Reserve(
            "the folder of files",
            "delete some",
            SystemClock(),
            reserve_bytes=1_500_000,
            measure=lambda: disk_usage(tmp_path / "disk").free,
        )
        blobs = FolderBlobs(tmp_path / "disk" / "blobs", reserve)
        outcomes = await asyncio.gather(
            *(blobs.put(digest_of(one), pieces(one), len(one)) for one in data), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if outcome is not None]
        stored = [one for one, outcome in zip(data, outcomes, strict=True) if outcome is None]
        assert {type(outcome) for outcome in refused} == {StorageFull}
        assert 6 <= len(stored) <= 8
        assert disk_usage(tmp_path / "disk").free >= 1_500_000
        (tmp_path / "disk" / "settlements").write_bytes(bytes(1_400_000))
        await blobs.put(digest_of(stored[0]), pieces(stored[0]), len(stored[0]))  # it is there
        assert b"".join(await read(blobs, digest_of(stored[1]))) == stored[1]
        await blobs.discard([digest_of(one) for one in stored])
        (tmp_path / "disk" / "settlements").unlink()
        await asyncio.sleep(0.2)
        await blobs.put(digest_of(data[-1]), pieces(data[-1]), len(data[-1]))


# --- the bucket --------------------------------------------------------------------------------------


async def test_nothing_in_a_bucket_is_overwritten(object_store: ObjectStore) -> None:
    """Two writers that both found nothing: the second one's request is refused by the server itself."""
    bucket = object_store.bucket(prefix="two-writers")
    digest = digest_of(b"first")
    await S3Blobs(bucket).put(digest, pieces(b"first"), 5)
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        await obstore.put_async(bucket, "sha256/" + digest[7:], b"other", mode="create")
    assert await read(S3Blobs(bucket), digest) == [b"first"]


async def test_a_bucket_that_is_not_there_is_said_so(object_store: ObjectStore) -> None:
    blobs = S3Blobs(object_store.bucket(name="nobody-made-it"))
    with pytest.raises(StoreUnavailable, match="no such bucket"):
        await blobs.put(digest_of(b"x"), pieces(b"x"), 1)


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_an_object_store_that_is_away_is_an_error_soon_and_never_a_hang(
    own_object_store: ObjectStore, how: str
) -> None:
    blobs = S3Blobs(own_object_store.bucket(), quick_s=1.0, bulk_s=2.0)
    digest, other = digest_of(b"here"), digest_of(b"other")
    await blobs.put(digest, pieces(b"here"), 4)
    (listed,) = await stored(blobs)
    (own_object_store.freeze if how == "frozen" else own_object_store.kill)()
    try:
        async with asyncio.timeout(60):
            for call in (
                blobs.put(other, pieces(b"other"), 5),
                read(blobs, digest),
                blobs.missing([digest, other]),
                stored(blobs),
                blobs.delete([listed]),
                blobs.sweep(1.0),
            ):
                with pytest.raises(StoreUnavailable) as caught:
                    await call
                assert str(own_object_store.port) not in caught.value.message
                assert caught.value.retry_after_s
    finally:
        own_object_store.thaw()
    if how == "frozen":
        assert await read(blobs, digest) == [b"here"]
        await blobs.put(other, pieces(b"other"), 5)
        assert await read(blobs, other) == [b"other"]


async def test_refused_credentials_are_named(object_store: ObjectStore, tmp_path: Path) -> None:
    """A server that answers 403: what a wrong key gets from a real store."""
    async with object_store.refusing() as address:
        blobs = S3Blobs(object_store.bucket(endpoint=f"http://{address}"), quick_s=5.0)
        with pytest.raises(StoreUnavailable, match="FAIRWAY_S3_CREDENTIALS_FILE"):
            await blobs.put(digest_of(b"x"), pieces(b"x"), 1)
