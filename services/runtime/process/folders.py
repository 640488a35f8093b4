"""Cache folders and temporary folders of the user, from the environment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the cache folder of this user's programs (XDG base directories)."""
    named = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    return Path(named) if named.startswith("/") else Path.home() / ".cache"


def compile_folder(state_dir: Path, environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for compiled files: ``fairway`` in the user's cache folder.

    It is below ``state_dir`` if the cache folder is missing, not writable or mounted without execution, as in
    a container whose HOME is on a temporary file system.
    """
    try:
        folder = cache_folder(environ) / "fairway"
    except RuntimeError:  # no HOME, and the user is not in the passwd file
        return state_dir.absolute() / "compiled"
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        usable = os.access(there, os.W_OK | os.X_OK) and not os.statvfs(there).f_flag & os.ST_NOEXEC
    except OSError:  # this user has no access to a parent folder
        usable = False
    return folder if usable else state_dir.absolute() / "compiled"


def keep_newest(folder: Path, most_bytes: int, *, unused_s: float = 0.0) -> None:
    """Remove the oldest folders in ``folder`` until the rest takes at most ``most_bytes``. Raises OSError.

    Other processes may do the same at the same time. Folders used within ``unused_s`` stay.
    """
    youngest_s = time.time() - unused_s
    found: list[tuple[float, Path, int]] = []
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size_bytes = sum(path.stat().st_size for path in entry.rglob("*"))
            found.append((entry.stat().st_mtime, entry, size_bytes))
    left_bytes = sum(size_bytes for _, _, size_bytes in found)
    for changed_s, entry, size_bytes in sorted(found):
        if left_bytes <= most_bytes or changed_s > youngest_s:
            return
        shutil.rmtree(entry, ignore_errors=True)
        left_bytes -= size_bytes


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end.

    The folder of a process that was killed is removed when any process next makes one with its prefix.
    """
    remove_abandoned(prefix)
    made = Path(tempfile.mkdtemp(prefix="fw-new-"))
    lock = os.open(made, os.O_RDONLY)
    try:
        # The lock is taken first, so that others find the folder locked once it has the prefix.
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = made.rename(made.with_name(prefix + made.name.removeprefix("fw-new-")))
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def remove_abandoned(prefix: str) -> None:
    """Remove this user's temporary folders with the prefix whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, or another process removes it
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def name_folder(variable: str, folder: Path) -> None:
    """Set ``variable`` to the folder in this process, unless the environment already sets it."""
    os.environ.setdefault(variable, str(folder))


def folder_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of PATH, HOME and TMPDIR that are set: a program needs them to find its files."""
    found = os.environ if environ is None else environ
    return {name: found[name] for name in ("PATH", "HOME", "TMPDIR") if name in found}
