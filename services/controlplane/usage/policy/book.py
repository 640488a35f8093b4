"""The state of the usage ledger: a function of the segments of its log.

Every writer that applies the same segments has the same state, so a new leader continues from a checkpoint
and the segments after it. Events of a source are numbered: what is stored already is skipped, and what
would leave a gap is not accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from services.controlplane.usage.policy.joins import OpenRequests, Post
from services.controlplane.usage.policy.lines import HOUR_S, Amounts, Line, Lines, LineSums, Source
from services.core.generation import Usage
from services.core.usage import DeviceInterval, RequestUsage, SequenceDeviceUse, UsageEvent

SOURCE_KEEP_S: Final = 90 * 86_400.0
MAX_SOURCES: Final = 100_000


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Consecutive events of a source. Those up to ``lost_until`` that are not stored yet were lost there,
    except for ``apart`` of them, which the source set aside."""

    source: str
    first: int
    events: tuple[UsageEvent, ...]
    lost_until: int = 0
    apart: int = 0


@dataclass(frozen=True, slots=True)
class SourceEvents:
    """Events of a report that were not stored before. ``last`` is the number of the last one. ``apart``
    counts missing numbers before them that are not lost; not stored."""

    source: str
    last: int
    events: tuple[UsageEvent, ...]
    apart: int = 0


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request without a gateway's report is charged from its workers' reports."""

    request_id: str
    usage: Usage
    list_micros: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The unit of the log. ``booked_s``: Unix time of its writer."""

    number: int
    writer: str
    booked_s: float
    batches: tuple[SourceEvents, ...] = ()
    charges: tuple[Charge, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredSource:
    """The last durable event of a source, and when it was booked."""

    last: int
    booked_s: float


@dataclass(slots=True)
class LedgerBook:
    """``sums`` has what was booked since the last checkpoint. ``hours`` names the objects with all that was
    booked before: each hour's is named by the segment with which it ends."""

    number: int = 0  # number of the last segment
    booked_s: float = 0.0
    sources: dict[str, StoredSource] = field(default_factory=dict)
    requests: OpenRequests = field(default_factory=OpenRequests)
    sums: LineSums = field(default_factory=LineSums)
    hours: dict[int, int] = field(default_factory=dict)

    def last_of(self, source: str) -> int:
        """Return the number of the last durable event of a source; 0: none."""
        stored = self.sources.get(source)
        return 0 if stored is None else stored.last

    def apply(self, segment: Segment) -> Lines:
        """Book a segment; return what it added, by line. Segments are applied in order, each once."""
        assert segment.number == self.number + 1, f"segment {segment.number} follows {self.number}"
        self.number = segment.number
        self.booked_s = now_s = max(self.booked_s, segment.booked_s)
        added: dict[Line, Amounts] = {}

        def post(line: Line, amounts: Amounts) -> Line:
            line = self.sums.add(line, amounts)
            added[line] = added.get(line, Amounts()).plus(amounts)
            return line

        for batch in segment.batches:
            for event in batch.events:
                self._book(event, now_s, post)
            self.sources[batch.source] = StoredSource(batch.last, now_s)
        for charge in segment.charges:
            self.requests.charge(charge.request_id, charge.usage, charge.list_micros, post)
        self.requests.close(now_s, post)
        return added

    def seal(self) -> LedgerBook:
        """Return the state as of now, unchanged by later segments, with the sums, which restart here."""
        self._forget_sources()
        sealed = replace(
            self, sources=dict(self.sources), requests=self.requests.copy(), hours=dict(self.hours)
        )
        self.sums = LineSums()
        return sealed

    def _forget_sources(self) -> None:
        """Drop the sources that reported nothing for long, and the oldest ones above the bound."""
        by_age = sorted(self.sources.items(), key=lambda item: (item[1].booked_s, item[0]))
        surplus = len(by_age) - MAX_SOURCES
        for at, (name, stored) in enumerate(by_age):
            if at < surplus or self.booked_s - stored.booked_s > SOURCE_KEEP_S:
                del self.sources[name]

    def _book(self, event: UsageEvent, now_s: float, post: Post) -> None:
        match event:
            case RequestUsage():
                self.requests.gateway(event, now_s, post)
            case SequenceDeviceUse():
                self.requests.worker(event, now_s, post)
            case DeviceInterval():
                hour = int(event.ended_unix_s // HOUR_S)
                idle_s = max(0.0, event.ended_unix_s - event.began_unix_s - event.busy_s)
                rest_s = max(0.0, event.busy_s - event.attributed_s)
                unused_s = idle_s
                for one in event.residents:
                    labels = (("owner", one.owner),) if one.owner else ()
                    line = Line(hour, model=one.deployment, labels=labels, source=Source.IDLE)
                    post(line, Amounts.of_device(idle_s * one.memory_ratio, event.cost_per_hour))
                    unused_s -= idle_s * one.memory_ratio
                post(Line(hour, source=Source.IDLE), Amounts.of_device(unused_s, event.cost_per_hour))
                post(Line(hour, source=Source.UNATTRIBUTED), Amounts.of_device(rest_s, event.cost_per_hour))


def new_part(report: UsageReport, last: int) -> SourceEvents | None:
    """Return the events of a report after the number ``last``. None: it would leave a gap."""
    last = max(last, min(report.lost_until, report.first - 1))
    if report.first > last + 1:
        return None
    events = report.events[last + 1 - report.first :]
    last = max(last, report.first + len(report.events) - 1)
    return SourceEvents(report.source, last, events, report.apart)


def new_parts(
    reports: Sequence[UsageReport], book: LedgerBook
) -> tuple[tuple[SourceEvents, ...], tuple[int, ...]]:
    """Return the batches that the reports add to the book, and for each report the last number afterwards."""
    last_of: dict[str, int] = {}
    batches: list[SourceEvents] = []
    answers: list[int] = []
    for report in reports:
        last = last_of.get(report.source, book.last_of(report.source))
        batch = new_part(report, last)
        if batch is not None and batch.last > last:
            batches.append(batch)
            last_of[report.source] = last = batch.last
        answers.append(last)
    return tuple(batches), tuple(answers)


def not_in_future(events: Iterable[UsageEvent], now_s: float) -> tuple[UsageEvent, ...]:
    """Return the events with ends that are not after now: clocks differ, and no future hour is booked."""
    return tuple(
        event if event.ended_unix_s <= now_s else structs.replace(event, ended_unix_s=now_s)
        for event in events
    )
