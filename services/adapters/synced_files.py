"""Files that survive a power failure: blocking calls for a thread."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, Literal, TypeVar

from services.adapters.threads import in_thread
from services.core.errors import StoreUnavailable

T = TypeVar("T")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def own_folder(folder: Path) -> int:
    """Return a descriptor that locks the folder against other processes until it is closed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def append_to_file(path: Path, data: bytes) -> int:
    """Append and sync lines; return the size of the file. An incomplete append is truncated again."""
    return append_bytes(path, data, after=lambda: b"" if _ends_line(path) else b"\n")


def append_bytes(path: Path, data: bytes, *, after: Callable[[], bytes] = bytes) -> int:
    """The same for any bytes. ``after`` returns what precedes them unless the file is empty."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_private(path, "ab") as file:
        size_bytes = file.tell()
        try:
            file.write(after() if size_bytes else b"")
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, size_bytes)
            raise
        written_bytes = file.tell()
    if not size_bytes:
        sync_folder(path.parent)  # the file may be new
    return written_bytes


def _ends_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def replace_file(path: Path, data: bytes) -> int:
    """Replace the content of the file by the data and sync it; return its size."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with open_private(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)
    return len(data)


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def open_private(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    """Open a file that no other user may read."""
    kind = os.O_APPEND if mode == "ab" else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | kind, 0o600), mode)


async def on_disk(work: Callable[[], T], *, store: str) -> T:
    """Return the result of the work, done in a thread. ``store`` names the store in errors."""
    with disk_errors(store):
        return await in_thread(work)


@contextmanager
def disk_errors(store: str) -> Iterator[None]:
    """Turn an OSError into StoreUnavailable, whose text contains no path."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            message = f"the disk of the {store} is full: free some space and try again"
        else:
            message = f"the {store} cannot be used: {os.strerror(error.errno or errno.EIO)}"
        raise StoreUnavailable(message, errno=errno.errorcode.get(error.errno or 0, "EIO")) from error


def remove_unlocked(path: Path) -> bool:
    """Remove a file that no process is writing; return whether it was removed."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
        return True
    return False
