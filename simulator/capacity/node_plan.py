"""Nodes of one type for all windows of a load, and the window that costs most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.core.estimates.capacity import Bound, with_zones
from services.core.estimates.node_need import NodeType, Unfit, need_of, total_of
from simulator.capacity.load import LoadWindow


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Nodes of one type. ``bound`` is that of the class that keeps most of them busy."""

    node_type: str
    bound: Bound
    nodes: int
    prefill_nodes: float  # nodes' worth of time that prefills
    decode_nodes: float  # nodes' worth of time that decodes
    headroom_nodes: float
    sequences: float  # sequences of one node at its rate
    kv_sequences: float  # sequences that the KV of one node holds
    peak_s: float  # start of the window that decides
    price_per_h: float | None
    price_per_1m_tokens: float | None  # tokens of prompts and outputs, at the peak

    @property
    def exact(self) -> float:
        """Nodes in one zone before they are rounded up."""
        return self.prefill_nodes + self.decode_nodes + self.headroom_nodes


def plan_type(kind: NodeType, windows: Sequence[LoadWindow], zones: int) -> CapacityPlan | Unfit:
    """Return the nodes of one type that carry every window, or why the type cannot."""
    most: CapacityPlan | None = None
    for window in windows:
        needs = []
        for load in window.loads:
            need = need_of(kind.costs, load)
            if isinstance(need, Unfit):
                return Unfit(need.field, f"{load.name}: {need.text}")
            needs.append((load, need))
        busy, spare = total_of(needs)
        if most is not None and busy + spare <= most.exact:
            continue
        nodes = with_zones(busy + spare, zones)
        prefill = sum(need.nodes * need.capacity.prefill_ratio for _, need in needs)
        one = max((need for _, need in needs), key=lambda need: need.nodes).capacity
        price = kind.price_per_h * nodes or None
        per_token = sum(load.tokens_per_s for load in window.loads) * 3600
        most = CapacityPlan(
            kind.name,
            one.bound,
            nodes,
            prefill,
            busy - prefill,
            spare,
            one.sequences,
            one.kv_sequences,
            window.from_s,
            price,
            price / per_token * 1e6 if price is not None else None,
        )
    assert most is not None
    return most


def dearest(windows: Sequence[LoadWindow], types: Sequence[NodeType]) -> LoadWindow:
    """Return the window whose loads cost most, each on its cheapest type. A load without one costs most."""

    def price(window: LoadWindow) -> float:
        total = 0.0
        for load in window.loads:
            needs = ((kind, need_of(kind.costs, load)) for kind in types)
            prices = [kind.price_per_h * need.nodes for kind, need in needs if not isinstance(need, Unfit)]
            total += min(prices, default=math.inf)
        return total

    return max(windows, key=price)
