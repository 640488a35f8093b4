"""Metrics of idempotency keys: the results of clients' keys and claims, and the record store's answers."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from services.ports.idempotency import Claim, Ended, Expired, Owned, Running
from services.runtime.telemetry.metrics import Metrics


class KeyOutcome(StrEnum):
    """The result of a client's key, or of a claim of its record."""

    NEW = "new"
    TAKEOVER = "takeover"
    ATTACHED = "attached"
    REPLAYED = "replayed"
    CONFLICT = "conflict"
    EXPIRED = "expired"
    REFUSED = "refused"


class EndingOutcome(StrEnum):
    """The result of the write that ends or releases a record."""

    WRITTEN = "written"
    FENCED = "fenced"
    DEFERRED = "deferred"
    DROPPED = "dropped"


def outcome_of(claim: Claim) -> KeyOutcome:
    if isinstance(claim, Owned):
        return KeyOutcome.TAKEOVER if claim.chunks else KeyOutcome.NEW
    if isinstance(claim, Running):
        return KeyOutcome.ATTACHED
    if isinstance(claim, Ended):
        return KeyOutcome.REPLAYED
    return KeyOutcome.EXPIRED if isinstance(claim, Expired) else KeyOutcome.CONFLICT


class KeyedTelemetry:
    """The instruments of one gateway's keys."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._clients = metrics.counter(
            "fairway_idempotency_clients_total",
            "Requests with an idempotency key, by outcome",
            ("tenant", "outcome"),
        )
        self._claims = metrics.counter(
            "fairway_idempotency_claims_total",
            "Claims of idempotency records, by the store's answer",
            ("outcome",),
        )
        self._endings = metrics.counter(
            "fairway_idempotency_endings_total",
            "Keyed runs that ended, by outcome of the last record write",
            ("outcome",),
        )
        self._flush = metrics.histogram(
            "fairway_idempotency_flush_seconds",
            "From the write of one tenant's records and lease renewals until the store's answer",
            ("outcome",),
        )

    def clients(self, tenant_id: str, outcome: KeyOutcome, count: int = 1) -> None:
        self._clients.add(self._metrics.tenants.of(tenant_id), outcome.value, amount=count)

    def claim(self, outcome: KeyOutcome) -> None:
        self._claims.add(outcome.value)

    def ending(self, outcome: EndingOutcome) -> None:
        self._endings.add(outcome.value)

    def flush(self, elapsed_s: float, *, answered: bool) -> None:
        self._flush.observe(elapsed_s, "written" if answered else "failed")

    def export_levels(
        self, *, followers: Callable[[], int], owned: Callable[[], int], pending_ends: Callable[[], int]
    ) -> None:
        """Export the gateway's present state for keys."""
        self._metrics.level(
            "fairway_idempotency_followers",
            "Connected clients with an idempotency key",
            lambda: float(followers()),
        )
        self._metrics.level(
            "fairway_idempotency_records_owned",
            "Records whose request this gateway runs",
            lambda: float(owned()),
        )
        self._metrics.level(
            "fairway_idempotency_endings_unwritten",
            "Final records that wait for the store",
            lambda: float(pending_ends()),
        )


class Arrivals:
    """Counts each client of one run once; clients from before the claim are counted when it is answered."""

    def __init__(self, telemetry: KeyedTelemetry, tenant_id: str) -> None:
        self._telemetry = telemetry
        self._tenant_id = tenant_id
        self._waiting = 0
        self._claimed = False

    def joined(self, *, ended: bool) -> None:
        """``ended``: the request has ended."""
        if self._claimed:
            self._telemetry.clients(self._tenant_id, KeyOutcome.REPLAYED if ended else KeyOutcome.ATTACHED)
        else:
            self._waiting += 1

    def claimed(self, outcome: KeyOutcome) -> None:
        """Count the first claim; later claims change nothing for clients that are already counted."""
        if self._claimed or not self._waiting:
            return
        self._claimed = True
        self._telemetry.clients(self._tenant_id, outcome)
        others = KeyOutcome.ATTACHED if outcome in (KeyOutcome.NEW, KeyOutcome.TAKEOVER) else outcome
        if self._waiting > 1:
            self._telemetry.clients(self._tenant_id, others, self._waiting - 1)
