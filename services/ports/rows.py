"""Port through which a gateway's interfaces run rows of fixed-cost models, wherever the workers are."""

from __future__ import annotations

from typing import Protocol

from services.core.fixed_cost.rows import RowEnd, RowsRequest


class RowRunner(Protocol):
    async def run(self, request: RowsRequest) -> tuple[RowEnd, ...]:
        """Run every row once and return their ends in order, whichever of them failed.

        A row whose worker was lost is run once more elsewhere; lost twice, it ends with StreamBroken. No
        returned end is ``lost``. Cancelling the call withdraws the rows that no
        batch contains. Raises NoWorkerAvailable when no worker serves the version, QueueFull or
        ShareExceeded when this gateway has too many rows waiting, QueueTimeout, DeadlineUnmeetable, and
        StaleRoute.
        """
