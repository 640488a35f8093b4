"""Shared memory that ended processes of vLLM left behind."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

SHARED: Final = Path("/dev/shm")
INIT: Final = "1"
_RANKS: Final = "vllm_dist_"  # vLLM's segments between ranks
# Besides those of torch and those of Python's multiprocessing, which other programs make as well.
_NAMES: Final = re.compile(_RANKS + r"\S+|torch_\d+_\S+|psm_[0-9a-f]+|sem\.mp-\w+")


def sweep(since_unix_s: float, *, folder: Path = SHARED, processes: Path = Path("/proc")) -> int:
    """Remove this user's segments and semaphores that are younger than ``since_unix_s`` and that no process
    maps.

    Return how many. Where a process of this user cannot be read, which no engine's is, only segments between
    ranks are removed. Blocks for I/O.
    """
    found: dict[Path, int] = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                held = path.stat(follow_symlinks=False)
                own = held.st_uid == os.getuid() and held.st_mtime >= since_unix_s - 1.0
                if own and _NAMES.fullmatch(path.name):
                    found[path] = held.st_ino
    if not found:
        return 0
    held_by_any, is_whole = held_inodes(processes, str(folder))
    removed = 0
    for path, inode in found.items():
        if inode not in held_by_any and (is_whole or path.name.startswith(_RANKS)):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    return removed


def held_inodes(processes: Path, folder: str) -> tuple[set[int], bool]:
    """Return the files below the folder that processes of this user map or hold open, and whether all could
    be read; the system's first process need not be, since it makes none.
    """
    found: set[int] = set()
    is_whole = True
    for process in processes.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if process.stat().st_uid != os.getuid():
                continue
            found |= mapped_inodes(process, folder)
            for held in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(held).startswith(folder):
                        found.add(held.stat().st_ino)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except OSError:
            is_whole = is_whole and process.name == INIT
    return found, is_whole


def mapped_inodes(process: Path, folder: str) -> set[int]:
    """Return the files below the folder that the process of this folder in /proc maps. Raises OSError.

    A semaphore is mapped by a name that it has lost: its inode stays.
    """
    lines = (process / "maps").read_text("utf-8", "replace").splitlines()
    return {int(line.split(maxsplit=5)[4]) for line in lines if folder in line}
