"""A file system of a few megabytes, for what happens when it is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def tiny_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """A file system of that size at the folder. Skips where the system does not permit mounts."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        pytest.skip("no file system can be mounted here: there is no mount")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, timeout=30, check=True)


def fill(folder: Path) -> Path:
    """Take all that is free; return the file that does."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as stream:
        for block in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while stream.write(bytes(block)):
                    pass
    return filler
