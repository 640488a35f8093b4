"""Load of a pool as the leading scheduler reports it, and as the scaler reads it.

Work is counted in units of the pool: tokens of prompts and outputs, or rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.core.estimates.capacity import Bound, ReplicaCapacity
from services.core.records import Priority


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Requests of one class at one pool. ``target_s``: time to first token that they are served for."""

    priority: Priority
    target_s: float = math.inf
    waiting: float = 0.0  # work in the queue
    arrived: float = 0.0  # work that arrived, also refused, since the reporter began; never decreases
    due: tuple[tuple[float, float], ...] | None = None  # (seconds left, work) by deadline; None: it has none
    burn_ratio: float = 0.0  # speed at which its objective's budget is spent; 1 spends it exactly
    deployment: str = ""  # the deployment that the requests name; empty: rows, or those of all


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Requests for the nodes of one group. ``deployment``: the one that they name; empty: of any."""

    node_group: str
    deployment: str = ""
    held: int = 0  # requests that wait while no replica of the group serves
    running: int = 0  # requests on its replicas, those in a worker's queue included


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Observation of a pool. ``rate`` None: no replica has been measured."""

    classes: tuple[ClassLoad, ...]
    rate: float | None = None  # work per second of one ready replica
    request_work: float = 1.0  # work of the mean request
    held: int = 0  # requests that wait while no replica serves them
    running: int = 0  # requests on replicas
    groups: tuple[GroupLoad, ...] = ()  # both of a whole pool, by group of nodes and deployment
    reporter: int = 0  # epoch of the leader that counted; another one begins its counts anew
    capacity: ReplicaCapacity | None = None  # calibrated for the present mix; the lower of both rates counts
    rate_bound: Bound | None = None  # what keeps ``rate`` from being higher; None: it was measured

    @property
    def replica_rate(self) -> float | None:
        """Work per second of one replica, None while nothing states it."""
        known = [self.rate or 0.0, self.capacity.requests_per_s * self.request_work if self.capacity else 0.0]
        return min((rate for rate in known if rate > 0.0), default=None)

    @property
    def bound(self) -> Bound | None:
        """What bounds the rate of a replica, None while that is unknown."""
        return self.capacity.bound if self.capacity is not None else self.rate_bound
