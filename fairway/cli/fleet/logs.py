"""Log files of the processes: one each, bounded, with a few older ones beside it."""

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
    """Rename an existing log: NAME.log becomes NAME.log.1, and so on; the oldest is deleted."""
    if not path.exists() or path.stat().st_size == 0:
        return
    _make_room(path)
    path.replace(_older(path, 1))


def bound_log(path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Copy and empty a log above ``max_bytes`` while its process writes to it; return True if it did.

    The process has the file open, so the content is copied and the file truncated. A line written between
    the two is lost. If the copy fails on disk errors, the file is still truncated. Raises OSError when the
    log can be neither read nor truncated.
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
    """Return the last lines of a log, "" without a log."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _copy(source: int, target: Path, *, limit: int) -> None:
    """Copy at most ``limit`` bytes; an incomplete target is removed."""
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
    """Increase the number of every older log; the last one is deleted."""
    for number in range(_KEPT_LOGS - 1, 0, -1):
        older = _older(path, number)
        if older.exists():
            older.replace(_older(path, number + 1))


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
