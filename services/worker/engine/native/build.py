"""Compiles the operators at first use into a private folder, and finds them there afterwards.

A library's name is a digest of source, the compiler's path and version, flags, processor and the path of the
OpenMP runtime; headers, assembler and linker of the system are not in it. A compiler's environment has only
the user's folders. A library is complete before it has its name, so processes may build at the same
time. Nothing is loaded from a folder, or below a folder, that anybody else can write to, and nothing that was
cut short: a library ends with a digest of what comes before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.runtime.process.folders import folder_variables

SOURCE: Final = Path(__file__).parent / "source"
MAIN: Final = "operators.cc"
COMPILERS: Final = ("g++", "c++", "clang++")
# No contraction: the source defines where products and sums fuse, and every path has to do the same.
FLAGS: Final = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
X86: Final = frozenset({"x86_64", "AMD64", "i686"})
NATIVE: Final = "native"
BUILD_TIMEOUT_S: Final = 100.0  # an agent bears 300 s of silence from an engine that loads
VERSION_TIMEOUT_S: Final = 10.0
ABANDONED_S: Final = 3600.0  # no build takes so long
DIGEST_BYTES: Final = hashlib.sha256().digest_size
KEPT: Final = 8  # libraries of other compilers, versions and processors
MAX_MESSAGE: Final = 300
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class BuildFailed(Exception):
    """There is no library; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """``openmp`` is the runtime that the process has loaded: a second one would keep threads of its own.

    ``timeout_s`` is for all compilers together. ``level`` is what the compilers call the processors that
    the code is for, "native" this one.
    """

    compilers: Sequence[str] = COMPILERS
    openmp: Path | None = None
    timeout_s: float = BUILD_TIMEOUT_S
    level: str = NATIVE


def build(cache: Path, toolchain: Toolchain, source: Path = SOURCE) -> Path:
    """Return the library's file, compiled unless it was there. Raises BuildFailed.

    The compilers are tried in turn until one is left with no time; two names of one program are tried once.
    """
    try:
        make_private(cache)
        return _by_some_compiler(
            toolchain, lambda compiler, ends_s: _built(cache, compiler, toolchain, source, ends_s)
        )
    except OSError as error:
        raise BuildFailed(f"{error.filename or cache}: {error.strerror}") from error


def compile_into(library: Path, toolchain: Toolchain, source: Path = SOURCE) -> Path:
    """Return that file once it is the sealed library, whatever was there. Raises BuildFailed, OSError."""

    def compiled(compiler: str, ends_s: float) -> Path:
        _compile(compiler, library, toolchain, source, ends_s)
        return library

    return _by_some_compiler(toolchain, compiled)


def _by_some_compiler(toolchain: Toolchain, compiled: Callable[[str, float], Path]) -> Path:
    """Return what the first compiler that can makes until its deadline."""
    ends_s = time.monotonic() + toolchain.timeout_s
    reasons: list[str] = []
    failed: set[str] = set()
    for name in toolchain.compilers:
        if (compiler := shutil.which(name)) is None:
            reasons.append(f"{name} is not installed")
            continue
        if (program := os.path.realpath(compiler)) in failed:
            continue
        try:
            return compiled(compiler, ends_s)
        except BuildFailed as error:
            failed.add(program)
            reasons.append(f"{name}: {error}")
    raise BuildFailed("; ".join(reasons))


