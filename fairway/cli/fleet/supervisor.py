"""Supervisor of an installation's processes: starts them in stages, restarts and stops them in order."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fairway.cli.errors import CliError
from fairway.cli.fleet.probes import NO_ANSWER
from fairway.cli.fleet.process import (
    MAX_LOG_BYTES,
    Child,
    ProcessSpec,
    bound_log,
    describe_exit,
    rotate_log,
    tail,
)
from fairway.cli.fleet.progress import StartProgress, TolerantProgress
from fairway.cli.fleet.record import FleetRecord, ProcessId, Restarts
from fairway.task_group import TaskGroup

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
