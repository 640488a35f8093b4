"""Blocking file operations of ``cache.py``: folders of verified versions below one root.

    root/.lock                     held by the one process that owns the root
    root/manifests/<hex>.json      canonical manifests, verified by their name
    root/partial/<folder>/<path>   files being fetched; only verified chunks are written, in any order
    root/ready/<folder>/<path>     complete: a folder is renamed here at the end, never written again

Equal files of two folders are one on the disk: a hard link. No file with another link is written to.
A folder's name is the version's hex digest, plus a hash of the selected paths if only some were selected.
Every function may raise OSError; the caller turns it into a domain error.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from services.adapters.threads import in_thread
from services.core.manifest import ManifestFile, sha256_of

_MAX_CHECK_THREADS: Final = 4


class Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


class ModelFolders:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = -1

    def open(self) -> dict[str, float]:
        """Lock the root and return the complete folders, each with the time of its last use (mtime).

        Raises BlockingIOError when another process owns it.
        """
        self.make()
        if self._lock < 0:  # otherwise an earlier call took the lock and was cancelled
            self._lock = self._own()
        for entry in (self._root / "partial").iterdir():
            if entry.name.endswith(".gone"):
                shutil.rmtree(entry)
        return {entry.name: entry.stat().st_mtime for entry in (self._root / "ready").iterdir()}

    def make(self) -> None:
        """Create the folders of the root that are missing."""
        for part in ("manifests", "partial", "ready"):
            (self._root / part).mkdir(parents=True, exist_ok=True)

    def _own(self) -> int:
        lock = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return lock

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def ready(self, folder: str) -> Path:
        return self._root / "ready" / folder

    def partial(self, folder: str) -> Path:
        return self._root / "partial" / folder

    def partials(self) -> list[str]:
        """Return the names of the incomplete folders, the one changed longest ago first."""
        entries = sorted((entry.stat().st_mtime, entry.name) for entry in (self._root / "partial").iterdir())
        return [name for _, name in entries]

    def inodes(self, folder: str) -> dict[int, int]:
        """Return the sizes of a complete folder's files by inode: what folders share has one."""
        return {each.st_ino: each.st_size for each in _stats(self.ready(folder))}

    def partial_inodes(self, folder: str, *, links: bool = True) -> dict[int, int]:
        """Return what a partial folder's files have on the disk, as ``inodes``, also of those with links."""
        found = [each for each in _stats(self.partial(folder)) if links or each.st_nlink == 1]
        return {each.st_ino: min(each.st_size, 512 * each.st_blocks) for each in found}

    def link_twin(self, folder: str, file: ManifestFile) -> int:
        """Make the partial file a link to an equal file of a complete folder, every chunk of which is good.

        Return its inode, 0 where there is none.
        """
        path = self.partial(folder) / file.path
        for other in sorted((self._root / "ready").iterdir()):
            twin = other / file.path
            try:
                if not is_equal(twin, file):
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                os.link(twin, path)
            except OSError:  # it was evicted meanwhile, or the disk has no links
                continue
            return path.stat().st_ino
        return 0

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._root).free

    def read_manifest(self, digest: str) -> bytes | None:
        path = self._manifest_path(digest)
        return path.read_bytes() if path.exists() else None

    def write_manifest(self, digest: str, body: bytes) -> None:
        path = self._manifest_path(digest)
        staged = path.with_suffix(".part")
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have emptied the cache
        try:
            staged.unlink(missing_ok=True)
            _write(staged, body, 0)
            with staged.open("rb") as stream:
                os.fsync(stream.fileno())
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)  # there only when the disk was full

    def forget_manifests(self, version: str, needed: set[str]) -> None:
        """Remove a version's manifest and its base's, unless one of ``needed`` (hex digests) needs them."""
        needed = needed | {self._base_of(one) for one in needed}
        for one in {version, self._base_of(version)} - needed:
            self._manifest_path(one).unlink(missing_ok=True)

    def _base_of(self, version: str) -> str:
        """Return the base that the manifest of an adapter names, else the version; both are hex digests."""
        found = re.search(rb'"base_digest":"sha256:([0-9a-f]{64})"', self.read_manifest(version) or b"")
        return found[1].decode() if found else version

    def present(self, folder: str, files: Sequence[ManifestFile]) -> bool:
        """Return whether the complete folder has these files, each with its size."""
        root = self.ready(folder)
        try:
            return all((root / file.path).stat().st_size == file.size_bytes for file in files)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def demote(self, folder: str) -> None:
        """Make a complete folder a partial one again, so that its good chunks are reused.

        If the folder was deleted, the partial files of an earlier download stay.
        """
        if self.ready(folder).exists():
            self.drop_partial(folder)
            self.ready(folder).rename(self.partial(folder))

    def promote(self, folder: str, files: Sequence[ManifestFile]) -> Path:
        """Make the partial folder complete by one rename, after its bytes are synced."""
        source, target = self.partial(folder), self.ready(folder)
        wanted = {source / file.path for file in files}
        for path in sorted(source.rglob("*"), reverse=True):
            if path.is_dir():
                _sync(path)
            elif path not in wanted:
                path.unlink()
        _sync(source)
        source.rename(target)
        _sync(target.parent)
        return target

    def touch(self, folder: str) -> None:
        os.utime(self.ready(folder))

    def drop(self, folder: str) -> None:
        """Remove a complete folder. A kill in between leaves no partial folder that looks complete."""
        if not self.ready(folder).exists():
            return
        removed = self.partial(folder + ".gone")
        shutil.rmtree(removed, ignore_errors=True)
        self.ready(folder).rename(removed)
        shutil.rmtree(removed)

    def drop_partial(self, folder: str) -> None:
        shutil.rmtree(self.partial(folder), ignore_errors=True)

    def begin_file(self, folder: str, file: ManifestFile) -> Path:
        """Return the path of a partial file, which exists, and which no other folder has."""
        path = self.partial(folder) / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_nlink > 1:
            path.unlink()
        path.touch()
        return path

    def _manifest_path(self, digest: str) -> Path:
        return self._root / "manifests" / (digest.removeprefix("sha256:") + ".json")


