"""Port of slots: a gateway asks the leading scheduler for slots of fixed-cost versions and gets leases."""

from __future__ import annotations

from typing import Protocol

from services.core.fixed_cost.slots import SlotDemand, SlotReturn


class SlotClient(Protocol):
    def demand(self, wanted: SlotDemand) -> None:
        """Replace the demand of its version and tenant. Sent at once, and again to every new leader until it
        is replaced by one without rows."""

    def slots_returned(self, found: SlotReturn) -> None:
        """Report that no more rows are in flight under a lease than it has slots."""
