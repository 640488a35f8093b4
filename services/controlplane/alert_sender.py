"""Sends the alerts that the leader found to an Alertmanager as Prometheus does: all, and again each minute.

What is sent is the present state, so there is no queue: an Alertmanager that was away receives what is on
when it returns, and one that has an alert already takes it as the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import structlog

from services.controlplane.policy.paging import AlertBook
from services.core.backoff import Backoff
from services.core.errors import Unavailable
from services.ports.clock import Clock
from services.runtime.telemetry.metrics import Counter, Metrics

log = structlog.get_logger()

RESEND_S: Final = 60.0
POLL_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
_RETRY: Final = Backoff(1.0, MAX_BACKOFF_S)
_AT_ONCE: Final = 64  # alerts of one call

# Returns once the Alertmanager has taken the alerts. Raises Unavailable, which names its URL and the cause.
PostAlerts = Callable[[Sequence[dict[str, Any]]], Awaitable[None]]


def alert_posts(metrics: Metrics) -> Counter:
    """Return the counter of calls, which all senders of a process share."""
    return metrics.counter(
        "fairway_alert_posts_total",
        "Calls that send alerts to Alertmanagers, by outcome: sent, failed",
        ("outcome",),
    )


class AlertSender:
    """Sends to one Alertmanager. The owner runs ``run`` in every control plane; it acts while ``leads``."""

    def __init__(
        self, book: AlertBook, post: PostAlerts, clock: Clock, *, leads: Callable[[], bool], posts: Counter
    ) -> None:
        self._book = book
        self._post = post
        self._clock = clock
        self._leads = leads
        self._posts = posts
        self._problem = ""

    def problem(self) -> str:
        """Return why the last call failed; empty after one that did not."""
        return self._problem

    async def run(self) -> None:
        """Send each change within ``POLL_S``, and all again every ``RESEND_S``, until cancelled."""
        failures, sent, due_s = 0, -1, 0.0
        while True:
            await self._clock.sleep(POLL_S)
            if not self._leads():
                self._book.clear()
                failures, sent, self._problem = 0, -1, ""
                continue
            version, now_s = self._book.version, self._clock.monotonic_s()
            if now_s < due_s and (version == sent or failures):
                continue
            try:
                await self._send()
                failures, sent, due_s = 0, version, now_s + RESEND_S
                self._problem = ""
            except Unavailable as error:
                failures += 1
                due_s = now_s + _RETRY.longest_s(failures)
                if error.message != self._problem:
                    log.warning("alerts.not_sent", error=error.message)
                self._problem = error.message

    async def _send(self) -> None:
        alerts = self._book.payload(self._clock.unix_s())
        for at in range(0, len(alerts), _AT_ONCE):
            try:
                await self._post(alerts[at : at + _AT_ONCE])
            except Unavailable:
                self._posts.add("failed")
                raise
            self._posts.add("sent")
