"""Load shedding: the order in which placements are refused when a pool cannot serve all of them in time.

Order: batch, over-quota, standard, interactive; a request that has begun to stream is never shed. Within a
rank, retries are shed before first attempts, and the newest goes first: the oldest is closest to its
start. No placement is refused for the pool's load while one of a lower rank waits there: that one is shed.

Prioritised shedding: Google SRE book, Handling Overload; retries first: AWS Builders' Library. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random
from typing import Generic, Protocol, TypeVar

from services.core.records import Priority
from services.scheduler.policy.overload.pressure import ServiceTargets


class ShedRank(IntEnum):
    """Shedding rank; the lowest is shed first."""

    BATCH = 0
    OVER_QUOTA = 1
    STANDARD = 2
    INTERACTIVE = 3
    BEGUN = 4


@dataclass(frozen=True, slots=True)
class SheddingPolicy:
    """Settings of load shedding.

    A retry-after is the wait beyond the target, more with each earlier attempt.
    """

    enabled: bool = True
    targets: ServiceTargets = field(default_factory=ServiceTargets)
    # Share of its target that a retry may be predicted to wait.
    retry_patience_ratio: float = 0.5
    # A waiting placement is shed at a predicted wait of so many times its target.
    overdue_ratio: float = 1.5
    min_retry_after_s: float = 1.0
    max_retry_after_s: float = 60.0
    # Random part added to a retry-after.
    jitter_ratio: float = 0.5


@dataclass(frozen=True, slots=True)
class OfferedPlacement:
    """A new placement, with the facts that shedding uses. Times in seconds; None: no limit."""

    priority: Priority
    over_quota: bool
    attempt: int
    begun: bool
    queue_ttl_s: float
    deadline_left_s: float | None
    ttft_target_s: float | None

    @property
    def rank(self) -> ShedRank:
        return shed_rank(self.priority, over_quota=self.over_quota, begun=self.begun)


@dataclass(frozen=True, slots=True)
class Take:
    """The placement may wait."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """The deadline of the placement passes before it could start, even if others were shed."""

    wait_s: float
    limit_s: float
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Shed:
    """A placement has to be shed: the one with the lowest rank in the pool, or the new one if it is lowest.

    ``claims``: the predicted wait exceeds the whole target, not only a retry's part of it, which does not
    justify shedding others.
    """

    wait_s: float
    limit_s: float
    retry_after_s: float
    claims: bool


Verdict = Take | Hopeless | Shed


def shed_rank(priority: Priority, *, over_quota: bool, begun: bool) -> ShedRank:
    """Return the shedding rank. Batch is lowest, over its quota or not."""
    if begun:
        return ShedRank.BEGUN
    if priority is Priority.BATCH:
        return ShedRank.BATCH
    if over_quota:
        return ShedRank.OVER_QUOTA
    return ShedRank.STANDARD if priority is Priority.STANDARD else ShedRank.INTERACTIVE


def judge(arrival: OfferedPlacement, wait_s: float | None, policy: SheddingPolicy, rng: Random) -> Verdict:
    """Return whether the placement may wait. ``wait_s`` is predicted; None (no prediction) admits the
    placement."""
    if wait_s is None or arrival.begun or not policy.enabled:
        return Take()
    own_s = math.inf if arrival.deadline_left_s is None else arrival.deadline_left_s
    if wait_s > own_s:
        return Hopeless(wait_s, own_s, retry_after_s(wait_s, own_s, arrival.attempt, policy, rng))
    whole_s = min(policy.targets.of(arrival.priority, arrival.ttft_target_s), arrival.queue_ttl_s)
    limit_s = whole_s * policy.retry_patience_ratio if arrival.attempt else whole_s
    if wait_s <= limit_s:
        return Take()
    later_s = retry_after_s(wait_s, limit_s, arrival.attempt, policy, rng)
    return Shed(wait_s, limit_s, later_s, claims=wait_s > whole_s)


def retry_after_s(wait_s: float, limit_s: float, attempt: int, policy: SheddingPolicy, rng: Random) -> float:
    """Return the retry-after in seconds: when the queue is predicted to be short enough, randomised.

    It grows with each attempt, so that refused callers do not crowd out first attempts.
    """
    return spread_s(max(policy.min_retry_after_s, wait_s - limit_s) * (1 + min(attempt, 16)), policy, rng)


def spread_s(later_s: float, policy: SheddingPolicy, rng: Random) -> float:
    """Return the time within its bounds, plus up to ``jitter_ratio`` at random."""
    within_s = min(policy.max_retry_after_s, max(policy.min_retry_after_s, later_s))
    return within_s * (1.0 + policy.jitter_ratio * rng.random())


class Sheddable(Protocol):
    """A placement that can be shed. ``number`` is unique and grows with submission."""

    @property
    def number(self) -> int: ...

    @property
    def rank(self) -> ShedRank: ...

    @property
    def retried(self) -> bool: ...


Item = TypeVar("Item", bound=Sheddable)


class SheddingOrder(Generic[Item]):
    """The waiting placements of one pool in shedding order. Each call is O(ranks)."""

    def __init__(self) -> None:
        # Items by number, in submission order: the newest is last.
        self._items: dict[tuple[ShedRank, bool], dict[int, Item]] = {
            (rank, retried): {} for rank in ShedRank for retried in (True, False)
        }
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, item: Item) -> None:
        self._items[item.rank, item.retried][item.number] = item
        self._count += 1

    def discard(self, item: Item) -> None:
        """Remove the item; KeyError if it is not present."""
        del self._items[item.rank, item.retried][item.number]
        self._count -= 1

    def first(self) -> Item | None:
        """Return the placement that is shed first, None when none may be shed."""
        for (rank, _), items in self._items.items():
            if items and rank is not ShedRank.BEGUN:
                return items[next(reversed(items))]
        return None

    def victim_for(self, rank: ShedRank, *, retried: bool) -> Item | None:
        """Return the placement to shed instead of a new one of this rank; None when the new one is shed
        first."""
        found = self.first()
        if found is None or (found.rank, not found.retried) >= (rank, not retried):
            return None
        return found
