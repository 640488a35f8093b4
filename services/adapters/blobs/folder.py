"""Blobs in a folder: ``<root>/sha256/<2 hex>/<64 hex>``, each written to a temporary file, verified, synced
and renamed.

Several processes may share the folder. A file that is being written is locked: at its start a process removes
only the files that a crash left. ``<root>/lock`` is held while a blob is added or removed. A damaged blob is
moved to ``<root>/damaged``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, TypeVar

import structlog

from services.adapters.blobs.digests import PIECE_BYTES, Verifier, damaged, hex_of, is_name
from services.adapters.synced_files import disk_errors, on_disk, remove_unlocked, sync_folder
from services.core.errors import IntegrityError, NotFound
from services.ports.blob_store import MAX_BLOB_BYTES, StoredBlob
from services.runtime.reserve import Reserve

log = structlog.get_logger()
T = TypeVar("T")
_WRITE_BYTES: Final = 1024 * 1024
_STORE: Final = "blob store"


class FolderBlobs:
    """``BlobStore`` in a folder of a local file system. File I/O runs in the loop's thread pool."""

    def __init__(self, root: Path | str, reserve: Reserve | None = None) -> None:
        """Create the folder and remove the files of interrupted writes. ``reserve`` is that of its disk.

        Raises StoreUnavailable.
        """
        self._root = Path(root)
        self._reserve = reserve
        self._blobs = self._root / "sha256"
        self._unfinished = self._root / "unfinished"
        self._damaged = self._root / "damaged"
        with disk_errors(_STORE):
            for folder in (self._blobs, self._unfinished, self._damaged):
                folder.mkdir(parents=True, exist_ok=True)
            for leftover in sorted(self._unfinished.iterdir()):
                remove_unlocked(leftover)

    async def put(self, digest: str, data: AsyncIterable[bytes], size_bytes: int) -> None:
        verifier = Verifier(digest, size_bytes, most_bytes=MAX_BLOB_BYTES)
        if await _on_disk(lambda: self._is_stored(digest, size_bytes)):
            return
        upload = _Upload(self._unfinished, self._path(digest), verifier, self._changing)
        room = ExitStack()
        try:
            if self._reserve is not None:
                await _on_disk(partial(room.enter_context, self._reserve.taken(size_bytes)))
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
            room.close()

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        reader = _Reader(digest, self._path(digest))
        try:
            if not await _on_disk(partial(reader.open_verified, offset_bytes)):
                await _on_disk(partial(self._set_aside, digest, reader.inode))
                raise damaged(digest)
            while piece := await _on_disk(reader.read):
                yield piece
        finally:
            reader.close()

    async def missing(self, digests: Sequence[str]) -> tuple[str, ...]:
        paths = [(digest, self._path(digest)) for digest in digests]
        return await _on_disk(lambda: tuple(digest for digest, path in paths if not path.is_file()))

    async def stored(self) -> AsyncGenerator[tuple[StoredBlob, ...], None]:
        for folder in await _on_disk(lambda: sorted(filter(Path.is_dir, self._blobs.iterdir()))):
            page = await _on_disk(partial(_listed, folder))
            if page:
                yield page

    async def delete(self, blobs: Sequence[StoredBlob]) -> tuple[str, ...]:
        return await _on_disk(lambda: tuple(blob.digest for blob in blobs if self._delete(blob)))

    async def discard(self, digests: Sequence[str]) -> None:
        paths = [self._path(digest) for digest in digests]
        # The lock is not taken, because a frozen process may hold it. Its holders expect that blobs vanish.
        await _on_disk(partial(_unlink, paths))

    async def sweep(self, before_unix_s: float, *, dry_run: bool = False) -> int:
        return await _on_disk(partial(self._sweep, before_unix_s, dry_run))

    def _path(self, digest: str) -> Path:
        name = hex_of(digest)
        return self._blobs / name[:2] / name

    def _is_stored(self, digest: str, size_bytes: int) -> bool:
        """Return whether the blob is stored. Raises IntegrityError if it is good but has another size."""
        try:
            stored = self._path(digest).stat()
        except FileNotFoundError:
            return False
        if stored.st_size == size_bytes:
            return True
        reader = _Reader(digest, self._path(digest))
        try:
            is_good = reader.open_verified(0)
        finally:
            reader.close()
        if not is_good:
            self._set_aside(digest, reader.inode)
            return False
        raise IntegrityError(
            f"{digest} is stored with {stored.st_size} bytes instead of {size_bytes}",
            digest=digest,
            size_bytes=size_bytes,
        )

    def _set_aside(self, digest: str, inode: int) -> None:
        """Move a damaged blob to ``damaged``, unless it was stored again meanwhile."""
        path = self._path(digest)
        with self._changing(), suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                os.utime(path)
                path.rename(self._damaged / f"{path.name}.{inode}")
                log.warning("blob.found_damaged", digest=digest)

    def _delete(self, blob: StoredBlob) -> bool:
        path = self._path(blob.digest)
        with self._changing(), suppress(FileNotFoundError):
            if path.stat().st_mtime == blob.written_unix_s:
                path.unlink()
                return True
        return False

    def _sweep(self, before_unix_s: float, dry_run: bool) -> int:
        swept = 0
        for path in sorted([*self._damaged.iterdir(), *self._unfinished.iterdir()]):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before_unix_s:
                    swept += 1 if dry_run else remove_unlocked(path)
        return swept

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock under which blobs are added and removed."""
        lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


class _Upload:
    """A locked temporary file that becomes a blob or is removed by ``close``. Only one thread at a time may
    call it."""

    def __init__(
        self,
        folder: Path,
        target: Path,
        verifier: Verifier,
        changing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._changing = changing
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
            self._file.close()  # another process removed the file before it was locked

    def write(self, block: bytes) -> None:
        assert self._file is not None
        self._verifier.feed(block)
        view = memoryview(block)
        while view:
            view = view[self._file.write(view) or 0 :]

    def finish(self, rest: bytes) -> None:
        """Store the blob so that it survives a power failure. Raises IntegrityError."""
        self.write(rest)
        self._verifier.finish()
        assert self._path is not None
        assert self._file is not None
        os.fchmod(self._file.fileno(), 0o444)
        os.fsync(self._file.fileno())
        self._target.parent.mkdir(exist_ok=True)
        with self._changing():
            self._path.rename(self._target)
        self._path = None
        for folder in (self._target.parent, self._target.parent.parent):
            sync_folder(folder)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class _Reader:
    """An open blob, from ``open_verified`` until ``close``. Only one thread at a time may call it."""

    def __init__(self, digest: str, path: Path) -> None:
        self._digest = digest
        self._path = path
        self._file: FileIO | None = None
        self.inode = 0

    def open_verified(self, offset_bytes: int) -> bool:
        """Return whether the blob has its digest; ``read`` then starts at the offset. Raises NotFound."""
        try:
            self._file = FileIO(self._path, "rb")
        except FileNotFoundError:
            raise NotFound(f"{self._digest} is not stored", digest=self._digest) from None
        self.inode = os.fstat(self._file.fileno()).st_ino
        try:
            # A read error, such as one of a bad sector, also counts as damage.
            is_good = hashlib.file_digest(self._file, "sha256").hexdigest() == hex_of(self._digest)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        self._file.seek(offset_bytes)
        return is_good

    def read(self) -> bytes:
        """Return the next piece, or empty bytes at the end."""
        assert self._file is not None
        return self._file.read(PIECE_BYTES)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _unlink(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _listed(folder: Path) -> tuple[StoredBlob, ...]:
    found = []
    for path in sorted(folder.iterdir()):
        if not is_name(path.name):
            continue
        with suppress(FileNotFoundError):
            status = path.stat()
            found.append(StoredBlob("sha256:" + path.name, status.st_size, status.st_mtime))
    return tuple(found)


async def _on_disk(work: Callable[[], T]) -> T:
    return await on_disk(work, store=_STORE)
