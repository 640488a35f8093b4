"""A child process: it ends with its role, and its end is awaited without blocking the event loop."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

from services.ports.clock import Clock

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_", "LD_LIBRARY_PATH", "PYTHON", "TMPDIR", "VIRTUAL_ENV")


def die_with_parent() -> None:
    """End this process with the thread that started it, and ignore Ctrl-C, which the parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def bare_environment() -> dict[str, str]:
    """Return the variables that Python needs from this process's environment, without Fairway's settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}


CHECK_S: Final = 0.25


async def wait_end(pid: int, clock: Clock) -> None:
    """Return once a child process ended, even if its own children run on. The caller still has to reap it."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        pid_fd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not on this system
        while not _has_ended(pid):
            await clock.sleep(CHECK_S)
        return
    loop.add_reader(pid_fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pid_fd)
        os.close(pid_fd)


def is_stopped(pid: int) -> bool:
    """Return whether a signal, or a debugger, has stopped the process; False where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[:1] in ([b"T"], [b"t"])


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
