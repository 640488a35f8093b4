"""Predicted wait of a new placement, and the pressure on a pool: 0 (none) to 1.

    wait = tokens that go before it / tokens per second that the pool can do

Tokens of a placement are its prompt and its predicted output. The rate of a pool is measured only while work
waits, because an idle pool computes less than it could. The tokens before a placement are those of its class
and higher classes, of each tenant at most as many as fair service grants it until the placement's own tenant
has been served: a tenant with a short queue does not wait for one with a long queue. Processor sharing:
Parekh and Gallager, A Generalized Processor Sharing Approach, 1993.

Pure: time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from services.core.records import Priority

MAX_WAIT_S: Final = 300.0  # the longest wait that is reported
# The smallest share of a pool's rate that a class gets while placements of higher classes arrive.
LEAST_LEFT_RATIO: Final = 0.1


@dataclass(frozen=True, slots=True)
class ServiceTargets:
    """Time to first token of each class, in seconds, for requests without a target of their objective.

    Batch is bounded by its queue time only.
    """

    interactive_s: float = 2.0
    standard_s: float = 10.0
    batch_s: float = math.inf

    def __post_init__(self) -> None:
        if min(self.interactive_s, self.standard_s, self.batch_s) <= 0:
            raise ValueError("a target is above zero")

    def of(self, priority: Priority, objective_s: float | None = None) -> float:
        """Return the target of a request: what its objective shapes serving with, otherwise its class's.

        Verdict, shedding, pressure and with it degrading have it from here.
        """
        if objective_s is not None:
            return objective_s
        found = {
            Priority.INTERACTIVE: self.interactive_s,
            Priority.STANDARD: self.standard_s,
            Priority.BATCH: self.batch_s,
        }
        return found[priority]


@dataclass(slots=True)
class TokenRate:
    """Tokens per second of one worker of a pool, measured in windows of ``window_s``.

    A window above the rate raises it at once. One below lowers it, by ``follow_ratio`` of the difference, if
    work waited meanwhile: otherwise the window does not show what the pool could do.
    """

    window_s: float = 2.0
    follow_ratio: float = 0.1
    _tokens: float = 0.0
    _began_s: float = -math.inf
    _rate: float = 0.0

    def note(self, tokens: float, now_s: float, *, workers: int, waits: bool) -> None:
        """Count tokens of prompts and outputs that ``workers`` computed. ``waits``: more work is queued."""
        past_s = now_s - self._began_s
        if past_s >= self.window_s:
            # A window that closes late also covers time without work, so it is no evidence of the rate.
            if past_s < 2.0 * self.window_s and workers > 0:
                self._learn(self._tokens / past_s / workers, waits=waits)
            self._tokens, self._began_s = 0.0, now_s
        self._tokens += tokens

    def tokens_per_s(self, workers: int) -> float | None:
        """Return the rate of that many workers, None before the first measurement."""
        return self._rate * workers if self._rate > 0.0 and workers > 0 else None

    def _learn(self, rate: float, *, waits: bool) -> None:
        if rate >= self._rate:
            self._rate = rate
        elif waits:
            self._rate += (rate - self._rate) * self.follow_ratio


@dataclass(slots=True)
class ArrivalRate:
    """Queued tokens per second over about the last ``window_s``; older ones decay."""

    window_s: float = 5.0
    _tokens: float = 0.0
    _seen_s: float = -math.inf

    def note(self, tokens: float, now_s: float) -> None:
        """Count tokens of prompts and predicted outputs."""
        self._tokens = self._faded(now_s) + tokens
        self._seen_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Return the rate. It starts from 0, so that one burst does not count as a steady stream at once."""
        return self._faded(now_s) / self.window_s

    def _faded(self, now_s: float) -> float:
        return self._tokens * math.exp(-max(0.0, now_s - self._seen_s) / self.window_s)


