"""One worker's stream at the scheduler, without a wire: for the gRPC servicer and the in-process reporter.

Answers that wait are gathered into one per ``take``: the newest report that was taken over, and the newest
word on each tenant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.core.fleet import ReportSnapshot, TenantCounter


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """What the leader of ``epoch`` says: it took over all reports up to ``report``, 0 for none yet.

    ``counters`` are of tenants whose service changed since the answer before.
    """

    epoch: int
    report: int = 0
    counters: tuple[TenantCounter, ...] = ()


class ReportStream(Protocol):
    """Owned by one caller in the scheduler's event loop."""

    @property
    def epoch(self) -> int:
        """The leadership that this stream belongs to."""

    def report(self, number: int, snapshot: ReportSnapshot) -> None:
        """Hand a report over; ``number`` counts those of this stream from 1. Raises what ended the stream."""

    def take(self) -> ReportAnswer | None:
        """Return what is to be answered and forget it; None when there is nothing.

        Raises the error that ended the stream: NoLeader when the scheduler leads no longer, Conflict when
        the worker opened another stream.
        """

    def close(self) -> None:
        """Place nothing more on the worker until it reports again. Idempotent."""


class ReportStreams(Protocol):
    def open_report(self, wake: Callable[[], None]) -> ReportStream:
        """Return a new stream. ``wake`` is called, in the event loop, when ``take`` has something.

        Raises NoLeader while this scheduler does not lead, OverQuota when there are too many streams.
        """
