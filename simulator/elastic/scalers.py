"""The scalers that run on the same day: ours, and two as they are commonly configured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from services.controlplane.scaling.policy.scaler import PoolScaler, ReplicaBounds, Supply, Zone
from services.core.estimates.capacity import ReplicaCapacity, capacity_of, mix_of
from services.core.estimates.pool_load import ClassLoad, PoolLoad
from services.core.records import Priority
from simulator.elastic.pool import START_S, ElasticPool

MOST: Final = 40


@dataclass(slots=True)
class Ours:
    """The production policy on what the scheduler's leader would report."""

    policy: PoolScaler = field(default_factory=PoolScaler)
    every_s: float = 5.0
    _mixed_s: float = 0.0
    _capacity: ReplicaCapacity | None = None

    def replicas(self, pool: ElasticPool, now_s: float) -> int:
        classes = [
            ClassLoad(
                priority,
                pool.load.targets.get(priority, math.inf),
                counted.waiting_tokens,
                counted.arrived_tokens,
                due=_due(pool, now_s) if priority is Priority.BATCH else None,
            )
            for priority, counted in pool.classes.items()
        ]
        if now_s >= self._mixed_s + 60.0 and pool.done:
            mix = mix_of(pool.done[-2000:])
            self._capacity = capacity_of(pool.costs, mix, max_sequences=pool.load.max_sequences)
            self._mixed_s = now_s
        load = PoolLoad(tuple(classes), pool.rate, pool.request_tokens, capacity=self._capacity)
        mean_s = sum(START_S) / 2
        waits = tuple(max(1.0, one.ordered_s + mean_s - now_s) for one in pool.starting)
        zones = tuple(Zone(str(zone)) for zone in pool.zones)
        supply = Supply(len(pool.ready), waits, mean_s, zones)
        return self.policy.decide(load, supply, ReplicaBounds(1, MOST), now_s).replicas


def _due(pool: ElasticPool, now_s: float) -> tuple[tuple[float, float], ...]:
    """Return the work of batch lines that wait, by job."""
    return tuple((due_s - now_s, tokens) for due_s, tokens in pool.due.items() if tokens > 0.0)


@dataclass(slots=True)
class Hpa:
    """Kubernetes' horizontal autoscaler: replicas = ceil(sum of a metric / target), within 10 % as they are,
    out by at most double or 4 in 15 s, in to the most that was wanted within 300 s."""

    metric: Callable[[ElasticPool], float]
    target: float
    counter: bool = False  # whether the metric is a count, of which the rate over a minute is used
    every_s: float = 15.0
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _seen: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=5))

    def replicas(self, pool: ElasticPool, now_s: float) -> int:
        have = len(pool.ready) + len(pool.starting)
        self._seen.append((now_s, self.metric(pool)))
        found = self._value(now_s) / self.target
        wanted = have if abs(found / max(1, have) - 1.0) <= 0.1 else math.ceil(found - 1e-9)
        wanted = max(1, min(MOST, wanted))
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - 300.0:
            self._wanted.popleft()
        if wanted > have:
            return min(wanted, max(2 * have, have + 4))
        return min(have, max(each for _, each in self._wanted))

    def _value(self, now_s: float) -> float:
        (from_s, before), (to_s, after) = self._seen[0], self._seen[-1]
        if not self.counter:
            return after
        return (after - before) / (to_s - from_s) if to_s > from_s else 0.0


@dataclass(frozen=True, slots=True)
class Rival:
    """A metric, and the bounds of its target per replica; the lower the target, the more replicas."""

    metric: Callable[[ElasticPool], float]
    low: float
    high: float
    counter: bool = False

    def scaler(self, target: float) -> Hpa:
        return Hpa(self.metric, target, counter=self.counter)


RIVALS: Final = {
    "utilisation": Rival(attrgetter("used_s"), 0.3, 0.95, counter=True),
    "queue length": Rival(attrgetter("waiting"), 0.02, 8.0),
    "requests in flight": Rival(attrgetter("in_flight"), 1.0, 48.0),
}
