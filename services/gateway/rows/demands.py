"""What a gateway asks of slots: the rows that it has, of each version and tenant.

A demand that rises is sent at once, again within 2 ms while it goes on rising: rows wait for its slots. Other
changes are sent at most every 20 ms. A demand falls a second after its rows, so that the next request of a
tenant finds its slots still leased. While it lasts it is sent every second, changed or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from services.core.fixed_cost.rows import RowsRequest
from services.core.fixed_cost.slots import REPEAT_S, SlotDemand
from services.core.records import Priority
from services.ports.clock import Clock
from services.ports.slots import SlotClient

RISE_S: Final = 0.002  # between two messages about a demand that rises
_GAP_S: Final = 0.02  # between two other messages about one demand
_FALL_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Demand:
    weight: float = 1.0
    priorities: Counter[Priority] = field(default_factory=Counter)  # of its rows
    rows: int = 0
    peak: int = 0
    peak_s: float = 0.0  # when it last had so many rows
    sent: SlotDemand | None = None
    sent_s: float = 0.0

    def wanted(self, digest: str, tenant: str) -> SlotDemand:
        waiting = [priority for priority in Priority if self.priorities[priority]]
        last = Priority.STANDARD if self.sent is None else self.sent.priority
        priority = max(waiting, key=lambda found: found.rank, default=last)
        rows = max(self.rows, self.peak)
        return SlotDemand(digest, tenant, rows, self.weight, priority, repeats=True)


class SlotDemands:
    """The demands of one gateway; bounded by its rows."""

    def __init__(self, slots: SlotClient, clock: Clock) -> None:
        self._slots = slots
        self._clock = clock
        self._demands: dict[tuple[str, str], _Demand] = {}
        self.rises = False  # a demand rose, and waits for ``send_due`` within ``RISE_S``

    def __len__(self) -> int:
        return len(self._demands)

    def enter(self, request: RowsRequest) -> None:
        """Count the rows of a request, and send the demand if it rose."""
        key, rows = (request.version_digest, request.tenant_id), len(request.rows)
        demand = self._demands.get(key)
        if demand is None:
            demand = self._demands[key] = _Demand()
        demand.weight = request.tenant_weight
        demand.priorities[request.priority] += rows
        demand.rows += rows
        now_s = self._clock.monotonic_s()
        if demand.rows >= demand.peak:
            demand.peak, demand.peak_s = demand.rows, now_s
        if demand.sent is None or demand.rows > demand.sent.rows:
            self._send(key, demand, now_s)

    def leave(self, request: RowsRequest) -> None:
        """Count a row of the request that ended."""
        demand = self._demands[request.version_digest, request.tenant_id]
        if demand.rows == demand.peak:
            demand.peak_s = self._clock.monotonic_s()
        demand.priorities[request.priority] -= 1
        demand.rows -= 1

    def send_due(self) -> None:
        """Send what changed; forget demands that are over."""
        now_s = self._clock.monotonic_s()
        self.rises = False
        for key, demand in list(self._demands.items()):
            if now_s - demand.peak_s >= _FALL_S:
                demand.peak, demand.peak_s = demand.rows, now_s
            self._send(key, demand, now_s)
            if not demand.rows and demand.sent is not None and not demand.sent.rows:
                del self._demands[key]

    def _send(self, key: tuple[str, str], demand: _Demand, now_s: float) -> None:
        wanted, sent, age_s = demand.wanted(*key), demand.sent, now_s - demand.sent_s
        rises = sent is None or wanted.rows > sent.rows
        if sent is None or age_s >= (RISE_S if rises else _GAP_S if wanted != sent else REPEAT_S):
            demand.sent, demand.sent_s = wanted, now_s
            self._slots.demand(wanted)
        elif rises:
            self.rises = True
