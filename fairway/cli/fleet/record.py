"""The processes of an installation: ids with start times, so that a reused id is not mistaken."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec
import psutil

from fairway.cli.errors import CliError
from fairway.cli.state import read_json, write_json


class ProcessId(msgspec.Struct, frozen=True, array_like=True):
    """One process: its id and when it started, in the clock ticks of the kernel."""

    pid: int
    start: float

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of a live process, or None. A zombie is not alive."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
            return None if fields[0] in "ZX" else cls(pid, float(fields[19]))
        except (OSError, IndexError, ValueError):
            pass
        try:
            process = psutil.Process(pid)
            dead = process.status() == psutil.STATUS_ZOMBIE
            return None if dead else cls(pid, float(process.create_time()))
        except psutil.Error:
            return None

    @property
    def alive(self) -> bool:
        return self.pid > 1 and ProcessId.of(self.pid) == self

    @property
    def started_s(self) -> float | None:
        """Unix time of its start; None unless it is alive."""
        try:
            return psutil.Process(self.pid).create_time() if self.alive else None
        except psutil.Error:
            return None

    def signal(self, number: int) -> None:
        """Send a signal if this very process is still alive."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process group that this process leads, if it is still alive."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


class Restarts(msgspec.Struct, frozen=True):
    """How often the supervisor restarted a process, and how it ended the last time."""

    count: int
    last_end: str


class FleetRecord(msgspec.Struct, frozen=True):
    """The supervisor, its children by name, and the phase: starting, ready or stopping."""

    supervisor: ProcessId
    children: Mapping[str, ProcessId]
    addresses: Mapping[str, str]
    phase: str
    # Restarts of each process that was restarted.
    restarts: Mapping[str, Restarts] = {}
    # Names of the processes whose gRPC servers have TLS.
    secured: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        write_json(path, msgspec.to_builtins(self))

    @classmethod
    def load(cls, path: Path) -> FleetRecord | None:
        """Return the record in ``path``, or None if it is missing or invalid."""
        try:
            return msgspec.convert(read_json(path), cls)
        except msgspec.ValidationError:
            return None


def lock_installation(path: Path) -> IO[str] | None:
    """Return a file that holds the installation's lock until it is closed, or None if the lock is taken."""
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def sweep(record: FleetRecord, *, patience_s: float) -> list[str]:
    """End the children that outlived their supervisor; return their names.

    Each process group gets SIGTERM, and SIGKILL after ``patience_s``.
    """
    left = {name: child for name, child in record.children.items() if child.alive}
    for child in left.values():
        child.signal_group(signal.SIGTERM)
    wait_for_end(list(left.values()), timeout_s=patience_s)
    for child in left.values():
        child.signal_group(signal.SIGKILL)
    if not wait_for_end(list(left.values()), timeout_s=5.0):
        stuck = ", ".join(f"{name} ({child.pid})" for name, child in left.items() if child.alive)
        raise CliError(
            "PROCESS_STUCK",
            f"these processes do not end: {stuck}",
            next_step="end them by hand with `kill -9`, then try again",
        )
    return list(left)


def wait_for_end(processes: list[ProcessId], *, timeout_s: float) -> bool:
    """Return True once none of ``processes`` is alive, False after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while any(process.alive for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True
