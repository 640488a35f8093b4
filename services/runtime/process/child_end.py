"""The end of a child process, awaited without blocking the event loop; and whether a signal stopped it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from services.ports.clock import Clock

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
