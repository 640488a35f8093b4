"""How many nodes of one type a load needs: work and headroom, or why the type cannot serve it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.core.estimates.capacity import (
    ReplicaCapacity,
    RequestMix,
    capacity_of,
    spare_replicas,
)
from services.core.estimates.cost_model import CostModel
from services.core.records import Priority

ABSORB_S: Final = 60.0  # time within which arrivals of a class without a target are served

_ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node that can be ordered. ``price_per_h`` 0: unknown."""

    name: str
    costs: CostModel
    price_per_h: float = 0.0
    available: int = 4096


@dataclass(frozen=True, slots=True)
class LoadClass:
    """Requests of one class, or of one class and range of lengths, at their peak."""

    name: str
    rate_per_s: float
    mix: RequestMix
    prompt_tokens: float  # mean, cached tokens included
    prefill_p99_tokens: int  # uncached prompt tokens of all but one in 100 requests
    total_p99_tokens: int  # tokens of prompt and output of all but one in 100 requests
    priority: Priority = Priority.STANDARD
    ttft_s: float = math.inf
    itl_s: float = math.inf
    burst_ratio: float = 1.0  # variance of arrivals over that of independent ones

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and outputs."""
        return self.rate_per_s * (self.prompt_tokens + self.mix.output_tokens)


@dataclass(frozen=True, slots=True)
class Unfit:
    """Why a type cannot serve a class: the field that excludes it, and a sentence with the mend."""

    field: str
    text: str


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """Nodes that the load of a class keeps busy, and what one node does."""

    nodes: float
    capacity: ReplicaCapacity
    absorb_s: float  # time that a request may wait before its prefill


def need_of(costs: CostModel, load: LoadClass) -> NodeNeed | Unfit:
    """Return the nodes that a class keeps busy, or why the type cannot serve it."""
    kv_tokens = costs.kv_memory_bytes // costs.kv_bytes_per_token
    if load.total_p99_tokens > kv_tokens:
        text = f"requests of {load.total_p99_tokens} tokens do not fit into its KV of {kv_tokens} tokens: "
        return Unfit("kv", text + "use nodes with more memory or limit the context")
    prefill_s = costs.prefill_s(load.prefill_p99_tokens)
    absorb_s = min(load.ttft_s - prefill_s, ABSORB_S)
    if absorb_s <= 0.0:
        text = f"{load.prefill_p99_tokens} prompt tokens take {prefill_s:.3g} s alone, the target is "
        return Unfit("ttft", f"{text}{load.ttft_s:g} s: raise it above that, or use faster nodes")
    capacity = _spread_capacity(costs, load)
    if capacity is None:
        if _spread_capacity(costs, replace(load, itl_s=math.inf)) is None:
            text = f"a mean request holds {load.mix.held_tokens:.0f} tokens and its prefix"
            return Unfit("kv", f"{text}, its KV {kv_tokens}: use nodes with more memory")
        step_s = costs.step_s(0, 1, round(load.mix.attended_tokens))
        text = f"a step with one sequence takes {step_s:.3g} s, the target is {load.itl_s:g} s"
        return Unfit("itl", f"{text}: raise it above that, or use faster nodes")
    return NodeNeed(load.rate_per_s / capacity.requests_per_s, capacity, absorb_s)


def _spread_capacity(costs: CostModel, load: LoadClass) -> ReplicaCapacity | None:
    """Return what a node serves if shared prefixes are spread over the nodes, with one more on each.

    Requests are placed where their prefix is. Nodes and capacity depend on each other: a few rounds settle.
    """
    mix, nodes, capacity = load.mix, 1.0, None
    for _ in range(_ROUNDS if mix.shared_tokens else 1):
        shared = min(mix.shared_tokens, load.prompt_tokens - mix.prefill_tokens + mix.shared_tokens / nodes)
        capacity = capacity_of(costs, replace(mix, shared_tokens=shared), itl_target_s=load.itl_s)
        nodes = 4.0 * nodes if capacity is None else max(1.0, load.rate_per_s / capacity.requests_per_s)
    return capacity


def spare_for(load: LoadClass, need: NodeNeed, nodes: float) -> float:
    """Return the headroom of a class on nodes whose load of its rank and above is ``nodes``."""
    one = need.capacity
    work_s = load.mix.work_ratio / one.requests_per_s
    return spare_replicas(
        nodes, work_s, need.absorb_s, burst_ratio=load.burst_ratio, sequences=max(1.0, one.sequences)
    )


def total_of(loads: Sequence[tuple[LoadClass, NodeNeed]]) -> tuple[float, float]:
    """Return the nodes that classes keep busy together, and the headroom that the most demanding one adds.

    A class waits for those of its rank and above only, so lower classes do not add to its headroom.
    """
    busy = sum(need.nodes for _, need in loads)
    most = busy
    for load, need in loads:
        above = sum(other.nodes for each, other in loads if each.priority.rank >= load.priority.rank)
        most = max(most, above + spare_for(load, need, above))
    return busy, most - busy
