"""The machine that a benchmark runs on, and the versions that it runs."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from bench.store.records import BenchMachine

LIBRARIES: Final = ("grpcio", "msgspec", "numpy", "protobuf", "torch", "transformers", "uvloop", "vllm")
GIB: Final = 1024**3
# cgroup v1 writes about 2^63 where there is no limit.
_NO_LIMIT: Final = 2**60
_GIT_LIMIT_S: Final = 20.0


def fingerprint(state: str | None = None, *, root: Path = Path("/")) -> BenchMachine:
    """Return this machine, as ``proc``, ``sys`` and ``etc`` below ``root`` describe it.

    Memory is rounded to half a GiB, the kernel to its minor version: both vary between starts of one machine.
    """
    memory = _number(_field(_text(root / "proc/meminfo"), "MemTotal", ":"))
    limit = _limit(root, "memory.max", "memory/memory.limit_in_bytes")
    cpuinfo = _text(root / "proc/cpuinfo")
    # Kernels of arm64 write these in place of a model's name.
    codes = [_field(cpuinfo, f"CPU {name}", ":") for name in ("implementer", "part")]
    return BenchMachine(
        cpu=_field(cpuinfo, "model name", ":")
        or ("implementer {}, part {}".format(*codes) if all(codes) else None),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=None if memory is None else round(2 * memory * 1024 / GIB) / 2,
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        cpu_limit=_cpu_limit(root),
        memory_limit_gib=None if limit is None else round(limit / GIB, 2),
        os=_os(root),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        state=state,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, name: str, mark: str) -> str | None:
    """Return the value of the first line that begins with ``name``."""
    for line in text.splitlines():
        key, found, value = line.partition(mark)
        if found and key.strip() == name:
            return value.strip().strip('"') or None
    return None


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None


def _cgroups(root: Path) -> Iterable[Path]:
    """Yield the folders of this process's groups, the innermost first: version 2, then the roots."""
    path = _field(_text(root / "proc/self/cgroup"), "0", "::") or "/"
    top = root / "sys/fs/cgroup"
    inner = Path(path.strip("/"))
    yield from (top / each for each in (inner, *inner.parents))


def _limit(root: Path, v2: str, v1: str) -> float | None:
    """Return the least limit over the groups; None without one."""
    texts = [*(_text(folder / v2) for folder in _cgroups(root)), _text(root / "sys/fs/cgroup" / v1)]
    found = [value for text in texts if (value := _number(text)) is not None and 0 < value < _NO_LIMIT]
    return min(found, default=None)


def _cpu_limit(root: Path) -> float | None:
    shares = []
    for folder in _cgroups(root):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if (one := _number(quota)) is not None and (other := _number(period)):
            shares.append(one / other)
    quota, period = (_text(root / "sys/fs/cgroup/cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if (one := _number(quota)) is not None and one > 0 and (other := _number(period)):
        shares.append(one / other)
    return round(min(shares), 2) if shares else None


def _os(root: Path) -> str:
    name = _field(_text(root / "etc/os-release"), "PRETTY_NAME", "=") or platform.system()
    return f"{name}, kernel {'.'.join(platform.release().split('.')[:2])}, {platform.machine()}"


def versions(tree: Path) -> dict[str, str]:
    """Return the commit of a source tree, and of its libraries the versions that this process imports."""
    found = {"fairway": commit_of(tree)}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit_of(tree: Path) -> str:
    """Return the commit, with ``+changes`` where files differ from it; ``unknown`` without git."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(tree), *words], capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
