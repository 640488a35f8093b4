"""Ports of rows: a gateway runs them, wherever the workers are, on slots of the leading scheduler."""

from __future__ import annotations

from typing import Protocol

from services.core.fixed_cost.rows import RowEnd, RowsRequest
from services.core.fixed_cost.slots import SlotDemand, SlotReturn


class SlotClient(Protocol):
    def demand(self, wanted: SlotDemand) -> None:
        """Replace the demand of its version and tenant. Sent at once, and again to every new leader until it
        is replaced by one without rows."""

    def slots_returned(self, found: SlotReturn) -> None:
        """Report that no more rows are in flight under a lease than it has slots."""


class RowRunner(Protocol):
    async def run(self, request: RowsRequest) -> tuple[RowEnd, ...]:
        """Run every row once and return their ends in order, whichever of them failed.

        A row whose worker was lost is run once more elsewhere; lost twice, it ends with StreamBroken. No
        returned end is ``lost``. Cancelling the call withdraws the rows that no
        batch contains. Raises NoWorkerAvailable when no worker serves the version, QueueFull or
        ShareExceeded when this gateway has too many rows waiting, QueueTimeout, DeadlineUnmeetable, and
        StaleRoute.
        """