@dataclass(slots=True)
class Backlog:
    """Waiting tokens of one pool, by class and tenant. Bounded by the queue."""

    _tokens: dict[Priority, dict[str, float]] = field(
        default_factory=lambda: {priority: {} for priority in Priority}
    )
    _sums: dict[Priority, float] = field(default_factory=lambda: dict.fromkeys(Priority, 0.0))
    _counts: dict[tuple[Priority, str], int] = field(default_factory=dict)
    # How many placements of a class wait with each target.
    _targets: dict[Priority, dict[float, int]] = field(
        default_factory=lambda: {priority: {} for priority in Priority}
    )

    def add(self, priority: Priority, tenant: str, tokens: float, target_s: float = math.inf) -> None:
        """Count a placement. ``target_s``: ``ServiceTargets.of`` it."""
        targets = self._targets[priority]
        targets[target_s] = targets.get(target_s, 0) + 1
        by_tenant = self._tokens[priority]
        by_tenant[tenant] = by_tenant.get(tenant, 0.0) + tokens
        self._counts[priority, tenant] = self._counts.get((priority, tenant), 0) + 1
        self._sums[priority] += tokens

    def remove(self, priority: Priority, tenant: str, tokens: float, target_s: float = math.inf) -> None:
        """Count a placement no longer, with the values with which it was added."""
        targets = self._targets[priority]
        targets[target_s] -= 1
        if not targets[target_s]:
            del targets[target_s]
        by_tenant = self._tokens[priority]
        self._sums[priority] -= tokens
        by_tenant[tenant] -= tokens
        self._counts[priority, tenant] -= 1
        if not self._counts[priority, tenant]:
            del self._counts[priority, tenant], by_tenant[tenant]
            if not by_tenant:
                self._sums[priority] = 0.0

    def total(self, priority: Priority) -> float:
        """Return the tokens of this class and the higher ones."""
        return sum(tokens for other, tokens in self._sums.items() if other.rank >= priority.rank)

    def holds(self, tenant: str) -> bool:
        """Whether a placement of the tenant waits."""
        return any(tenant in by_tenant for by_tenant in self._tokens.values())

    def waits(self, priority: Priority) -> bool:
        """Whether a placement of the class waits."""
        return bool(self._tokens[priority])

    def target_of(self, priority: Priority) -> float:
        """Return the target of a class: the loosest of those that wait, infinity without any.

        They differ only while an objective changes, or where deployments share a version.
        """
        return max(self._targets[priority], default=math.inf)

    def ahead_of(
        self,
        priority: Priority,
        tenant: str,
        own_tokens: float,
        weights: Mapping[str, float],
        *,
        weight: float = 1.0,
    ) -> float:
        """Return the tokens that are served before a placement of ``own_tokens`` that the tenant submits now.

        ``weights`` has the weights of waiting tenants that differ from 1; ``weight`` is this tenant's.
        """
        mine = self._tokens[priority].get(tenant, 0.0)
        horizon = (mine + own_tokens) / weight
        ahead = 0.0
        for other, by_tenant in self._tokens.items():
            if other.rank > priority.rank:
                ahead += self._sums[other]
            elif other is priority:
                for name, tokens in by_tenant.items():
                    ahead += mine if name == tenant else min(tokens, horizon * weights.get(name, 1.0))
        return ahead


def wait_s(
    tokens_ahead: float, tokens_per_s: float | None, *, arriving_tokens_per_s: float = 0.0
) -> float | None:
    """Return how long that many tokens take, None while the rate is unknown.

    ``arriving_tokens_per_s`` continue to arrive and are served first: the placement gets the rest of the
    rate, at least a tenth, because a class that uses the whole rate now may use less later. Cobham's waiting
    time of a lower class, Priority assignment in waiting line problems, 1954.
    """
    if tokens_ahead <= 0.0:
        return 0.0
    if tokens_per_s is None:
        return None
    left = max(tokens_per_s - arriving_tokens_per_s, tokens_per_s * LEAST_LEFT_RATIO)
    return tokens_ahead / left


def pressure_ratio(backlog: Backlog, tokens_per_s: float | None) -> float:
    """Return the pressure: the highest ratio of predicted wait to target over all classes, at most 1.

    A class without waiting placements does not count, and neither does one without a target.
    """
    worst = 0.0
    for priority in Priority:
        target_s = backlog.target_of(priority)
        if target_s == math.inf:
            continue
        found_s = wait_s(backlog.total(priority), tokens_per_s)
        worst = max(worst, 0.0 if found_s is None else found_s / target_s)
    return min(1.0, worst)
