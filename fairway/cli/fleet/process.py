"""One child process: started in its own group, logged to a bounded file, ended with the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from fairway.cli.fleet import launch
from fairway.cli.fleet.probes import Probe
from fairway.cli.fleet.record import ProcessId

MAX_LOG_BYTES: Final = 64 * 1024 * 1024
_KEPT_LOGS: Final = 3
_TAIL_BYTES: Final = 16 * 1024
_COPY_BYTES: Final = 1024 * 1024


def rotate_log(path: Path) -> None:
    """Rename an existing log: NAME.log becomes NAME.log.1, and so on; the oldest is deleted."""
    if not path.exists() or path.stat().st_size == 0:
        return
    _make_room(path)
    path.replace(_older(path, 1))


def bound_log(path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Copy and empty a log above ``max_bytes`` while its process writes to it; return True if it did.

    The process has the file open, so the content is copied and the file truncated. A line written between
    the two is lost. If the copy fails on disk errors, the file is still truncated. Raises OSError when the
    log can be neither read nor truncated.
    """
    if path.stat().st_size <= max_bytes:
        return False
    with path.open("rb+") as log:
        with contextlib.suppress(OSError):
            _make_room(path)
            _copy(log.fileno(), _older(path, 1), limit=2 * max_bytes)
        log.truncate(0)
    return True


def tail(path: Path, *, lines: int = 15) -> str:
    """Return the last lines of a log, "" without a log."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def _copy(source: int, target: Path, *, limit: int) -> None:
    """Copy at most ``limit`` bytes; an incomplete target is removed."""
    done = 0
    try:
        with target.open("wb") as file:
            while done < limit and (data := os.read(source, _COPY_BYTES)):
                file.write(data)
                done += len(data)
    except OSError:
        target.unlink(missing_ok=True)
        raise


def _make_room(path: Path) -> None:
    """Increase the number of every older log; the last one is deleted."""
    for number in range(_KEPT_LOGS - 1, 0, -1):
        older = _older(path, number)
        if older.exists():
            older.replace(_older(path, number + 1))


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to run a process and how to probe it."""

    name: str  # unique in the installation
    argv: tuple[str, ...]  # program and arguments
    # The complete environment.
    env: Mapping[str, str]
    log: Path  # file for stdout and stderr
    probe: Probe  # checks whether it serves
    address: str  # shown to the user
    # Sent to the process when the supervisor is killed.
    death_signal: int = signal.SIGKILL
    # How long it may take to serve.
    start_s: float = 120.0
    # How long it may take to end after SIGTERM.
    stop_s: float = 15.0
    # How long it may give no response before it is replaced.
    silence_s: float = 60.0
    # Working directory; None: the supervisor's.
    cwd: Path | None = None


class Child:
    """A process that runs from ``start`` until it ends by itself or by ``stop``."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._id: ProcessId | None = None
        self._swept = False

    @property
    def id(self) -> ProcessId | None:
        """Identity of the process started last."""
        return self._id

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start it. Only from the main thread: the kernel sends the death signal when that thread ends.

        On a restart it runs without a log if the log cannot be opened: serving has priority over logging.
        Raises OSError.
        """
        with self._open_log() as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(Path(launch.__file__)),
                str(os.getpid()),
                str(int(self.spec.death_signal)),
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.spec.env),
                cwd=self.spec.cwd,
                start_new_session=True,
            )
        self._id = ProcessId.of(self._process.pid)
        self._swept = False

    def _open_log(self) -> IO[bytes]:
        try:
            return self.spec.log.open("ab")
        except OSError:
            if self._process is None:
                raise
            return Path(os.devnull).open("ab")

    async def wait(self) -> int:
        """Return its exit code once it ended; the rest of its process group is killed."""
        assert self._process is not None
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        self._swept = True
        return code

    async def stop(self) -> bool:
        """Send SIGTERM, and kill its group after ``stop_s``. Return True when it ended by itself."""
        if self._process is None:
            return True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.stop_s):
                await self.wait()
        except TimeoutError:
            await self.kill()
            return False
        return True

    async def kill(self) -> None:
        """Kill its whole process group now."""
        if self._process is not None:
            self._signal_group(signal.SIGKILL)
            await self._process.wait()

    def _signal_group(self, number: int) -> None:
        """Signal the process group unless it was swept: its number may be reused then."""
        assert self._process is not None
        if self._swept:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
