"""Libraries that were compiled beforehand, one for each level of processors, and the best for this one.

An image has no compiler: ``python -P -m services.worker.engine.native.prebuilt`` fills ``FOLDER`` while it is
built. A library's name is its level and a digest of source, flags and the OpenMP runtime's content, so one
that was made for another source or another torch is not found. The folder and its files belong to root or to
this user, no other user can write or replace them, and each file ends with its digest.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from services.worker.engine.native.build import (
    FLAGS,
    OTHERS_WRITE,
    SOURCE,
    BuildFailed,
    Toolchain,
    check_above,
    compile_into,
    digest_of,
    is_whole,
    owner_of,
)
from services.worker.engine.native.library import loaded_openmp

FOLDER: Final = Path(__file__).parent / "prebuilt"
CPUINFO: Final = Path("/proc/cpuinfo")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """``name`` is the compilers' ``-march``, ``features`` what Linux calls those that it presumes."""

    name: str
    features: frozenset[str] = frozenset()


# Levels of the x86-64 psABI; whatever is 64-bit ARM has fused multiply-add in 128-bit vectors.
_V2: Final = frozenset(["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"])
_V3: Final = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"])
_V4: Final = _V3 | frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])
_X86_64: Final = (CpuLevel("x86-64-v4", _V4), CpuLevel("x86-64-v3", _V3), CpuLevel("x86-64-v2", _V2))
_ARM_64: Final = (CpuLevel("armv8-a"),)


def levels_of(machine: str) -> Sequence[CpuLevel]:
    """Return the levels that libraries are made for on such a machine, the best first."""
    return {"x86_64": _X86_64, "aarch64": _ARM_64}.get(machine, ())


def usable_levels(machine: str, cpuinfo: str) -> list[CpuLevel]:
    """Return the levels whose code runs on the processor that ``/proc/cpuinfo`` describes, the best first."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    features = next((set(values.split()) for name, _, values in lines if name.strip() == "flags"), set())
    return [level for level in levels_of(machine) if level.features <= features]


def find(folder: Path, openmp: Path | None, *, source: Path = SOURCE, cpuinfo: Path = CPUINFO) -> Path | None:
    """Return the best library for this processor, None where the folder is not there.

    Raises BuildFailed where it holds none, or one that others can write to or replace, or that is cut short.
    """
    try:
        if not folder.exists():
            return None
        resolved = folder.resolve()
        _check_owner(resolved, stat.S_ISDIR)
        check_above(resolved)
        for level in usable_levels(platform.machine(), cpuinfo.read_text("utf-8")):
            library = resolved / _name(level, openmp, source)
            if library.is_symlink() or library.exists():
                _check_owner(library, stat.S_ISREG)
                if not is_whole(library):
                    raise BuildFailed(f"{library} is cut short")
                return library
    except OSError as error:
        raise BuildFailed(f"{error.filename or folder}: {error.strerror}") from error
    raise BuildFailed(f"{folder} has no library for this source, processor and OpenMP runtime")


def make(folder: Path, toolchain: Toolchain, source: Path = SOURCE) -> list[Path]:
    """Return the libraries of all levels of this kind of machine, compiled into the folder.

    Everybody may read them. Raises BuildFailed, OSError.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    made = []
    for level in levels_of(platform.machine()):
        library = folder / _name(level, toolchain.openmp, source)
        options = Toolchain(toolchain.compilers, toolchain.openmp, toolchain.timeout_s, level.name)
        compile_into(library, options, source).chmod(0o555)
        made.append(library)
    return made


def _name(level: CpuLevel, openmp: Path | None, source: Path) -> str:
    runtime = hashlib.sha256(openmp.read_bytes()).hexdigest() if openmp else ""
    return f"operators-{level.name}-{digest_of(source, *FLAGS, level.name, runtime)}.so"


def _check_owner(path: Path, is_kind: Callable[[int], bool]) -> None:
    owner, mode = owner_of(path)
    if owner not in (0, os.geteuid()) or not is_kind(mode) or mode & OTHERS_WRITE:
        raise BuildFailed(f"{path} is not one that only root and this user can write to")


def main() -> None:
    """Fill the folder."""
    for library in make(FOLDER, Toolchain(openmp=loaded_openmp())):
        log.info("operators.compiled", library=library.name)


if __name__ == "__main__":
    main()
