"""Port of slots: a gateway asks the leading scheduler for slots of fixed-cost versions and gets leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.core.fixed_cost.slots import SlotDemand, SlotLease, SlotReturn
from services.core.fleet import PoolMember


class SlotClient(Protocol):
    def demand(self, wanted: SlotDemand) -> None:
        """Replace the demand of its version and tenant. Sent at once, and again to every new leader until it
        is replaced by one without rows."""

    def slots_returned(self, found: SlotReturn) -> None:
        """Report that no more rows are in flight under a lease than it has slots."""


class SlotListener(Protocol):
    """Called in the event loop. The methods must not block or raise."""

    def on_leader(self) -> None:
        """A leader responded."""

    def on_leases(self, leases: Sequence[SlotLease]) -> None:
        """Each replaces the lease of its worker, version and tenant."""

    def on_members(self, members: Sequence[PoolMember]) -> None:
        """The serving workers, for placement while no leader answers; replaces the list before."""
