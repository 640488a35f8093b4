"""The worker's side of Report: tells the leading scheduler what room there is, and hears who leads.

The argument, in the terms of ``scheduler/fleet_view.py``:

- A stream is opened, the leader says its epoch, ``hear_leader`` fences every older leader's grants, and only
  then the first snapshot is taken. So what an earlier leader granted has either started, and is in
  ``kv_blocks_reserved``, or can no longer start. The levels of the first report are authoritative.
- Snapshots hand deltas over. A delta stays here until the leader answered the report that carried it. When
  the stream breaks, the unanswered ones go into the first report of the next stream: the grants that were
  seen under the same epoch, because that leader may still count them as outstanding; every tenant's tokens.
  ``grants_seen`` names numbers, so a second time has no effect. Tokens may be counted twice when the leader
  took a report and its answer was lost; none is ever lost.
- A snapshot that is never sent is not lost either: its deltas go into the next one, whose levels are newer.
  Levels are never mixed with the grants of a later instant: both come from one ``snapshot`` call, and adding
  *older* seen grants to it keeps every grant counted once, since the levels hold what they reserve.

Reports are sent on change, at most one per ``gap_s`` and the first of a burst at once, and at least every
``beat_s``. While a pool is tight somebody may wait for what is freed: then the gap is ``tight_gap_s``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog

from fairway.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.adapters.grpc_streams import LeaderCalls, read_within, stream_error
from services.adapters.report_deltas import DeltaKeeper
from services.adapters.scheduler_directory import LeaderDirectory
from services.core.errors import FairwayError, NoLeader
from services.core.fleet import PoolSnapshot, ReportSnapshot
from services.ports.clock import Clock
from services.rpc.channel import auth_metadata
from services.rpc.convert_scheduler import report_to_proto
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()
ReportCall = grpc.aio.StreamStreamCall[Any, Any]

_OPEN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class ReporterSettings:
    """``max_unanswered``: reports in flight; more are not sent, since later ones say more."""

    gap_s: float = 0.02
    tight_gap_s: float = 0.004
    beat_s: float = 1.0
    silence_s: float = 3.5
    max_unanswered: int = 64
    min_backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class Reporter:
    """Keeps one Report stream to whichever scheduler leads, from ``start`` to ``close``.

    ``snapshot`` is called right before a report is sent and hands its deltas over. ``hear_leader`` is called
    with the epoch of each message, before any snapshot for that leader. Both run in the event loop, must
    not block and must not raise.
    """

    def __init__(
        self,
        directory: LeaderDirectory,
        token: str,
        clock: Clock,
        supervisor: Supervisor,
        snapshot: Callable[[], ReportSnapshot],
        *,
        hear_leader: Callable[[int], None] | None = None,
        settings: ReporterSettings | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._calls = LeaderCalls(directory)
        self._token = token
        self._clock = clock
        self._supervisor = supervisor
        self._snapshot = snapshot
        self._hear_leader = hear_leader
        self._settings = settings if settings is not None else ReporterSettings()
        self._rng = rng if rng is not None else random.Random()
        self._deltas = DeltaKeeper()
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()
        self._tight = False
        self._task: asyncio.Task[None] | None = None
        self._last_epoch = 0
        self._leader_heard_s = -math.inf

    @property
    def last_epoch(self) -> int:
        """The newest leader heard of; 0 before the first."""
        return self._last_epoch

    @property
    def leader_heard_s(self) -> float:
        """When a leader was heard last, by the clock's monotonic seconds; minus infinity before the first."""
        return self._leader_heard_s

    def start(self) -> None:
        """Begin to look for the leader. Idempotent."""
        if self._task is None:
            self._task = self._supervisor.spawn("reporter.stream", self._run())

    def changed(self) -> None:
        """The worker's state changed: a report goes out soon."""
        self._changed.set()

    async def close(self) -> None:
        """Stop reporting; the scheduler places nothing more on this worker."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,), timeout=5.0)
        await self._calls.close()

    # --- the stream -------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while True:
            started_s = self._clock.monotonic_s()
            error = await self._report_once()
            log.info("reporter.stream_lost", epoch=self._last_epoch, reason=error.reason, error=error.message)
            if self._clock.monotonic_s() - started_s > self._settings.max_backoff_s:
                failures = 0
            failures += 1
            ceiling_s = self._settings.min_backoff_s * 2.0 ** min(failures, 16)
            ceiling_s = min(self._settings.max_backoff_s, ceiling_s)
            await self._calls.wait_change(self._rng.uniform(ceiling_s / 2, ceiling_s))

    async def _report_once(self) -> FairwayError:
        """Report over a new stream until it breaks; return why it did."""
        try:
            channel = await self._calls.channel(_OPEN_S)
        except FairwayError as error:
            return error
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call: ReportCall = stub.Report(metadata=auth_metadata(self._token))
        writer: asyncio.Task[None] | None = None
        try:
            self._deltas.stream_opened()
            self._heard(await read_within(call, _OPEN_S))
            writer = self._supervisor.spawn("reporter.writer", self._write(call))
            while True:
                self._heard(await read_within(call, self._settings.silence_s))
        except FairwayError as error:
            return error
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.wait((writer,), timeout=5.0)

    def _heard(self, response: scheduler_pb2.ReportResponse) -> None:
        """Note who leads and which reports are answered. Raises NoLeader for a leader of the past."""
        epoch = response.leadership.epoch
        if epoch < self._last_epoch:
            raise NoLeader(f"epoch {epoch} is over; {self._last_epoch} was heard already")
        self._last_epoch = epoch
        self._leader_heard_s = self._clock.monotonic_s()
        if self._hear_leader is not None:
            self._hear_leader(epoch)
        if self._deltas.confirm(response.report):
            self._answered.set()

    async def _write(self, call: ReportCall) -> None:
        """The stream's only writer: a full report, then reports on change and beats."""
        try:
            while True:
                self._changed.clear()
                snapshot = self._snapshot()
                self._tight = any(_is_tight(pool) for pool in snapshot.pools)
                if snapshot.incarnation:
                    number, report = self._deltas.next_report(snapshot)
                    await call.write(report_to_proto(report, number, full=number == 1))
                else:  # not registered yet
                    self._deltas.keep(snapshot)
                await self._pause()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            reason = await stream_error(call, error)
            log.info("reporter.write_failed", reason=reason.reason)

    async def _pause(self) -> None:
        """Return when the next report is due."""
        settings = self._settings
        await self._clock.sleep(settings.tight_gap_s if self._tight else settings.gap_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.beat_s):
                await self._changed.wait()
        while self._deltas.unconfirmed >= settings.max_unanswered:
            self._answered.clear()
            await self._answered.wait()  # ends with the stream, whose reader waits for a bounded time


def _is_tight(pool: PoolSnapshot) -> bool:
    """Somebody may wait for what this pool sets free."""
    return (
        pool.kv_blocks_reserved * 4 >= pool.kv_blocks_total * 3
        or pool.running + pool.waiting >= pool.max_sequences
    )
