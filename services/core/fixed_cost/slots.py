"""Slots: how many rows of a fixed-cost version a gateway may have in flight for a tenant on a worker."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.records import Priority


@dataclass(frozen=True, slots=True)
class SlotDemand:
    """Rows that one tenant has at one gateway, waiting or sent. ``priority``: of the most urgent one."""

    digest: str
    tenant: str
    rows: int
    tenant_weight: float = 1.0
    priority: Priority = Priority.STANDARD


@dataclass(frozen=True, slots=True)
class SlotLease:
    """The right to have ``slots`` rows of a tenant in flight on a worker for ``ttl_s`` from receipt.

    It replaces the gateway's lease of that worker, version and tenant. Another ``number``: its slots changed.
    """

    worker_id: str
    address: str
    incarnation: int
    epoch: int
    digest: str
    tenant: str
    slots: int
    ttl_s: float
    number: int = 0


@dataclass(frozen=True, slots=True)
class SlotReturn:
    """The gateway has no more rows in flight under the lease of this number than it has slots."""

    worker_id: str
    digest: str
    tenant: str
    number: int
