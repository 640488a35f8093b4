"""The engine's operators, compiled once on a machine: the other processes, and later runs, find them."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from services.runtime.process.folders import compile_folder
from services.worker.engine.native import build, prebuilt
from services.worker.engine.native.library import loaded_openmp

PATIENCE_S: Final = 600.0  # beside other tests


def operators(base: Path) -> Path:
    """Return the folder where installations of this user keep them; beside ``base``, the temporary folder of
    a test process, where that cannot be used."""
    folder = compile_folder(_shared(base))
    with contextlib.suppress(build.BuildFailed), _alone(folder):
        build.build(folder, build.Toolchain(openmp=loaded_openmp(), timeout_s=PATIENCE_S))
    return folder


def all_levels(base: Path, image: Path) -> None:
    """Fill the folder ``image`` with the libraries of all levels of this machine."""
    folder = compile_folder(_shared(base))
    compiler = next(path for path in map(shutil.which, build.COMPILERS) if path is not None)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    makers = [(build.SOURCE.parent / name).read_text() for name in ("build.py", "prebuilt.py")]
    digest = build.digest_of(build.SOURCE, compiler, version, *makers, str(loaded_openmp()))
    made = folder / f"levels-{digest}"
    with _alone(folder):
        if not made.exists():
            for old in folder.glob("levels-*"):
                shutil.rmtree(old)
            part = folder / "part"
            shutil.rmtree(part, ignore_errors=True)
            prebuilt.make(part, build.Toolchain(openmp=loaded_openmp(), timeout_s=PATIENCE_S))
            part.rename(made)
        shutil.copytree(made, image)


def _shared(base: Path) -> Path:
    """Return the folder that the processes of one test run share: pytest-xdist gives each one below it."""
    return base.parent if base.name.startswith("popen-") else base


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    build.make_private(folder)
    with (folder / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
