"""Which nodes are ordered and released. Pure: times are arguments.

A node is ordered for replicas that no present node can take, one order for each that is missing, less the
orders whose nodes have not arrived and the ordered nodes that are empty: what an empty node did not help,
another one does not help either. Without such a replica, as many nodes are ordered as the warm pool lacks
(``warm_nodes``), and it keeps as many. An order without a node after its time has failed, and the next is
made after a time that doubles with each failure in a row. A node that has had no assignment for a while
leaves: it is drained, and released once it is empty. It stays if it is needed again before that. One whose
end the provider announces leaves at once and does not stay; another is ordered if its replicas find no place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.core.backoff import Backoff
from services.core.scaling import NodeOrder, OrderState
from services.ports.nodes import ProvidedNode

MAX_KEPT: Final = 64  # ended orders that are kept
_RETRY: Final = Backoff(30.0, 1800.0)
_Z: Final = 2.33  # standard deviations of growth that warm nodes cover


@dataclass(frozen=True, slots=True)
class NodeLimits:
    most: int = 16  # nodes of the provider at once
    order_s: float = 600.0  # time from an order until its worker registers
    idle_s: float = 600.0  # time without an assignment until a node leaves
    # Time of a new leader in which workers register again that lost their leases, and it changes no node.
    settle_s: float = 10.0
    # Nodes that are kept without a replica, relative to those with one.
    warm_least_ratio: float = 0.1
    warm_most_ratio: float = 0.2


@dataclass(frozen=True, slots=True)
class MissingReplicas:
    """Replicas that no present node can take."""

    deployment: str
    missing: int
    node_type: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class NodeSituation:
    orders: Sequence[NodeOrder]
    provided: Sequence[ProvidedNode]  # the provider's list
    live: Collection[str]  # registered workers
    idle_since_s: Mapping[str, float]  # live workers without an assignment
    needs: Sequence[MissingReplicas]
    warm: int  # nodes that are to have no replica, by ``warm_nodes``
    unix_s: float
    now_s: float


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Orders to store as they are now; ``forgotten`` are deleted. Calls to the provider follow from these."""

    stored: tuple[NodeOrder, ...] = ()
    forgotten: tuple[str, ...] = ()
    placed: tuple[NodeOrder, ...] = ()  # orders that the provider does not list, to be placed
    released: tuple[NodeOrder, ...] = ()  # orders whose nodes are empty, to be given back


def warm_nodes(busy: int, growth_variance: float, limits: NodeLimits) -> int:
    """Return how many nodes are kept without a replica, so that a start needs no new node and no download.

    ``_Z`` standard deviations of the growth within a start time, between the two ratios of the ``busy``
    nodes: the lower is rounded down, so that a small fleet pays for none that its load does not ask for.
    """
    wanted = math.ceil(_Z * math.sqrt(growth_variance) - 1e-9)
    least, most = math.floor(busy * limits.warm_least_ratio), math.ceil(busy * limits.warm_most_ratio)
    return min(max(wanted, least), most)


