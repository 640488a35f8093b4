"""Blobs in a folder: ``<root>/sha256/<2 hex>/<64 hex>``, each written aside, verified, synced and renamed.

Several processes may share the folder: a file that is being written is locked, so that the start of one
process removes what a crash left and nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, TypeVar

from services.adapters.digests import PIECE_BYTES, Verifier, hex_of
from services.adapters.threads import in_thread
from services.core.errors import IntegrityError, NotFound, StoreUnavailable

T = TypeVar("T")
_WRITE_BYTES: Final = 1024 * 1024
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FolderBlobs:
    """``BlobStore`` in a folder of a local file system. File I/O runs in the loop's thread pool."""

    def __init__(self, root: Path | str) -> None:
        """Makes the folder and removes what interrupted writes left. Raises StoreUnavailable."""
        self._root = Path(root)
        self._blobs = self._root / "sha256"
        self._unfinished = self._root / "unfinished"
        with _disk_errors():
            self._blobs.mkdir(parents=True, exist_ok=True)
            self._unfinished.mkdir(exist_ok=True)
            for leftover in sorted(self._unfinished.iterdir()):
                _remove_unlocked(leftover)

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        verifier = Verifier(digest, size_bytes)
        if await _on_disk(lambda: self._is_stored(digest, size_bytes)):
            return
        upload = _Upload(self._unfinished, self._path(digest), verifier)
        try:
            await _on_disk(upload.open)
            buffer = bytearray()
            async for piece in data:
                verifier.expect(len(piece))
                buffer += piece
                if len(buffer) >= _WRITE_BYTES:
                    full, buffer = bytes(buffer), bytearray()
                    await _on_disk(partial(upload.write, full))
            await _on_disk(partial(upload.finish, bytes(buffer)))
        finally:
            upload.close()

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        reader = _Reader(digest, self._path(digest), offset_bytes)
        try:
            while piece := await _on_disk(reader.read):
                yield piece
        finally:
            reader.close()

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        paths = [(digest, self._path(digest)) for digest in digests]
        return await _on_disk(lambda: tuple(digest for digest, path in paths if not path.is_file()))

    def _path(self, digest: str) -> Path:
        name = hex_of(digest)
        return self._blobs / name[:2] / name

    def _is_stored(self, digest: str, size_bytes: int) -> bool:
        try:
            stored_bytes = self._path(digest).stat().st_size
        except FileNotFoundError:
            return False
        if stored_bytes != size_bytes:
            raise IntegrityError(
                f"{digest} is stored with {stored_bytes} bytes instead of {size_bytes}",
                digest=digest,
                size_bytes=size_bytes,
            )
        return True


class _Upload:
    """A locked file beside the blobs that becomes one, or is removed by ``close``. One thread at a time."""

    def __init__(self, folder: Path, target: Path, verifier: Verifier) -> None:
        self._folder = folder
        self._target = target
        self._verifier = verifier
        self._file: FileIO | None = None
        self._path: Path | None = None

    def open(self) -> None:
        while True:
            descriptor, name = tempfile.mkstemp(dir=self._folder)
            self._file, self._path = FileIO(descriptor, "wb"), Path(name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return
            self._file.close()  # another process started and cleaned up before the lock was there

    def write(self, block: bytes) -> None:
        assert self._file is not None
        self._verifier.feed(block)
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) or 0 :]

    def finish(self, rest: bytes) -> None:
        """The blob is stored and survives a power cut. Raises IntegrityError."""
        self.write(rest)
        self._verifier.finish()
        assert self._path is not None
        assert self._file is not None
        os.fchmod(self._file.fileno(), 0o444)
        os.fsync(self._file.fileno())
        self._target.parent.mkdir(exist_ok=True)
        self._path.rename(self._target)
        self._path = None
        for folder in (self._target.parent, self._target.parent.parent):
            _sync_folder(folder)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class _Reader:
    """An open blob, from its first ``read`` until ``close``. One thread at a time."""

    def __init__(self, digest: str, path: Path, offset_bytes: int) -> None:
        self._digest = digest
        self._path = path
        self._offset_bytes = offset_bytes
        self._file: FileIO | None = None

    def read(self) -> bytes:
        """Return the next piece, empty at the end. Raises NotFound."""
        if self._file is None:
            try:
                self._file = FileIO(self._path, "rb")
            except FileNotFoundError:
                raise NotFound(f"{self._digest} is not stored", digest=self._digest) from None
            self._file.seek(self._offset_bytes)
        return self._file.read(PIECE_BYTES)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


async def _on_disk(work: Callable[[], T]) -> T:
    with _disk_errors():
        return await in_thread(work)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """What the operating system refuses leaves as StoreUnavailable, without a path in its text."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = "the disk of the blob store is full: free some space and try again"
        else:
            message = f"the blob store cannot be used: {os.strerror(error.errno or errno.EIO)}"
        raise StoreUnavailable(message, errno=errno.errorcode.get(error.errno or 0, "EIO")) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unlocked(path: Path) -> None:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        path.unlink(missing_ok=True)
