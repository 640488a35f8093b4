"""Supervisor of an installation's processes: starts them in stages, restarts and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from fairway.cli.errors import CliError
from fairway.cli.fleet import launch
from fairway.cli.fleet.probes import NO_ANSWER, Probe
from fairway.cli.fleet.progress import StartProgress, TolerantProgress
from fairway.cli.fleet.record import FleetRecord, ProcessId, Restarts
from fairway.task_group import TaskGroup

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
    secured: bool = False  # whether its gRPC server has TLS
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


_POLL_S: Final = 0.15
_FIRST_BACKOFF_S: Final = 0.5
_LAST_BACKOFF_S: Final = 30.0
_STABLE_S: Final = 60.0
_HEALTH_POLL_S: Final = 10.0  # a sixth of the silence after which a process is replaced
_LOG_POLL_S: Final = 2.0
_REPORT_S: Final = 3.0  # interval of reports on a long start


class ProcessSupervisor:
    """Runs children by name. ``record_path`` always lists the processes that are alive."""

    def __init__(
        self,
        progress: StartProgress,
        record_path: Path,
        *,
        own_log: Path | None = None,
        max_log_bytes: int = MAX_LOG_BYTES,
        report_s: float = _REPORT_S,
    ) -> None:
        self._progress = TolerantProgress(progress)
        self._record_path = record_path
        self._own_log = own_log
        self._max_log_bytes = max_log_bytes
        self._report_s = report_s
        self._log_task: asyncio.Task[None] | None = None
        self._children: dict[str, Child] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._restarts: dict[str, Restarts] = {}
        self._phase = "starting"
        own_id = ProcessId.of(os.getpid())
        assert own_id is not None
        self._own_id = own_id

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running children."""
        return {
            name: child.id.pid
            for name, child in self._children.items()
            if child.id is not None and child.exit_code is None
        }

    async def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start ``specs`` together and return once all serve.

        Raises CliError when one does not, OSError when a log or the record cannot be written.
        """
        if self._log_task is None:
            self._log_task = asyncio.create_task(self._bound_logs(), name="bound logs")
        for spec in specs:
            rotate_log(spec.log)
            child = self._children[spec.name] = Child(spec)
            self._progress.event(spec.name, "starting", f"on {spec.address}")
            await child.start()
        self._record().save(self._record_path)
        try:
            async with TaskGroup() as group:
                for spec in specs:
                    group.create_task(self._first_ready(self._children[spec.name]))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        for spec in specs:
            child = self._children[spec.name]
            self._watchers[spec.name] = asyncio.create_task(
                self._restart_on_exit(child), name=f"restart {spec.name}"
            )

    async def add(self, specs: Sequence[ProcessSpec], *, after: str) -> None:
        """Start ``specs`` as ``start`` does, to be stopped before the child ``after``.

        If one does not serve, all of them are ended before the error is raised.
        """
        try:
            await self.start(specs)
        except BaseException:
            await self.remove([spec.name for spec in specs])
            raise
        added = [spec.name for spec in specs]
        others = [name for name in self._children if name not in added]
        split = others.index(after) + 1
        order = (*others[:split], *added, *others[split:])
        self._children = {name: self._children[name] for name in order}
        self._save()

    async def remove(self, names: Sequence[str]) -> None:
        """Stop these children, the last one first, each within its own time."""
        for name in reversed([name for name in names if name in self._children]):
            if (watcher := self._watchers.pop(name, None)) is not None:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
            await self._stop_child(name)
            del self._children[name]
            self._restarts.pop(name, None)
            self._save()

    def mark_ready(self) -> None:
        """Record that the installation serves."""
        self._phase = "ready"
        self._save()

    async def stop(self, *, now: asyncio.Event | None = None) -> None:
        """End every child, the last one first, each within its own time; kill all when ``now`` is set."""
        self._phase = "stopping"
        self._save()
        log_tasks = () if self._log_task is None else (self._log_task,)
        watchers = (*self._watchers.values(), *log_tasks)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        stopping = asyncio.create_task(self._stop_in_order())
        kill_now = asyncio.create_task((now or asyncio.Event()).wait())
        try:
            await asyncio.wait((stopping, kill_now), return_when=asyncio.FIRST_COMPLETED)
        finally:
            kill_now.cancel()
            if not stopping.done():
                stopping.cancel()
            await asyncio.gather(stopping, kill_now, return_exceptions=True)
            await asyncio.gather(*(child.kill() for child in self._children.values()))
            self._record_path.unlink(missing_ok=True)

    async def _stop_in_order(self) -> None:
        for name in reversed(self._children):
            await self._stop_child(name)

    async def _stop_child(self, name: str) -> None:
        child = self._children[name]
        if child.exit_code is None:
            self._progress.event(name, "stopping", f"at most {child.spec.stop_s:g} s")
            clean = await child.stop()
            self._progress.event(name, "stopped", "" if clean else "killed: it did not end in time")

    async def _first_ready(self, child: Child) -> None:
        began = time.monotonic()
        reporting = asyncio.create_task(self._report_start(child, began), name=f"report {child.spec.name}")
        try:
            reason = await self._until_ready(child)
        finally:
            reporting.cancel()
        spec = child.spec
        if reason:
            self._progress.event(spec.name, "failed", reason)
            last = tail(spec.log)
            raise CliError(
                "START_FAILED",
                f"{spec.name} did not start: {reason}"
                + (f"\n--- last lines of {spec.log}\n{last}" if last else ""),
                next_step=f"fix the cause that the log shows and start again; the complete log is {spec.log}",
            )
        self._progress.event(spec.name, "ready", f"on {spec.address}, {time.monotonic() - began:.1f} s")

    async def _report_start(self, child: Child, began: float) -> None:
        while True:
            await asyncio.sleep(self._report_s)
            elapsed = time.monotonic() - began
            self._progress.event(child.spec.name, "starting", f"on {child.spec.address}, {elapsed:.0f} s")

    async def _until_ready(self, child: Child) -> str:
        """Return "" once the child serves, else why it does not: it ended or its time limit passed."""
        reason = "not probed yet"
        try:
            async with asyncio.timeout(child.spec.start_s):
                while child.exit_code is None:
                    reason = await child.spec.probe()
                    if not reason:
                        return ""
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return f"not ready within {child.spec.start_s:g} s: {reason}"
        assert child.exit_code is not None
        return f"it {describe_exit(child.exit_code)}"

    async def _restart_on_exit(self, child: Child) -> None:
        """Restart the child whenever it ends, with a backoff that resets after a stable minute."""
        name, backoff_s = child.spec.name, _FIRST_BACKOFF_S
        while True:
            began = time.monotonic()
            what = await self._ended(child)
            before = self._restarts.get(name)
            self._restarts[name] = Restarts(before.count + 1 if before else 1, f"it {what}")
            if time.monotonic() - began > _STABLE_S:
                backoff_s = _FIRST_BACKOFF_S
            self._progress.event(
                name, "restarting", f"it {what}; again in {backoff_s:g} s; log: {child.spec.log}"
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
            try:
                await child.start()
            except OSError as exc:  # no process, descriptor or disk space now; a later attempt may succeed
                self._progress.event(name, "failed", f"it cannot be started: {exc.strerror}")
                continue
            self._save()
            if reason := await self._until_ready(child):
                self._progress.event(name, "failed", reason)
                await child.kill()
            else:
                self._progress.event(name, "ready", f"on {child.spec.address}, restarted")

    async def _bound_logs(self) -> None:
        """Copy and empty every log above its bound, including the supervisor's own."""
        while True:
            await asyncio.sleep(_LOG_POLL_S)
            own = () if self._own_log is None else (self._own_log,)
            paths = (*(child.spec.log for child in self._children.values()), *own)
            for path, why in await asyncio.to_thread(_bound, paths, self._max_log_bytes):
                self._progress.event("logs", "failed", f"cannot bound {path}: {why}")

    async def _ended(self, child: Child) -> str:
        """Return, in words, how the child ended; a child without a response for too long is killed.

        NOT_SERVING is a response: a drained worker sends it and must not be restarted.
        """
        silent_since: float | None = None
        while True:
            try:
                async with asyncio.timeout(_HEALTH_POLL_S):
                    return describe_exit(await child.wait())
            except TimeoutError:
                reason = await child.spec.probe()
            now_s = time.monotonic()
            if not reason.startswith(NO_ANSWER):
                silent_since = None
            elif silent_since is None:
                silent_since = now_s
            elif now_s - silent_since >= child.spec.silence_s:
                await child.kill()
                return f"did not answer for {child.spec.silence_s:g} s and was killed"

    def _save(self) -> None:
        """Write the record. A failed write blocks neither a restart nor the stop."""
        try:
            self._record().save(self._record_path)
        except OSError as exc:
            why = f"cannot write {self._record_path}: {exc.strerror}; `fairway status` is out of date"
            self._progress.event("record", "failed", why)

    def _record(self) -> FleetRecord:
        return FleetRecord(
            supervisor=self._own_id,
            children={name: child.id for name, child in self._children.items() if child.id is not None},
            addresses={name: child.spec.address for name, child in self._children.items()},
            secured=tuple(name for name, child in self._children.items() if child.spec.secured),
            phase=self._phase,
            restarts=self._restarts,
        )


def _bound(logs: Sequence[Path], max_bytes: int) -> list[tuple[Path, str]]:
    """Bound each log; return those that cannot be bounded, with the reason."""
    failed: list[tuple[Path, str]] = []
    for path in logs:
        try:
            bound_log(path, max_bytes=max_bytes)
        except OSError as exc:
            failed.append((path, exc.strerror or str(exc)))
    return failed


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
