"""What metrics state about the calls of the quota store."""

from __future__ import annotations

from collections.abc import Callable

from services.adapters.quotas.settlement_spool import SettlementSpool
from services.core.limits import LimitKind
from services.runtime.telemetry.metrics import SHORT_S, Metrics


class LimiterTelemetry:
    """A rejection is a successful call; only an unavailable store is a failure."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seconds = metrics.histogram(
            "fairway_limiter_call_seconds",
            "From a call of the quota store until its answer or failure",
            ("operation",),
            bounds=SHORT_S,
        )
        self._failures = metrics.counter(
            "fairway_limiter_failures_total",
            "Failed calls of the quota store; the gateway then applies its own share of the limits",
            ("operation",),
        )
        self._outages = metrics.counter(
            "fairway_limiter_outage_decisions_total",
            "Limits decided without the quota store: open to the gateway's own share, or closed",
            ("kind", "policy"),
        )

    def export(
        self, *, breaker_open: Callable[[], bool], unsettled: Callable[[], int], spool: SettlementSpool
    ) -> None:
        """Export the state of the store and of the settlements that wait for it."""
        metrics = self._metrics
        metrics.level(
            "fairway_limiter_breaker_open",
            "1 while the quota store counts as unavailable, else 0",
            lambda: float(breaker_open()),
        )
        metrics.level(
            "fairway_limiter_unsettled",
            "Ended requests whose usage is not yet in the quota store",
            lambda: float(unsettled()),
        )
        metrics.level(
            "fairway_limiter_spool_bytes",
            "Bytes of usage spooled for the quota store",
            lambda: float(spool.size_bytes),
        )
        metrics.counted(
            "fairway_limiter_spool_lost_total",
            "Damaged lines of spooled usage, which the quota store never receives",
            lambda: [((), float(spool.lost))],
        )

    def decided_without_store(self, kind: LimitKind, *, admitted: bool) -> None:
        self._outages.add(kind.value, "open" if admitted else "closed")

    def failed(self, operation: str) -> None:
        self._failures.add(operation)

    def answered(self, operation: str, seconds: float) -> None:
        self._seconds.observe(seconds, operation)
