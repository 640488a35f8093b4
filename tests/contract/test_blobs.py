"""What every ``BlobStore`` does, checked on a folder and in memory alike."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest

from services.adapters.folder_blobs import FolderBlobs
from services.adapters.memory_blobs import MemoryBlobs
from services.core.errors import IntegrityError, InvalidInput, NotFound, StoreUnavailable

AnyBlobs = FolderBlobs | MemoryBlobs
PIECE_BYTES = 256 * 1024


@pytest.fixture(params=["folder", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> AnyBlobs:
    return FolderBlobs(tmp_path / "blobs") if request.param == "folder" else MemoryBlobs()


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def bytes_of(size: int) -> bytes:
    return bytes(number * 31 % 251 for number in range(997)) * (size // 997) + b"x" * (size % 997)


async def pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        await asyncio.sleep(0)
        yield data[start : start + size]


async def read(blobs: AnyBlobs, digest: str, offset_bytes: int = 0) -> list[bytes]:
    async with aclosing(blobs.get(digest, offset_bytes)) as received:
        return [piece async for piece in received]


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 3_000_001])
async def test_what_was_put_comes_back_in_bounded_pieces(blobs: AnyBlobs, size: int) -> None:
    data = bytes_of(size)
    await blobs.put(digest_of(data), pieces(data), size)
    received = await read(blobs, digest_of(data))
    assert b"".join(received) == data
    assert all(0 < len(piece) <= PIECE_BYTES for piece in received)


@pytest.mark.parametrize("offset", [1, PIECE_BYTES, 299_999, 300_000, 400_000])
async def test_get_starts_at_an_offset(blobs: AnyBlobs, offset: int) -> None:
    data = bytes_of(300_000)
    await blobs.put(digest_of(data), pieces(data), len(data))
    assert b"".join(await read(blobs, digest_of(data), offset)) == data[offset:]


async def test_what_is_not_there_is_said_so(blobs: AnyBlobs) -> None:
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
    blobs: AnyBlobs, sent: bytes, announced: int
) -> None:
    digest = digest_of(b"right")
    with pytest.raises(IntegrityError):
        await blobs.put(digest, pieces(sent), announced)
    assert await blobs.missing([digest]) == (digest,)
    await blobs.put(digest, pieces(b"right"), 5)
    assert await read(blobs, digest) == [b"right"]


async def test_too_many_bytes_are_refused_before_the_end(blobs: AnyBlobs) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            assert sent < 100
            yield bytes(1000)

    with pytest.raises(IntegrityError):
        await blobs.put(digest_of(b"x"), endless(), 10_000)


async def test_a_stored_blob_stays_as_it_is(blobs: AnyBlobs) -> None:
    digest = digest_of(b"first")
    await blobs.put(digest, pieces(b"first"), 5)
    await blobs.put(digest, pieces(b"wrong"), 5)
    with pytest.raises(IntegrityError):
        await blobs.put(digest, pieces(b"longer"), 6)
    assert await read(blobs, digest) == [b"first"]


async def test_simultaneous_puts_of_one_blob_all_succeed(blobs: AnyBlobs) -> None:
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
async def test_only_a_digest_names_a_blob(blobs: AnyBlobs, digest: str) -> None:
    with pytest.raises(InvalidInput):
        await blobs.put(digest, pieces(b"x"), 1)
    with pytest.raises(InvalidInput):
        await read(blobs, digest)
    with pytest.raises(InvalidInput):
        await blobs.missing([digest])


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
