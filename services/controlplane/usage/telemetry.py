"""Metrics of the usage ledger: what was booked, and how long it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from services.controlplane.usage.policy.lines import Lines, Source
from services.runtime.telemetry.metrics import LATENCY_S, Metrics


class LedgerTelemetry:
    """Counts what this process booked while it led; the sum over all control planes is exact but for a lost
    process."""

    def __init__(
        self,
        metrics: Metrics | None = None,
        *,
        waiting: Callable[[], int] = lambda: 0,
        damaged: Callable[[], int] = lambda: 0,
    ) -> None:
        """``waiting`` returns how many requests only workers have reported, ``damaged`` how many objects are
        set aside."""
        metrics = metrics if metrics is not None else Metrics()
        self._tenants, self._models = metrics.tenants, metrics.models
        self._requests = metrics.counter(
            "fairway_usage_requests_total", "Requests booked", ("tenant", "model")
        )
        self._tokens = metrics.counter(
            "fairway_usage_tokens_total",
            "Tokens booked; cached is a part of prompt",
            ("tenant", "model", "kind"),
        )
        self._device_s = metrics.counter(
            "fairway_usage_device_seconds_total",
            "Device time booked; tenant is (idle) or (unattributed) for time without a request",
            ("tenant", "model"),
        )
        self._cost = metrics.counter(
            "fairway_usage_cost_micros_total",
            "Cost booked in millionths of the currency unit: at list price, and as measured on devices",
            ("tenant", "model", "kind"),
        )
        self._append_s = metrics.histogram(
            "fairway_usage_append_seconds",
            "From the start of a segment's write until it is durable",
            bounds=LATENCY_S,
        ).cell()
        self._lost = metrics.counter(
            "fairway_usage_events_lost_total", "Events that their source lost before they were stored"
        ).cell()
        self._failures = metrics.counter(
            "fairway_usage_store_failures_total", "Reads and writes of the ledger's store that failed"
        ).cell()
        metrics.level(
            "fairway_usage_waiting_requests",
            "Requests that workers reported and no gateway did; 0 while not leading",
            lambda: float(waiting()),
        )
        metrics.level(
            "fairway_usage_damaged_objects",
            "Objects of the ledger with damage or impossible events, of which a copy is set apart",
            lambda: float(damaged()),
        )

    def booked(self, added: Lines) -> None:
        """Count what a segment added. A charge that a gateway's report replaced counts once."""
        sums: Counter[tuple[str, str, str]] = Counter()
        for line, amounts in added.items():
            tenant = f"({line.source})" if line.source in (Source.IDLE, Source.UNATTRIBUTED) else line.tenant
            of = self._tenants.of(tenant), self._models.of(line.model)
            sums[*of, "requests"] += amounts.requests
            sums[*of, "prompt"] += amounts.prompt_tokens
            sums[*of, "cached"] += amounts.cached_tokens
            sums[*of, "output"] += amounts.output_tokens
            sums[*of, "device"] += amounts.device_us
            sums[*of, "list"] += amounts.list_micros
            sums[*of, "measured"] += amounts.measured_nanos
        for (tenant, model, what), amount in sums.items():
            if amount > 0:
                self._add(tenant, model, what, amount)

    def appended(self, elapsed_s: float) -> None:
        self._append_s.observe(elapsed_s)

    def lost(self, events: int) -> None:
        self._lost.add(events)

    def store_failed(self) -> None:
        self._failures.add()

    def _add(self, tenant: str, model: str, what: str, amount: int) -> None:
        match what:
            case "requests":
                self._requests.add(tenant, model, amount=amount)
            case "device":
                self._device_s.add(tenant, model, amount=amount / 1e6)
            case "list":
                self._cost.add(tenant, model, what, amount=amount)
            case "measured":
                self._cost.add(tenant, model, what, amount=amount / 1e3)
            case _:
                self._tokens.add(tenant, model, what, amount=amount)
