"""Resources of this machine and this process: processors, threads, device type, memory, file descriptors."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Final

import psutil

_CGROUPS: Final = Path("/sys/fs/cgroup")
_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_UNLIMITED: Final = 1e9


def available_cpus() -> int:
    """Return how many processors' worth of time this process may use, at least one.

    It is the number of processors that it may run on, or the quota of its container if that is less. A quota
    leaves all processors visible, and stops a process that exceeds it for the rest of each period.
    """
    return max(1, min(len(os.sched_getaffinity(0)), round(cpu_quota(_CGROUPS))))


def cpu_quota(cgroups: Path) -> float:
    """Return the processors that the control group grants, 1e9 without a quota.

    Reads ``cpu.max`` of version 2 or ``cpu.cfs_*`` of version 1. A container reads its own group there.
    """
    try:
        quota, period = (cgroups / "cpu.max").read_text("utf-8").split()
    except (OSError, ValueError):
        try:
            quota = (cgroups / "cpu" / "cpu.cfs_quota_us").read_text("utf-8")
            period = (cgroups / "cpu" / "cpu.cfs_period_us").read_text("utf-8")
        except OSError:
            return _UNLIMITED
    try:
        granted = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return _UNLIMITED
    return granted if granted > 0 else _UNLIMITED


def default_engine_threads() -> int:
    """Return the default number of threads of an engine: half of the processors, at least one.

    The rest is for the other roles. With one thread per processor, each of the hundreds of barriers in a step
    would wait for a thread that is not scheduled.
    """
    return max(1, available_cpus() // 2)


def device_type(device: str, gpus: Path = _GPUS) -> str:
    """Return the type of a torch device: ``cpu``, the name of the GPU such as ``nvidia-h200``, else its kind.

    Workers of one type are expected to be equally fast. All GPUs of a machine are assumed to be of one type.
    """
    kind = device.partition(":")[0]
    if kind != "cuda":
        return kind
    for information in sorted(gpus.glob("*/information")):
        try:
            text = information.read_text("utf-8")
        except OSError:
            continue
        if found := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE):
            return re.sub(r"[^a-z0-9]+", "-", found[1].lower()).strip("-")[:64]
    return kind


def memory_kills(counters: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel has killed for memory; 0 where it does not count them."""
    try:
        found = re.search(r"^oom_kill (\d+)$", counters.read_text("ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 when there is no such process."""
    if not pid:
        return 0
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


# Some systems whose hard limit is "unlimited" reject a higher soft limit.
_MOST: Final = 1_048_576


def available_bytes() -> int:
    """Return the memory that processes of this machine can take without swapping."""
    return int(psutil.virtual_memory().available)


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard limit. If the system rejects it, the limit stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):
            return


def descriptor_limit() -> int:
    """Return the soft limit; a fixed bound if it is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)
