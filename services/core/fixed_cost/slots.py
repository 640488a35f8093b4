"""Slots: how many rows of a fixed-cost version a gateway may have in flight for a tenant on a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.core.records import Priority

DEMAND_TTL_S: Final = 3.0  # a demand that is not sent again ends: its gateway may be lost without notice
REPEAT_S: Final = DEMAND_TTL_S / 3


@dataclass(frozen=True, slots=True)
class SlotDemand:
    """Rows that one tenant has at one gateway, waiting or sent. ``priority`` is the most urgent row's."""

    digest: str
    tenant: str
    rows: int
    tenant_weight: float = 1.0
    priority: Priority = Priority.STANDARD
    repeats: bool = False  # it is sent again while it lasts, and ends otherwise
    node_group: str = ""  # the only nodes that may run them; empty: the shared ones


@dataclass(frozen=True, slots=True)
class SlotLease:
    """The right to have rows of a tenant in flight on a worker. It replaces the gateway's lease of the same
    worker, version and tenant."""

    worker_id: str
    # Address of its gRPC server.
    address: str
    # Life of the worker that it is for.
    incarnation: int
    # Leader that gave it; 0: the gateway itself, while no leader answered.
    epoch: int
    # Version of the rows.
    digest: str
    tenant: str
    # Rows that may be in flight; 0: taken back.
    slots: int
    # Lifetime from receipt.
    ttl_s: float
    # Another for every change of its slots; a renewal has the same.
    number: int = 0


@dataclass(frozen=True, slots=True)
class SlotRefusal:
    """No node of the tenant's group reports the version."""

    digest: str
    tenant: str


@dataclass(frozen=True, slots=True)
class SlotReturn:
    """The gateway has no more rows in flight under the lease of this number than it has slots."""

    worker_id: str
    digest: str
    tenant: str
    number: int
