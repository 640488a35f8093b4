"""Sends what a gateway measured to the leading control plane, and again after a failover.

A report is kept until it is in a snapshot of the control plane. A new leader begins from the last snapshot
and receives the later reports again; their numbers make each count once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

import structlog

from services.core.arms import SliReceipt, SliReport
from services.core.errors import FairwayError, is_final
from services.gateway.slis.recorder import SliRecorder
from services.ports.clock import Clock
from services.runtime.telemetry.metrics import Metrics

log = structlog.get_logger()

PERIOD_S: Final = 2.0
MAX_KEPT: Final = 300  # ten minutes
_AT_ONCE: Final = 4
_LAST_SEND_S: Final = 2.0


class SliReports(Protocol):
    """The leading control plane's store of service level indicators."""

    async def report(self, source: str, first: int, oldest: int, reports: Sequence[SliReport]) -> SliReceipt:
        """Count reports of a source, which numbers them; ``oldest`` is the first that it still has.

        A report with a number that is already counted is skipped. With a gap before ``first`` that the source
        can fill, nothing is counted. Raises FairwayError, within a bounded time.
        """


class SliReporter:
    """``source`` is unique to this life of the process. The owner runs ``run``."""

    def __init__(
        self,
        recorder: SliRecorder,
        reports: SliReports,
        clock: Clock,
        source: str,
        *,
        metrics: Metrics | None = None,
    ) -> None:
        self._recorder = recorder
        self._reports = reports
        self._clock = clock
        self._source = source
        self._kept: deque[SliReport] = deque()
        self._first = 1  # number of the first kept report
        self._last = 0  # number of the last one that the leader has counted
        self._lost = 0
        if metrics is not None:
            metrics.counted(
                "fairway_sli_reports_lost_total",
                "Reports that no control plane stored in time, or that one refused for good",
                lambda: [((), float(self._lost))],
            )

    @property
    def kept(self) -> int:
        """Reports that are not durable yet."""
        return len(self._kept)

    async def run(self) -> None:
        """Report every ``PERIOD_S`` until cancelled; survives an outage of the control plane."""
        while True:
            await self._clock.sleep(PERIOD_S)
            try:
                await self.send()
            except FairwayError as error:
                log.info("slis.not_sent", reason=error.reason)

    async def close(self) -> None:
        """Try once to send the rest. ``run`` has ended."""
        with suppress(TimeoutError, FairwayError):
            async with asyncio.timeout(_LAST_SEND_S):
                await self.send()

    async def send(self) -> None:
        """Cut a report, and send what the leader has not counted. Raises FairwayError."""
        report = self._recorder.cut(self._clock.unix_s())
        if report is not None:
            self._keep(report)
        if not self._kept:
            return
        at_once = _AT_ONCE
        while True:
            begin = max(self._last + 1, self._first)
            at = min(begin - self._first, len(self._kept))
            batch = [self._kept[at + more] for more in range(min(at_once, len(self._kept) - at))]
            try:
                receipt = await self._reports.report(self._source, begin, self._first, batch)
            except FairwayError as error:
                if not is_final(error) or not batch:
                    raise
                if at_once == 1:
                    if not (batch[0].series or batch[0].windows or batch[0].shapes or batch[0].requests):
                        raise  # the leader refuses whatever is sent, so the next period tries again
                    log.error("slis.report_refused", number=begin, reason=error.reason, error=error.message)
                    self._kept[at] = SliReport(batch[0].cut_unix_s, {}, {})  # an empty one has its number
                    self._lost += 1
                at_once = 1
                continue
            progress = receipt.last != self._last
            self._last = receipt.last
            while self._kept and self._first <= receipt.durable:
                self._kept.popleft()
                self._first += 1
            if not progress or self._last >= self._first + len(self._kept) - 1:
                return

    def _keep(self, report: SliReport) -> None:
        self._kept.append(report)
        if len(self._kept) > MAX_KEPT:
            self._kept.popleft()
            self._lost += self._first > self._last
            self._first += 1
