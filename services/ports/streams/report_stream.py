"""Port of a worker's stream at the scheduler, independent of gRPC: for the servicer and the in-process
reporter.

Pending answers are merged into one per ``take``: the number of the newest report that was applied, and the
newest counter of each tenant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.core.fleet import ReportSnapshot, TenantCounter


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """Answer of the leader of ``epoch``: it applied all reports up to ``report``, 0 for none yet.

    ``counters`` are of tenants whose service changed since the previous answer.
    """

    epoch: int
    report: int = 0
    counters: tuple[TenantCounter, ...] = ()


class ReportStream(Protocol):
    """Owned by one caller in the scheduler's event loop."""

    @property
    def epoch(self) -> int:
        """The epoch of the leader that serves this stream."""

    def report(self, number: int, snapshot: ReportSnapshot) -> None:
        """Pass a report on; ``number`` counts the reports of this stream from 1. Raises the error that ended
        the stream."""

    def take(self) -> ReportAnswer | None:
        """Return and clear the pending answer; None when there is none.

        Raises the error that ended the stream: NoLeader when the scheduler no longer leads, Conflict when the
        worker opened another stream.
        """

    def close(self) -> None:
        """Stop placements on the worker until it reports again. Idempotent."""


class ReportStreams(Protocol):
    def open_report(self, wake: Callable[[], None]) -> ReportStream:
        """Return a new stream. ``wake`` is called, in the event loop, when ``take`` has something.

        Raises NoLeader while this scheduler does not lead, OverQuota when there are too many streams.
        """
