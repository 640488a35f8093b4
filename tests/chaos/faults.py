"""What can be done to a fleet. Each fault is a value; ``inject`` does it and ``lift`` takes it back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.chaos.fleet import Fleet
from tests.chaos.proxy import Mode, Rule

_FROZEN_S: Final = 5.0
_FILL_BYTES: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL. ``target`` is a process, ``ROLE:leader`` or ``engine:WORKER``."""

    target: str


@dataclass(frozen=True, slots=True)
class Term:
    """SIGTERM: drain, then end."""

    target: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP until lifted."""

    target: str


@dataclass(frozen=True, slots=True)
class Net:
    """The connections between two names, shell patterns both, are cut, hold everything back, or are slow."""

    source: str
    target: str
    mode: Mode
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoseModels:
    """A process is killed and finds none of its model files when it starts again."""

    target: str


@dataclass(frozen=True, slots=True)
class LoseState:
    """A store is killed and starts again without its state."""

    target: str


@dataclass(frozen=True, slots=True)
class FillDisk:
    """The disk of one worker's model files is full, and the worker needs them anew, until lifted."""

    target: str


Fault = Kill | Term | Freeze | Net | LoseModels | LoseState | FillDisk
Lift = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    return None


async def inject(fault: Fault, fleet: Fleet) -> tuple[str, Lift]:
    """Do it; return what was done, in words, and how to take it back."""
    match fault:
        case Kill(target):
            pid = await fleet.pid_of(target)
            name = await fleet.name_of(target)
            os.kill(pid, signal.SIGKILL)
            return f"killed {name} ({pid})", _nothing
        case Term(target):
            pid = await fleet.pid_of(target)
            name = await fleet.name_of(target)
            os.kill(pid, signal.SIGTERM)
            return f"ended {name} ({pid})", _nothing
        case Freeze(target):
            return await _freeze(fleet, target)
        case Net(source, target, mode, delay_s):
            rule = Rule(source, target, mode, delay_s)
            hit = await fleet.network.add(rule)

            async def mend() -> None:
                await fleet.network.remove(rule)

            return f"{mode}: {', '.join(hit) or 'no connection was open'}", mend
        case LoseModels(target):
            os.kill(await fleet.pid_of(target), signal.SIGKILL)
            _empty(fleet.state.data(target) / "models")
            return f"killed {target} and removed its model files", _nothing
        case LoseState(target):
            os.kill(await fleet.pid_of(target), signal.SIGKILL)
            _empty(fleet.state.data(target))
            return f"killed {target} and removed its state", _nothing
        case FillDisk(target):
            return await _fill(fleet, target)


async def _freeze(fleet: Fleet, target: str) -> tuple[str, Lift]:
    pid = await fleet.pid_of(target)
    name = await fleet.name_of(target)
    os.kill(pid, signal.SIGSTOP)
    _wait_stopped(pid)

    async def thaw() -> None:
        with contextlib.suppress(ProcessLookupError):  # a watchdog may have ended it meanwhile
            os.kill(pid, signal.SIGCONT)

    return f"froze {name} ({pid})", thaw


def _wait_stopped(pid: int) -> None:
    """Return once every thread is stopped: a signal takes a moment."""
    deadline_s = time.monotonic() + _FROZEN_S
    with contextlib.suppress(FileNotFoundError):
        while any(
            (task / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZ"
            for task in Path(f"/proc/{pid}/task").iterdir()
        ):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"process {pid} does not stop")
            time.sleep(0.001)


async def _fill(fleet: Fleet, target: str) -> tuple[str, Lift]:
    os.kill(await fleet.pid_of(target), signal.SIGKILL)
    folder = fleet.state.data(target) / "models"
    _empty(folder)
    ballast = folder / "ballast"
    with (
        contextlib.suppress(OSError),
        ballast.open("wb", buffering=0) as file,
    ):
        while True:
            file.write(bytes(_FILL_BYTES))

    async def free() -> None:
        ballast.unlink()

    return f"filled the disk of {target}: {shutil.disk_usage(folder).free} bytes free", free


def _empty(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
