"""Usage ledgers on one store, and the elections and sources that tests give them."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from services.controlplane.usage.ledger import UsageLedger
from services.controlplane.usage.policy.book import UsageReport
from services.controlplane.usage.policy.queries import Dimension, UsageQuery
from services.controlplane.usage.telemetry import LedgerTelemetry
from services.core.generation import Usage
from services.core.usage import RequestUsage, SequenceDeviceUse, UsageEvent
from services.ports.clock import Clock
from services.ports.usage import LedgerStore
from tests.support.election import StaticElection
from tests.support.waiting import until

UNIX_S: Final = 1_800_000_000.0
HOUR: Final = int(UNIX_S // 3600)
DAY_S: Final = 86_400.0


class CountedLoss(LedgerTelemetry):
    """``events``: how many were counted as lost."""

    events = 0

    def lost(self, events: int) -> None:
        self.events += events


def ledger_of(
    store: LedgerStore,
    clock: Clock,
    election: StaticElection,
    *,
    writer: str = "a",
    telemetry: LedgerTelemetry | None = None,
) -> UsageLedger:
    return UsageLedger(store, clock, election, writer=writer, retention_s=400 * DAY_S, telemetry=telemetry)


async def until_leading(ledger: UsageLedger) -> None:
    await until(lambda: ledger.leads)


def request_usage(name: str, *, ended_unix_s: float = UNIX_S) -> RequestUsage:
    """Return the report of a request whose key is its own name, so that each has a line."""
    return RequestUsage(
        request_id=name,
        tenant="acme",
        key_id=name,
        user="",
        model="chat",
        version_digest="sha256:1",
        ended_unix_s=ended_unix_s,
        usage=Usage(100, 20, 40),
        list_micros=500,
    )


def sequence_use(
    name: str, *, ended_unix_s: float = UNIX_S, worker_id: str = "w1", tenant: str = "acme"
) -> SequenceDeviceUse:
    return SequenceDeviceUse(
        request_id=name,
        choice=0,
        tenant=tenant,
        model="chat",
        version_digest="sha256:1",
        worker_id=worker_id,
        device_type="cpu",
        cost_per_hour=3.6,
        ended_unix_s=ended_unix_s,
        usage=Usage(100, 20, 40),
        device_s=2.0,
    )


class Sender:
    """A source as the outbox is one: in order, the same again until it is acknowledged, then trimmed."""

    def __init__(self, name: str, events: list[UsageEvent], *, batch: int = 3) -> None:
        self.name = name
        self.acknowledged = 0
        self._lost_until = 0
        self._events = events
        self._batch = batch

    @property
    def done(self) -> bool:
        return self.acknowledged >= len(self._events)

    def report(self, first: int) -> UsageReport:
        """Return the batch that begins with an event."""
        events = tuple(self._events[first - 1 : first - 1 + self._batch])
        return UsageReport(self.name, first, events, self._lost_until)

    async def send(self, ledger: UsageLedger) -> None:
        """Send the next batch. Raises what the ledger does."""
        report = self.report(self.acknowledged + 1)
        last = await ledger.report(report)
        self._lost_until = self.acknowledged if last < self.acknowledged else 0
        self.acknowledged = max(self.acknowledged, min(last, len(self._events)))


async def booked(ledger: UsageLedger, hour: int = HOUR) -> dict[str, tuple[int, int, int]]:
    """Return requests, output tokens and device microseconds by key."""
    query = UsageQuery(hour - 48, hour + 48, group_by=(Dimension.KEY,))
    return {
        row.line.key_id: (row.amounts.requests, row.amounts.output_tokens, row.amounts.device_us)
        for row in await ledger.rows(query)
    }


def moved(use: SequenceDeviceUse, hours: int) -> SequenceDeviceUse:
    return replace(use, ended_unix_s=use.ended_unix_s + 3600 * hours)
