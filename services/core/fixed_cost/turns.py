"""The order of rows of several tenants: start-time fair queueing of device time. Pure.

A row's *tag* is the virtual time at which it begins: that of the device, or that to which its tenant was
served, whichever is later, after the tenant's rows that are due before it. The row with the least tag is
next, and the virtual time follows it (Goyal, Vin and Cheng, 1996). So the backlog of one tenant does not
stand before a single row of another. A deadline that a client chose moves no row ahead of other tenants. What
a tenant used while it was alone is not held against it. Virtual time is device seconds over the tenant's
weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

SHARED_S: Final = 10.0  # how long a tenant counts as sharing after its last row
_MOST_TENANTS: Final = 1024  # most tenants before those that were not ahead are forgotten


class TenantTurns:
    """Single writer: a batcher, or a gateway: its batches cost the same, and so do its rows while no leader
    answers.
    """

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}  # last row of each tenant, the oldest first
        self._virtual_s = 0.0
        self._served_s: dict[str, float] = {}  # virtual, by tenant; others are at the device's

    def seen(self, tenant: str, now_s: float) -> None:
        """Record that the tenant has rows here."""
        self._seen_s.pop(tenant, None)
        self._seen_s[tenant] = now_s

    def are_shared(self, now_s: float) -> bool:
        """Whether several tenants have, or recently had, rows here."""
        while self._seen_s and self._seen_s[oldest := next(iter(self._seen_s))] < now_s - SHARED_S:
            del self._seen_s[oldest]
        return len(self._seen_s) > 1

    def begin_s(self, tenant: str) -> float:
        """Return the tag of the tenant's next row."""
        return max(self._virtual_s, self._served_s.get(tenant, 0.0))

    def tags(self, rows: Iterable[tuple[int, str, float]]) -> dict[int, float]:
        """Return the tags by row number. ``rows`` are in order of due time: number, tenant, and seconds over
        weight."""
        found: dict[int, float] = {}
        begin_s: dict[str, float] = {}
        for number, tenant, share_s in rows:
            tag = begin_s.get(tenant)
            if tag is None:
                tag = self.begin_s(tenant)
            found[number] = tag
            begin_s[tenant] = tag + share_s
        return found

    def started(self, shares_s: Mapping[str, float]) -> None:
        """Charge a batch that starts: of each tenant the seconds of its rows over their weight."""
        begin_s = {tenant: self.begin_s(tenant) for tenant in shares_s}
        self._virtual_s = min(begin_s.values())
        for tenant, share_s in shares_s.items():
            self._served_s[tenant] = begin_s[tenant] + share_s
        if len(self._served_s) > _MOST_TENANTS:
            self._served_s = {name: at_s for name, at_s in self._served_s.items() if at_s > self._virtual_s}
