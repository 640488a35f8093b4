"""The usage ledger of the leading control plane: batches in, durable segments, sums out.

One task appends: it collects the batches of about a second into one segment, writes it, books it and
answers. A batch is answered only when it is durable. While another control plane leads, every call raises
NoLeader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from services.controlplane.usage.log import Superseded, UsageLog
from services.controlplane.usage.policy.book import (
    Charge,
    LedgerBook,
    Segment,
    UsageReport,
    new_parts,
    not_in_future,
)
from services.controlplane.usage.policy.joins import Unmatched
from services.controlplane.usage.policy.lines import HOUR_S, Amounts, Line, Lines, summed
from services.controlplane.usage.policy.queries import UsageQuery, UsageRow, add_hour, rows_of
from services.controlplane.usage.telemetry import LedgerTelemetry
from services.core.errors import FairwayError, NoLeader, NotFound, QueueFull, StoreUnavailable
from services.ports.clock import Clock
from services.ports.usage import LedgerStore
from services.runtime.fleet_state.leadership import Leadership
from services.runtime.supervisor import first_of

log = structlog.get_logger()

CHECKPOINT_S: Final = 600.0
MAX_QUEUED_EVENTS: Final = 200_000
_SEGMENT_EVENTS: Final = 20_000
_COLLECT_S: Final = 0.1
_SEGMENT_EACH_S: Final = 1.0  # interval of segments: at most one object per second
_RETRY_S: Final = 0.5
_MOST_RETRY_S: Final = 5.0
_WARM_HOURS: Final = 48  # kept in memory
_TRIES: Final = 3


@dataclass(slots=True)
class _Waiting:
    """A call that waits for its segment. ``answer``: the last durable number of the source."""

    answer: asyncio.Future[int]
    report: UsageReport | None = None
    charges: tuple[Charge, ...] = ()

    @property
    def events(self) -> int:
        return len(self.charges) + (0 if self.report is None else len(self.report.events))


@dataclass(slots=True)
class _Term:
    """The state of one leadership. ``sealed``: sums that a checkpoint is being made of."""

    epoch: int
    book: LedgerBook
    sealed: LedgerBook | None = None
    stored: dict[tuple[int, int], Lines] = field(default_factory=dict)  # objects of recent hours


class UsageLedger:
    """Runs in every control plane; acts while it leads. ``run`` is the only writer of the term's book."""

    def __init__(
        self,
        store: LedgerStore,
        clock: Clock,
        leadership: Leadership,
        *,
        writer: str,
        retention_s: float,
        telemetry: LedgerTelemetry | None = None,
    ) -> None:
        """``writer`` is unique to this process. Hours older than ``retention_s`` are dropped."""
        self._log = UsageLog(store, clock)
        self._clock = clock
        self._leadership = leadership
        self._writer = writer
        self._retention_hours = int(retention_s // HOUR_S)
        self._telemetry = telemetry if telemetry is not None else LedgerTelemetry()
        self._term: _Term | None = None
        self._queue: list[_Waiting] = []
        self._queued = asyncio.Event()
        self._checkpointing = asyncio.Lock()
        self._failure = ""

    @property
    def leads(self) -> bool:
        return self._term is not None and self._leadership.epoch == self._term.epoch

    @property
    def waiting(self) -> int:
        """Requests that only workers reported."""
        return len(self._term.book.requests.waiting) if self._term is not None else 0

    def problem(self) -> str:
        """Return why the ledger that this process is to lead cannot be read, or which damage was set
        aside."""
        if self._failure and self._leadership.epoch is not None:
            return f"the usage ledger cannot be read: {self._failure}"
        if not self._log.damaged:
            return ""
        return f"{len(self._log.damaged)} damaged objects of the usage ledger are set apart under damaged/"

    @property
    def damaged(self) -> int:
        """Objects of the ledger's store that are set aside because of damage."""
        return len(self._log.damaged)

    async def report(self, report: UsageReport) -> int:
        """Return the number up to which the source's events are durable: below ``report.first`` - 1, earlier
        ones are missing. Raises NoLeader, QueueFull or StoreUnavailable; then it is to be sent again."""
        events = not_in_future(report.events, round(self._clock.unix_s(), 3))
        return await self._write(replace(report, events=events), ())

    async def charge(self, charges: Sequence[Charge]) -> None:
        """Return once the charges are durable. Raises as ``report``."""
        await self._write(None, tuple(charges))

    def unmatched(self, older_than_s: float) -> tuple[Unmatched, ...]:
        """Return the requests that only workers reported, the last time that long ago. Raises NoLeader."""
        return self._leading().book.requests.unmatched(self._clock.unix_s(), older_than_s)

    def charged_tenants(self, within_s: float) -> tuple[str, ...]:
        """Return the tenants of requests that were lately charged from workers' reports. Raises NoLeader."""
        return self._leading().book.requests.charged_tenants(self._clock.unix_s(), within_s)

    async def rows(self, query: UsageQuery) -> list[UsageRow]:
        """Return the sums of the query. Raises NoLeader or StoreUnavailable."""
        groups: dict[Line, Amounts] = {}
        for hour in range(query.start, query.end):
            lines = await self._lines_of(hour)
            if lines:
                add_hour(query, lines, groups)
                await self._clock.sleep(0)
        return rows_of({line: amounts for line, amounts in groups.items() if amounts != Amounts()})

    async def run(self) -> None:
        """Lead whenever this control plane is elected, until cancelled; survives an outage of the store."""
        retry_s = _RETRY_S
        while True:
            epoch = await self._leadership.wait_leading()
            try:
                self._term = _Term(epoch, await self._log.load())
                self._failure, retry_s = "", _RETRY_S
                if self._log.unread or self._log.unread_more:
                    self._telemetry.lost(self._log.unread)
                    log.error("usage.events_lost", events=self._log.unread, at_least=self._log.unread_more)
                log.info("usage.ledger_loaded", segment=self._term.book.number, epoch=epoch)
                await first_of(
                    self._append_forever(), self._checkpoint_forever(), self._leadership.wait_lost(epoch)
                )
            except Superseded:
                log.info("usage.ledger_superseded", epoch=epoch)
            except NoLeader:
                log.info("usage.leadership_lost", epoch=epoch)
            except FairwayError as error:
                self._telemetry.store_failed()
                if error.message != self._failure:
                    log.warning("usage.ledger_interrupted", reason=error.reason, error=error.message)
                self._failure, retry_s = error.message, min(_MOST_RETRY_S, 2 * retry_s)
            finally:
                self._term = None
                self._refuse()
            await self._clock.sleep(retry_s)

    # --- the one writer ----------------------------------------------------------------------------

    async def _append_forever(self) -> None:
        while True:
            await self._queued.wait()
            await self._clock.sleep(_COLLECT_S)
            began_s = self._clock.monotonic_s()
            await self._append_next()
            await self._clock.sleep(
                max(0.0, _SEGMENT_EACH_S - _COLLECT_S - self._clock.monotonic_s() + began_s)
            )

    async def _append_next(self) -> None:
        """Write one segment of what waits, book it, then answer."""
        book, taken = self._leading().book, self._take()
        try:
            now_s = round(self._clock.unix_s(), 3)
            batches, answers = new_parts([each.report for each in taken if each.report], book)
            charges = tuple(charge for each in taken for charge in each.charges)
            if batches or charges:
                await self._store(book, Segment(book.number + 1, self._writer, now_s, batches, charges))
            rest = iter(answers)
            for each in taken:
                last = next(rest) if each.report else 0
                if not each.answer.done():
                    each.answer.set_result(last)
        finally:
            for each in taken:
                if not each.answer.done():
                    each.answer.set_exception(_no_leader())

    async def _store(self, book: LedgerBook, segment: Segment) -> None:
        """Return once the segment is durable and booked. Raises Superseded, or NoLeader."""
        began_s = self._clock.monotonic_s()
        while True:
            self._leading()
            try:
                await self._log.append(segment)
                break
            except StoreUnavailable as error:
                self._telemetry.store_failed()
                log.warning("usage.append_failed", segment=segment.number, error=error.message)
                await self._clock.sleep(_RETRY_S)
        self._telemetry.appended(self._clock.monotonic_s() - began_s)
        for batch in segment.batches:
            lost = batch.last - book.last_of(batch.source) - len(batch.events) - batch.apart
            if lost > 0:
                self._telemetry.lost(lost)
                log.error("usage.events_lost", source=batch.source, events=lost)
        self._telemetry.booked(book.apply(segment))

    def _take(self) -> list[_Waiting]:
        taken, events = [], 0
        while self._queue and events < _SEGMENT_EVENTS:
            taken.append(self._queue.pop(0))
            events += taken[-1].events
        if not self._queue:
            self._queued.clear()
        return taken

    async def _write(self, report: UsageReport | None, charges: tuple[Charge, ...]) -> int:
        self._leading()
        waiting = _Waiting(asyncio.get_running_loop().create_future(), report, charges)
        if sum(each.events for each in self._queue) + waiting.events > MAX_QUEUED_EVENTS:
            raise QueueFull("more usage is reported than can be stored; send it later", retry_after_s=1.0)
        self._queue.append(waiting)
        self._queued.set()
        return await waiting.answer

    def _refuse(self) -> None:
        waiting, self._queue = self._queue, []
        self._queued.clear()
        for each in waiting:
            if not each.answer.done():
                each.answer.set_exception(_no_leader())

    # --- checkpoints -------------------------------------------------------------------------------

    async def _checkpoint_forever(self) -> None:
        while True:
            await self._clock.sleep(CHECKPOINT_S)
            try:
                await self.checkpoint()
            except StoreUnavailable as error:
                self._telemetry.store_failed()
                log.warning("usage.checkpoint_failed", error=error.message)

    async def checkpoint(self) -> None:
        """Store the state, and delete what earlier checkpoints replaced; calls follow each other.

        Raises StoreUnavailable, NoLeader or Superseded.
        """
        # Of two at once, the one that ends last would drop the sums that were sealed after the other.
        async with self._checkpointing:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        term = self._leading()
        await self._log.list_damaged()
        await self._log.delete_covered(term.book)
        if term.sealed is None:
            if not term.book.sums.hours:
                return
            term.sealed = term.book.seal()
        oldest = int(self._clock.unix_s() // HOUR_S) - self._retention_hours
        hours = await self._log.write_checkpoint(term.sealed, oldest)
        term.book.hours, term.sealed = hours, None
        recent = sorted(hours)[-_WARM_HOURS:]
        term.stored = {key: lines for key, lines in term.stored.items() if key[0] in recent}

    # --- queries -----------------------------------------------------------------------------------

    async def _lines_of(self, hour: int) -> Lines:
        """Return the lines of an hour from its object, an unfinished checkpoint, and later segments."""
        for _ in range(_TRIES):
            term = self._leading()
            through = term.book.hours.get(hour)
            try:
                stored = await self._stored_hour(term, hour, through) if through is not None else {}
            except NotFound:
                continue  # a checkpoint replaced it
            if term.book.hours.get(hour) != through:
                continue
            parts = [stored]
            if term.sealed is not None:
                parts.append(term.sealed.sums.hours.get(hour, {}))
            parts.append(term.book.sums.hours.get(hour, {}))
            parts = [part for part in parts if part]
            return parts[0] if len(parts) == 1 else summed(parts)
        raise StoreUnavailable("the hour is being rewritten; try again", retry_after_s=1.0)

    async def _stored_hour(self, term: _Term, hour: int, through: int) -> Lines:
        found = term.stored.get((hour, through))
        if found is None:
            found = await self._log.hour(hour, through)
            if hour >= int(self._clock.unix_s() // HOUR_S) - _WARM_HOURS:
                term.stored[hour, through] = found
        return found

    def _leading(self) -> _Term:
        if self._term is None or self._leadership.epoch != self._term.epoch:
            raise _no_leader()
        return self._term


def _no_leader() -> NoLeader:
    return NoLeader("this control plane does not lead the usage ledger", retry_after_s=1.0)