def _stats(root: Path) -> list[os.stat_result]:
    """Return the stats of the files below ``root`` that are not removed meanwhile."""
    found = []
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            found.append(path.stat())
    return [each for each in found if stat.S_ISREG(each.st_mode)]


def read_chunk(path: Path, file: ManifestFile, index: int) -> bytes:
    """Return the bytes of the chunk on disk, fewer where the file ends before."""
    with path.open("rb") as stream:
        stream.seek(file.start(index))
        return stream.read(file.chunk_bytes(index))


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a complete folder has a chunk, as long as it is there and undamaged."""

    path: Path
    file: ManifestFile
    index: int

    @property
    def digest(self) -> str:
        return self.file.chunks[self.index]

    def read(self) -> bytes | None:
        """Return the chunk, verified; None for another one, or for no file. Blocks for I/O."""
        try:
            data = read_chunk(self.path, self.file, self.index)
        except OSError:
            return None
        return data if sha256_of(data) == self.digest else None


def chunk_is_good(path: Path, file: ManifestFile, index: int, whole: Hash | None = None) -> bool:
    """Return whether the chunk on disk has its digest; a good one is added to ``whole``. Raises OSError."""
    data = read_chunk(path, file, index)
    if sha256_of(data) != file.chunks[index]:
        return False
    if whole is not None:
        whole.update(data)
    return True


def good_chunks(path: Path, file: ManifestFile) -> list[bool]:
    """Return which chunks on disk have their digests."""
    return [chunk_is_good(path, file, index) for index in range(len(file.chunks))]


def is_equal(path: Path, file: ManifestFile) -> bool:
    """Return whether a file has these bytes. Raises OSError."""
    if not file.size_bytes or path.stat().st_size != file.size_bytes:
        return False
    whole = hashlib.sha256()
    good = all(chunk_is_good(path, file, index, whole) for index in range(len(file.chunks)))
    return good and "sha256:" + whole.hexdigest() == file.digest


def place_chunk(path: Path, offset: int, data: bytes) -> None:
    """Write a verified chunk at its offset. It is durable after ``finish_file``."""
    _write(path, data, offset)


def finish_file(path: Path, file: ManifestFile) -> bool:
    """Return whether a file with all its chunks has its digest; its bytes are on the disk then."""
    os.truncate(path, file.size_bytes)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest() == file.digest


def _write(path: Path, data: bytes, offset: int) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.lseek(target, offset, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
    finally:
        os.close(target)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


async def chunks_are_good(root: Path, files: Sequence[ManifestFile]) -> bool:
    """Return whether every chunk below ``root`` has its digest. Raises OSError for an unreadable file.

    The bytes pass through the page cache, so an engine that maps the files next reads the same bytes. The
    exception: the pages are evicted, and the disk returns other bytes. A later write is not detected.
    Hashing releases the interpreter lock, so threads share the work. A cancelled caller waits for one chunk.
    """
    places = [
        ChunkPlace(root / file.path, file, index) for file in files for index in range(len(file.chunks))
    ]
    count = max(1, min(_MAX_CHECK_THREADS, os.cpu_count() or 1, len(places)))
    stop = threading.Event()
    parts = (in_thread(_all_good, places[part::count], stop) for part in range(count))
    checks = asyncio.gather(*parts, return_exceptions=True)
    try:
        found = await asyncio.shield(checks)
    finally:
        stop.set()
        await asyncio.wait({checks})
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return all(found)


def _all_good(places: Sequence[ChunkPlace], stop: threading.Event) -> bool:
    """Return whether all are good; False early if another thread found a bad one, or on cancellation."""
    is_good = False
    try:
        is_good = not any(stop.is_set() or not chunk_is_good(at.path, at.file, at.index) for at in places)
    finally:
        if not is_good:
            stop.set()
    return is_good