def make_private(folder: Path) -> None:
    """The folder exists, and only this user can write to it or replace it. Raises BuildFailed, OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    resolved = folder.resolve()
    mine, mode = owner_of(resolved)
    if mine != os.geteuid() or mode & (OTHERS_WRITE | stat.S_IRWXO | stat.S_IRWXG):
        raise BuildFailed(f"{folder} is not private to this user")
    check_above(resolved)


def check_above(folder: Path) -> None:
    """Raise unless only root and this user can replace the resolved folder."""
    for parent in folder.parents:
        owner, mode = owner_of(parent)
        if owner not in (0, os.geteuid()) or (mode & OTHERS_WRITE and not mode & stat.S_ISVTX):
            raise BuildFailed(f"others can replace {folder}: {parent} is not protected")


def owner_of(path: Path) -> tuple[int, int]:
    """Return the user that a path belongs to and its mode, of a link its own. Raises OSError."""
    status = path.stat(follow_symlinks=False)
    return status.st_uid, status.st_mode


def _built(cache: Path, compiler: str, toolchain: Toolchain, source: Path, ends_s: float) -> Path:
    library = cache / f"operators-{_digest(compiler, toolchain, source, ends_s)}.so"
    if not (library.is_symlink() or library.exists()):
        _compile(compiler, library, toolchain, source, ends_s)
        _forget_old(cache, library)
    owner, mode = owner_of(library)
    if owner != os.geteuid() or not stat.S_ISREG(mode) or mode & OTHERS_WRITE:
        raise BuildFailed(f"{library} is not a file that only this user can write to")
    if not is_whole(library):
        _compile(compiler, library, toolchain, source, ends_s)
    return library


def _seal(library: Path) -> None:
    """Append the digest, and wait until the disk has both."""
    with library.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def is_whole(library: Path) -> bool:
    """Return whether a library ends with the digest of what comes before. Raises OSError."""
    content = library.read_bytes()
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _compile(compiler: str, library: Path, toolchain: Toolchain, source: Path, ends_s: float) -> None:
    folder = Path(tempfile.mkdtemp(prefix="build-", dir=library.parent))
    try:
        _forget_abandoned(folder)
        unit, result = folder / "operators.o", folder / library.name
        flags = [*_flags(toolchain.level), "-fopenmp" if toolchain.openmp else "-Wno-unknown-pragmas"]
        link = [str(toolchain.openmp)] if toolchain.openmp else []
        _run([compiler, *flags, "-c", str(source / MAIN), "-o", str(unit)], ends_s)
        # -z defs: a missing symbol is an error here and not at the first call.
        _run([compiler, "-shared", "-Wl,-z,defs", str(unit), *link, "-o", str(result)], ends_s)
        _seal(result)
        result.chmod(0o500)
        result.replace(library)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str], ends_s: float) -> str:
    """Return the output of the command. Raises BuildFailed; after its time it ends with its children."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0.0:
        raise BuildFailed("no time is left for it")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=folder_variables() | {"LANG": "C"},  # others, as CPATH, change what is compiled
        )
    except OSError as error:
        raise BuildFailed(f"cannot be started: {error.strerror}") from error
    with process:
        try:
            said, _ = process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            raise BuildFailed(f"took longer than {left_s:.1f} s") from None
        finally:
            if process.returncode is None:  # not reaped: until then the number is no other group's
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    text = said.decode("utf-8", "replace").strip()
    if process.returncode:
        raise BuildFailed(f"exit status {process.returncode}: {text[:MAX_MESSAGE]}")
    return text


def _digest(compiler: str, toolchain: Toolchain, source: Path, ends_s: float) -> str:
    version = _run([compiler, "--version"], min(ends_s, time.monotonic() + VERSION_TIMEOUT_S))
    openmp = str(toolchain.openmp.resolve()) if toolchain.openmp else ""
    return digest_of(
        source, os.path.realpath(compiler), version, *_flags(toolchain.level), openmp, _processor()
    )


def digest_of(source: Path, *parts: str) -> str:
    """Return 32 hex digits that the files of the source and the parts decide."""
    digest = hashlib.sha256()
    for path in sorted(source.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _flags(level: str) -> list[str]:
    is_arm_native = level == NATIVE and platform.machine() not in X86
    return [*FLAGS, "-mcpu=native" if is_arm_native else f"-march={level}"]


def _processor() -> str:
    """Return what ``native`` stands for here: the model and its features."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(names))


def _forget_old(cache: Path, library: Path) -> None:
    """Keep the newest libraries. A loaded one stays loaded without its file."""
    with contextlib.suppress(OSError):
        found = sorted(cache.glob("operators-*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in [each for each in found if each != library][KEPT - 1 :]:
            path.unlink(missing_ok=True)


def _forget_abandoned(folder: Path) -> None:
    """Remove the other folders, left by builds whose process was ended in the middle."""
    now_s = folder.stat().st_mtime
    for other in folder.parent.glob("build-*"):
        with contextlib.suppress(OSError):
            if now_s - other.lstat().st_mtime > ABANDONED_S:
                shutil.rmtree(other)
