"""Who asks for slots of a version: tenants, their gateways, and what a row of each takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from services.core.fixed_cost.slots import SlotDemand
from services.core.fleet import TenantTokens
from services.core.records import Priority
from services.scheduler.policy.queue.fairness import Account
from services.scheduler.policy.slots import SlotClaim

TURN_S: Final = 0.25  # how long a slot stays where others wait for one
OVERDUE_S: Final = 30.0  # a tenant without a slot for so long goes before any class
_COST_HALF_LIFE_S: Final = 5.0


@dataclass(slots=True, eq=False)
class PartyDemand:
    """What one gateway asks for one tenant."""

    demand: SlotDemand
    zone: str
    since_s: float  # time at which it last began to have slots, or to have none
    received_s: float  # time of its last message
    has_slots: bool = False
    was_overdue: bool = False  # whether it was overdue when it got the slots that it has

    def is_overdue(self, now_s: float) -> bool:
        age_s = now_s - self.since_s
        return age_s < TURN_S and self.was_overdue if self.has_slots else age_s >= OVERDUE_S

    def record(self, *, has_slots: bool, now_s: float) -> None:
        """Record whether it has slots; another turn begins when that changes, and after two turns."""
        if has_slots != self.has_slots or (has_slots and now_s - self.since_s >= 2 * TURN_S):
            self.was_overdue = not self.has_slots and self.is_overdue(now_s)
            self.has_slots, self.since_s = has_slots, now_s

    def order(self, now_s: float) -> tuple[float, float]:
        """Return its place where slots are fewer than claimants: turns end, then the longest wait."""
        if not self.has_slots:
            return 1.0, self.since_s
        return (0.0 if now_s - self.since_s < TURN_S else 2.0), self.since_s


@dataclass(slots=True, eq=False)
class TenantRows:
    """One tenant of the pool. ``rows`` and ``device_s`` are recent sums, which measure a row's time."""

    demands: dict[str, PartyDemand] = field(default_factory=dict)  # demands by gateway
    account: Account | None = None  # its account; None: it has no demand
    priority: Priority = Priority.STANDARD
    rows: float = 0.0
    device_s: float = 0.0
    measured_s: float = -math.inf

    def measure(self, use: TenantTokens, now_s: float) -> None:
        kept = 0.5 ** (min(1e3, now_s - self.measured_s) / _COST_HALF_LIFE_S)
        self.rows = self.rows * kept + use.rows
        self.device_s = self.device_s * kept + use.device_us / 1e6
        self.measured_s = now_s


def claim_of(name: str, tenant: TenantRows, row_s: float, now_s: float) -> SlotClaim:
    found = tenant.demands.values()
    assert tenant.account is not None, "a tenant with demand has no counter"
    return SlotClaim(
        name,
        sum(wanted.demand.rows for wanted in found),
        rank=tenant.priority.rank,
        weight=tenant.account.weight or 1.0,
        row_s=max(1e-9, tenant.device_s / tenant.rows if tenant.rows > 0.0 else row_s),
        order=(tenant.account.value, *min(wanted.order(now_s) for wanted in found)),
        overdue=any(wanted.is_overdue(now_s) for wanted in found),
    )
