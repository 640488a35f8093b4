"""Files that survive a power failure: blocking calls for a thread."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO, Literal


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
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open_private(path, "ab") as file:
        size_bytes = file.tell()
        try:
            file.write(b"" if not size_bytes or _ends_line(path) else b"\n")
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
