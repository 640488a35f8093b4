"""Gateways of fixed-cost versions with a bug each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from services.core.errors import FairwayError
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.fixed_cost.slots import SlotLease
from services.gateway.rows.leases import GatewayLeases
from simulator.fleet.clients.row_client import RowsEnded, SimRows
from simulator.fleet.nodes.gateway_node import GatewayNode


class SwapsAnswers(GatewayNode):
    """Returns the answers of a request in another order."""

    def run_rows(
        self, asked: SimRows, rows: tuple[tuple[RawTensor, ...], ...], ended: RowsEnded
    ) -> asyncio.Task[None]:
        def swapped(found: Sequence[RowEnd] | FairwayError) -> None:
            ended(found if isinstance(found, FairwayError) else found[::-1])

        return super().run_rows(asked, rows, swapped)


class KeepsLeases(GatewayNode):
    """Returns slots that were taken back and goes on to fill them."""

    def make_leases(self) -> GatewayLeases:
        return _Kept(self.process.clock)


class _Kept(GatewayLeases):
    def on_leases(self, leases: Sequence[SlotLease]) -> None:
        most = {self._key(slots.lease): slots.lease for slots in self.slots()}
        super().on_leases(leases)
        for slots in self.slots():
            kept = most.get(self._key(slots.lease))
            if kept is not None and kept.slots > slots.lease.slots:
                slots.lease = replace(slots.lease, slots=kept.slots)

    @staticmethod
    def _key(lease: SlotLease) -> tuple[str, str]:
        return lease.worker_id, lease.tenant
