"""The worker's side of Report over any transport: reports capacity to the leading scheduler and tracks its
epoch.

Why no capacity is counted twice or lost, in the terms of ``scheduler/fleet/view.py``:

- A link is opened, the leader sends its epoch, and ``on_leader`` fences every older leader's grants. Only
  then the first snapshot is taken. So a grant of an earlier leader either has started, and is in
  ``kv_blocks_reserved``, or can no longer start. The levels of the first report are authoritative.
- A snapshot moves its deltas here. A delta stays until the leader answered the report that carried it. When
  the link breaks, the unanswered ones are sent on the next link:
  - Grants seen under the same epoch go into its first report, because that leader may still count them as
    outstanding. They are numbers, so a repeat has no effect.
  - Tenants' tokens and the final usage of sequences go into its first reports. What one report carried is
    sent again in one report under the same number, so a leader that already applied it drops it. None is
    lost within the bounds of ``report_deltas``. A later leader may count some twice: those that its
    predecessor applied and sent on to other workers.
  - Prefix blocks are sent as a full set in the first report of a link, and as changes after it.
- The deltas of a snapshot that is never sent go into the next report, whose levels are newer. Levels are not
  mixed with the grants of a later instant: both come from one ``snapshot`` call. Adding *older* seen grants
  keeps every grant counted once, since the levels contain what those reserve.

A leader may send heartbeats without receiving anything: half of the connection is lost, or its reader has
stopped. So a link without an answer for ``answer_s``, over several heartbeats, is closed.

Reports are sent on change, at most one per ``gap_s``, the first of a burst at once, and at least one every
``beat_s``. While a pool is nearly full, requests may wait for its room: then the gap is ``tight_gap_s``. Rows
run on slots that were leased before. While pools of rows have room nothing waits for their reports, and the
gap of a worker without other pools is ``rows_gap_s``; the leader observes its drain that much later too.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import structlog

from services.adapters.links.leader_links import LeaderLink, LeaderLinks, keep_linked
from services.adapters.links.report_deltas import DeltaKeeper
from services.core.backoff import Backoff
from services.core.errors import FairwayError, InvalidInput, NoLeader
from services.core.fleet import PoolSnapshot, ReportSnapshot, TenantCounter
from services.ports.clock import Clock
from services.ports.streams import ReportAnswer
from services.runtime.supervisor import Supervisor

log = structlog.get_logger()

_BACKOFF: Final = Backoff(first_s=0.05, max_s=1.0)
_UNANSWERED_BEATS: Final = 3
# Links in a row whose leader refused a report, after which what is sent again on each is dropped.
_MOST_REFUSALS: Final = 5


class ReportLink(LeaderLink[ReportAnswer], Protocol):
    """The report stream to a leader. An answer to report 0 is only a heartbeat."""

    async def send(self, number: int, report: ReportSnapshot) -> None:
        """Send a report; ``number`` counts from 1 on each link. Raises FairwayError when broken."""


ReportLinks: TypeAlias = LeaderLinks[ReportLink]


@dataclass(frozen=True, slots=True)
class ReporterSettings:
    # Seconds between two reports.
    gap_s: float = 0.02
    # The same while requests may wait for room.
    tight_gap_s: float = 0.004
    # The same of a worker that runs rows only, with room for more.
    rows_gap_s: float = 0.1
    # How long a change of an idle worker waits, so that a sequence's first tokens go before the report of its
    # start; where requests may wait for room, a change waits for nothing.
    lag_s: float = 0.003
    # The longest time without a report.
    beat_s: float = 1.0
    # Reports in flight; beyond it none is sent, since a later one contains more.
    max_unanswered: int = 64
    # A leader that sends heartbeats but no answer for this long counts as unresponsive.
    answer_s: float = 4.0
    # Pauses between attempts to reach a leader.
    backoff: Backoff = _BACKOFF


class Reporter:
    """Maintains one link to the leading scheduler, from ``start`` to ``close``.

    ``snapshot`` is called right before a report is sent and moves its deltas into the report. Its argument is
    True for the first report of a link, which has to be complete. ``on_leader`` is called with the epoch of
    each answer, before any snapshot for that leader. ``on_counters`` is called with the answer's tenant
    counters. All run in the event loop, must not block and must not raise.
    """

    def __init__(
        self,
        links: ReportLinks,
        clock: Clock,
        supervisor: Supervisor,
        snapshot: Callable[[bool], ReportSnapshot],
        *,
        on_leader: Callable[[int], None] | None = None,
        on_counters: Callable[[Sequence[TenantCounter]], None] | None = None,
        settings: ReporterSettings | None = None,
        rng: random.Random | None = None,
        deltas: DeltaKeeper | None = None,
    ) -> None:
        self._links = links
        self._clock = clock
        self._supervisor = supervisor
        self._snapshot = snapshot
        self._on_leader = on_leader
        self._on_counters = on_counters
        self._settings = settings if settings is not None else ReporterSettings()
        self._rng = rng if rng is not None else random.Random()
        self._deltas = deltas if deltas is not None else DeltaKeeper()
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()
        self._unanswered_since_s = math.inf  # time since which reports wait without any answer
        self._unanswered_beats = 0
        self._task: asyncio.Task[None] | None = None
        self._refusals = 0
        self._last_epoch = 0
        self._leader_seen_s = -math.inf

    @property
    def last_epoch(self) -> int:
        """Epoch of the newest leader that has responded; 0 before the first."""
        return self._last_epoch

    @property
    def leader_seen_s(self) -> float:
        """Time of the leader's last message, in the clock's monotonic seconds; ``-inf`` before the first."""
        return self._leader_seen_s

    def start(self) -> None:
        """Start to connect to the leader. Idempotent."""
        if self._task is None:
            self._task = self._supervisor.spawn("reporter.stream", self._run())

    def changed(self) -> None:
        """Send a report soon, because the worker's state changed."""
        self._changed.set()

    async def close(self) -> None:
        """Stop reporting; the scheduler makes no further placements on this worker."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,), timeout=5.0)

    # --- the stream -------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff = self._settings.backoff
        await keep_linked(self._links, self._use, self._missed, self._clock, backoff=backoff, rng=self._rng)

    def _missed(self, error: FairwayError) -> None:
        log.info("reporter.leader_missed", reason=error.reason, error=error.message)

    async def _use(self, link: ReportLink) -> None:
        """Report over a new link until it breaks."""
        lost = await self._report_until_lost(link)
        self._refusals += isinstance(lost, InvalidInput)
        if self._refusals >= _MOST_REFUSALS:
            self._refusals = 0
            self._deltas.drop_unconfirmed()
        log.info(
            "reporter.stream_lost",
            epoch=self._last_epoch,
            reason=lost.reason,
            error=lost.message,
            words_dropped=self._deltas.usage_dropped,
            tokens_dropped=self._deltas.tokens_dropped,
        )

    async def _report_until_lost(self, link: ReportLink) -> FairwayError:
        """Return why the link broke."""
        writer: asyncio.Task[None] | None = None
        try:
            self._deltas.stream_opened()
            self._await_answer()
            self._on_answer(ReportAnswer(link.epoch))
            writer = self._supervisor.spawn("reporter.writer", self._write(link))
            while True:
                self._on_answer(await link.receive())
        except FairwayError as error:
            return error
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.wait((writer,), timeout=5.0)
            await link.close()

    def _on_answer(self, answer: ReportAnswer) -> None:
        """Record the leader's epoch and the answered reports. Raises NoLeader for a former leader."""
        if answer.epoch < self._last_epoch:
            raise NoLeader(f"epoch {answer.epoch} has ended; the newest is {self._last_epoch}")
        self._last_epoch = answer.epoch
        self._leader_seen_s = self._clock.monotonic_s()
        if self._on_leader is not None:
            self._on_leader(answer.epoch)
        if self._on_counters is not None and answer.counters:
            self._on_counters(answer.counters)
        if self._deltas.confirm(answer.report):
            self._refusals = 0
            self._answered.set()
            self._await_answer()
        else:
            self._not_answered()

    def _await_answer(self) -> None:
        """Restart the wait for an answer, or stop it when no report is unconfirmed."""
        self._unanswered_since_s = self._clock.monotonic_s() if self._deltas.unconfirmed else math.inf
        self._unanswered_beats = 0

    def _not_answered(self) -> None:
        """Count a heartbeat that answers nothing. Raises NoLeader when the leader does not seem to receive
        reports.

        Requires several heartbeats: after a pause of this process the first ones were sent during the pause.
        """
        self._unanswered_beats += 1
        waited_s = self._clock.monotonic_s() - self._unanswered_since_s
        if self._unanswered_beats >= _UNANSWERED_BEATS and waited_s >= self._settings.answer_s:
            raise NoLeader(
                f"the leader sends heartbeats but answered no report for {waited_s:.1f} s", retry_after_s=1.0
            )

    async def _write(self, link: ReportLink) -> None:
        """The link's only writer: a full report first, then reports on change and at the heartbeat period.

        It closes a link that fails or that lost prefix changes. That ends the reader's wait.
        """
        try:
            while not self._deltas.overflowed:
                self._changed.clear()
                snapshot = self._snapshot(self._deltas.first)
                if snapshot.incarnation:
                    number, report = self._deltas.next_report(snapshot)
                    if self._deltas.unconfirmed == 1:
                        self._await_answer()
                    await link.send(number, report)
                else:  # not registered yet
                    self._deltas.keep(snapshot)
                await self._pause(report_gap_s(snapshot.pools, self._settings))
            log.info("reporter.prefixes_overflowed", epoch=link.epoch)
        except FairwayError as error:
            log.info("reporter.write_failed", reason=error.reason)
        await link.close()

    async def _pause(self, gap_s: float) -> None:
        """Return when the next report is to be sent, at least ``gap_s`` after the last."""
        settings = self._settings
        await self._clock.sleep(gap_s)
        if not self._changed.is_set() and not self._deltas.behind:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.beat_s):
                    await self._changed.wait()
                if gap_s > settings.tight_gap_s:
                    await self._clock.sleep(settings.lag_s)
        while self._deltas.unconfirmed >= settings.max_unanswered:
            self._answered.clear()
            await self._answered.wait()  # ends with the link: its reader waits for a bounded time


def report_gap_s(pools: Sequence[PoolSnapshot], settings: ReporterSettings) -> float:
    """Return the time from a report of these pools until the next one."""
    if any(map(_is_tight, pools)):
        return settings.tight_gap_s
    has_rows_only = bool(pools) and all(pool.row_slots for pool in pools)
    return settings.rows_gap_s if has_rows_only else settings.gap_s


def _is_tight(pool: PoolSnapshot) -> bool:
    """Whether requests may be waiting for room in this pool."""
    if pool.row_slots:
        return (pool.running + pool.waiting) * 4 >= pool.row_slots * 3
    return (
        pool.kv_blocks_reserved * 4 >= pool.kv_blocks_total * 3
        or pool.running + pool.waiting >= pool.max_sequences
    )
