"""Nodes that can be ordered and given back: of a cloud, a cluster or a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ProvidedNode:
    """A node that the provider runs or starts for an order. A replaced one has another name."""

    order_id: str
    node: str  # the id that its worker registers; while that is open, a name of the provider's
    problem: str = ""  # the provider's reason why it does not start
    ending_in_s: float | None = None  # time until the provider takes it away, once it has announced that


class NodeProvider(Protocol):
    """Each call ends within a bounded time. Raises Unavailable with the provider's reason."""

    async def list(self) -> tuple[ProvidedNode, ...]:
        """Return the nodes of all orders that were not released, those that start included."""

    async def order(self, order_id: str, node_type: str, zone: str) -> None:
        """Start a node; a repeated order id starts no other. Empty: any type, any zone."""

    async def release(self, node: str) -> bool:
        """Stop a node whose work has ended and return True; False for one that is to be released later.

        One that is gone already is released.
        """
