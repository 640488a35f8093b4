"""Logs of the processes: one file each, bounded, with a few older ones beside it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

MAX_LOG_BYTES: Final = 64 * 1024 * 1024
_KEPT_LOGS: Final = 3
_TAIL_BYTES: Final = 16 * 1024
_COPY_BYTES: Final = 1024 * 1024


def rotate_log(path: Path) -> None:
    """Move an existing log aside: NAME.log becomes NAME.log.1, and so on; the oldest is dropped."""
    if not path.exists() or path.stat().st_size == 0:
        return
    _make_room(path)
    path.replace(_older(path, 1))


def bound_log(path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Return True when a log above ``max_bytes`` was moved aside while its process goes on writing to it.

    The process keeps the file that it has open, so the content is copied and the file cut to nothing. A
    line that is written between the two is lost. A copy that the disk refuses is given up, the cut is not.
    Raises OSError when the log can be neither looked at nor cut.
    """
    if path.stat().st_size <= max_bytes:
        return False
    with path.open("rb+") as log:
        with contextlib.suppress(OSError):
            _make_room(path)
            _copy(log.fileno(), _older(path, 1), limit=2 * max_bytes)
        log.truncate(0)
    return True


def tail(path: Path, *, lines: int = 15) -> str:
    """Return the last lines of a log, "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _copy(source: int, target: Path, *, limit: int) -> None:
    """Copy at most ``limit`` bytes; a target that cannot be completed is removed."""
    done = 0
    try:
        with target.open("wb") as file:
            while done < limit and (data := os.read(source, _COPY_BYTES)):
                file.write(data)
                done += len(data)
    except OSError:
        target.unlink(missing_ok=True)
        raise


def _make_room(path: Path) -> None:
    """Give every older log the next number; the last one is dropped."""
    for number in range(_KEPT_LOGS - 1, 0, -1):
        older = _older(path, number)
        if older.exists():
            older.replace(_older(path, number + 1))


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