def plan_nodes(now: NodeSituation, limits: NodeLimits, new_id: str) -> NodePlan:
    """Return what changes. ``new_id`` is the id of the order that may be made: one in a round."""
    listed = {one.order_id: one for one in now.provided}
    after = {one.order_id: _followed(one, listed, now, limits) for one in now.orders}
    needed = max((one.missing for one in now.needs), default=0)
    open_ = [one for one in after.values() if one.state is OrderState.ORDERED]
    running = [one for one in after.values() if one.state is OrderState.RUNNING]
    empty = [one for one in running if one.node in now.idle_since_s]
    leaving = {one.node for one in after.values() if one.state is OrderState.LEAVING}
    idle = len(now.idle_since_s.keys() - leaving)
    left = needed - len(open_) - len(empty) if needed else now.warm - len(open_) - idle
    for one in sorted(after.values(), key=lambda one: one.order_id):
        if left > 0 and one.state is OrderState.LEAVING and one.node in now.live and not one.ends_unix_s:
            after[one.order_id] = replace(one, state=OrderState.RUNNING)
            left -= 1
    present = sum(not one.ended and not one.ends_unix_s for one in after.values())
    if left > 0 and present < limits.most and now.unix_s >= _next_unix_s(after.values()):
        need = max(now.needs, key=lambda one: one.missing, default=MissingReplicas("warm pool", 0))
        after[new_id] = NodeOrder(new_id, now.unix_s, need.node_type, need.zone, reason=need.deployment)
    elif not needed:
        for one in sorted(empty, key=lambda one: now.idle_since_s[one.node])[: max(0, idle - now.warm)]:
            if now.now_s - now.idle_since_s[one.node] >= limits.idle_s:
                after[one.order_id] = replace(one, state=OrderState.LEAVING)
    before = {one.order_id: one for one in now.orders}
    ended = sorted((one for one in after.values() if one.ended), key=lambda one: -one.ended_unix_s)
    forgotten = tuple(one.order_id for one in ended[MAX_KEPT:])
    unlisted = [one for one in after.values() if one.order_id not in listed]
    return NodePlan(
        tuple(one for key, one in after.items() if before.get(key) != one and key not in forgotten),
        forgotten,
        tuple(one for one in unlisted if one.state is OrderState.ORDERED),
        tuple(one for one in after.values() if _is_over(one, listed, now)),
    )


def _is_over(order: NodeOrder, listed: Mapping[str, ProvidedNode], now: NodeSituation) -> bool:
    """Whether the provider is to take the order's node back."""
    if order.state is OrderState.FAILED:
        return order.order_id in listed
    return order.state is OrderState.LEAVING and (
        order.node in now.idle_since_s or order.node not in now.live
    )


def _followed(
    order: NodeOrder, listed: Mapping[str, ProvidedNode], now: NodeSituation, limits: NodeLimits
) -> NodeOrder:
    """Return the order as it is now, from what the provider lists and which workers live."""
    provided = listed.get(order.order_id)
    node = order.node if provided is None else provided.node
    if order.state is OrderState.LEAVING:
        return replace(order, node=node)
    if order.state is OrderState.RUNNING and node != order.node and order.node not in now.live:
        return replace(order, node=node, state=OrderState.ORDERED, ordered_unix_s=now.unix_s)  # replaced
    if order.state is OrderState.ORDERED:
        if node in now.live and provided is not None:
            return replace(order, node=node, state=OrderState.RUNNING)
        if now.unix_s - order.ordered_unix_s >= limits.order_s:
            where = f"its node {node} did not register" if node else "the provider lists no node for it"
            if provided is not None and provided.problem:
                where += f" ({provided.problem})"
            reason = f"no node within {limits.order_s:g} s: {where}"
            return replace(order, node=node, state=OrderState.FAILED, ended_unix_s=now.unix_s, reason=reason)
        return replace(order, node=node)
    if order.state is OrderState.RUNNING and order.order_id not in listed and order.node not in now.live:
        reason = "the provider took its node away"
        return replace(order, state=OrderState.FAILED, ended_unix_s=now.unix_s, reason=reason)
    if order.ended or order.ends_unix_s or provided is None or provided.ending_in_s is None:
        return order
    return replace(order, state=OrderState.LEAVING, ends_unix_s=now.unix_s + provided.ending_in_s)


def _next_unix_s(orders: Iterable[NodeOrder]) -> float:
    """Return when the next order may be made: after failures in a row, later each time."""
    failures, last_s = 0, 0.0
    for one in sorted(orders, key=lambda one: -one.ordered_unix_s):
        if one.state is not OrderState.FAILED:
            break
        failures, last_s = failures + 1, max(last_s, one.ended_unix_s)
    if not failures:
        return 0.0
    return last_s + _RETRY.longest_s(failures - 1)
