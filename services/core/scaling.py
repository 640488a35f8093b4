"""Bounds of a deployment's replicas that follow its load, and the decision about them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

START_S: Final = 60.0  # time from an order until READY, before any was observed
_MOST_HOLD_S: Final = 3600.0
IDLE_S: Final = 600.0  # time without a request before the last replica is removed, unless stated


@dataclass(frozen=True, slots=True)
class Scaling:
    """What an operator allows; within it the replicas follow the load."""

    min_replicas: int = 1
    max_replicas: int = 1
    idle_s: float = 0.0  # time without a request before the last replica is removed; 0: ``IDLE_S``
    # The most that the nodes of all replicas may cost together, in the currency of the nodes; 0: no bound.
    max_cost_per_hour: float = 0.0
    override_replicas: int | None = None
    override_until_unix_s: float = 0.0  # end of the override; 0: until an operator ends it
    frozen: bool = False  # the replicas stay as they are

    def pinned(self, unix_s: float) -> int | None:
        """Return the replicas of an override that holds now."""
        ends_s = self.override_until_unix_s
        return None if ends_s and ends_s <= unix_s else self.override_replicas


@dataclass(frozen=True, slots=True)
class ScalingReason:
    """A signal or bound, the replicas that it needs, and a sentence with its figures."""

    signal: str
    replicas: int
    text: str


@dataclass(frozen=True, slots=True)
class Scaled:
    """The replicas that the leader decided for a deployment, under ``SCALED`` and its name."""

    deployment: str
    replicas: int
    reasons: tuple[ScalingReason, ...] = ()  # the decisive one first
    decided_unix_s: float = 0.0
    epoch: int = 0  # epoch of the leader that decided
    start_s: float = START_S  # expected time from an assignment until READY
    rate: float = 0.0  # work per second of one replica, as last measured; 0: unknown
    failed_wakes: int = 0  # starts from zero in a row of which none became READY
    retry_unix_s: float = 0.0  # time of the next start from zero
    failure: str = ""  # why the last one failed

    @property
    def hold_s(self) -> float:
        """How long a request waits for the first replica."""
        return min(_MOST_HOLD_S, 30.0 + 2.0 * self.start_s)

    @property
    def start_limit_s(self) -> float:
        """How long a start from zero may take; shorter, so that the request that began it gets the reason."""
        return self.hold_s - 5.0


class OrderState(StrEnum):
    ORDERED = "ordered"  # its node has not registered
    RUNNING = "running"  # its node registered
    LEAVING = "leaving"  # its node drains, and is released once nothing is assigned to it
    RELEASED = "released"
    FAILED = "failed"  # no node registered in time


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """One order of a node, under ``NODE_ORDERS`` and its id; it is written before the provider is called."""

    order_id: str
    ordered_unix_s: float
    node_type: str = ""
    zone: str = ""
    state: OrderState = OrderState.ORDERED
    node: str = ""  # its worker; empty until the provider names it
    ended_unix_s: float = 0.0
    reason: str = ""  # deployment that it was made for, or why it failed
    ends_unix_s: float = 0.0  # the end of its node that the provider announced; 0: none

    @property
    def ended(self) -> bool:
        return self.state in (OrderState.RELEASED, OrderState.FAILED)
