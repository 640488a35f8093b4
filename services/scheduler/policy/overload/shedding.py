"""What is refused when a pool cannot serve everything in time, and who goes first.

Order: batch, over-quota, standard, interactive; what has begun to stream is never shed. Within a rank a retry
goes before a first attempt, and of those the newest goes first: what has waited longest is nearest to its
turn. Nothing is refused for the pool's sake while something of a lower rank waits there: that goes instead.

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
    """The lower is shed first."""

    BATCH = 0
    OVER_QUOTA = 1
    STANDARD = 2
    INTERACTIVE = 3
    BEGUN = 4


@dataclass(frozen=True, slots=True)
class SheddingPolicy:
    """``retry_patience_ratio``: the share of its target that a retry may be predicted to wait.
    ``overdue_ratio``: what waits already is shed when it is predicted to wait that many times its target.

    A retry-after is the wait beyond the target, at least ``min_retry_after_s`` and ``jitter_ratio`` more at
    random, times one more for each earlier attempt, at most ``max_retry_after_s``.
    """

    enabled: bool = True
    targets: ServiceTargets = field(default_factory=ServiceTargets)
    retry_patience_ratio: float = 0.5
    overdue_ratio: float = 1.5
    min_retry_after_s: float = 1.0
    max_retry_after_s: float = 60.0
    jitter_ratio: float = 0.5


@dataclass(frozen=True, slots=True)
class Arrival:
    """A placement that comes, as far as shedding goes. Times in seconds; None: without one."""

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
    """It may wait."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Its own deadline passes before it could start, whoever else is shed."""

    wait_s: float
    limit_s: float
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Shed:
    """Somebody must go: whoever of the pool has the lowest rank, and the one that comes if that is it.

    ``claims``: the wait exceeds the target of its class too. If it does not, nobody else goes for it: to ask
    for more than one's class, or to be a retry, is no claim on others.
    """

    wait_s: float
    limit_s: float
    retry_after_s: float
    claims: bool


Verdict = Take | Hopeless | Shed


def shed_rank(priority: Priority, *, over_quota: bool, begun: bool) -> ShedRank:
    """Return where the placement stands in the order. Batch stays lowest, over its quota or not."""
    if begun:
        return ShedRank.BEGUN
    if priority is Priority.BATCH:
        return ShedRank.BATCH
    if over_quota:
        return ShedRank.OVER_QUOTA
    return ShedRank.STANDARD if priority is Priority.STANDARD else ShedRank.INTERACTIVE


def judge(arrival: Arrival, wait_s: float | None, policy: SheddingPolicy, rng: Random) -> Verdict:
    """Return whether the placement may wait. ``wait_s`` is predicted; None, nothing known, refuses nobody."""
    if wait_s is None or arrival.begun or not policy.enabled:
        return Take()
    own_s = math.inf if arrival.deadline_left_s is None else arrival.deadline_left_s
    if wait_s > own_s:
        return Hopeless(wait_s, own_s, retry_after_s(wait_s, own_s, arrival.attempt, policy, rng))
    target_s, class_s = arrival.ttft_target_s, policy.targets.of(arrival.priority)
    limit_s = min(class_s if target_s is None else target_s, arrival.queue_ttl_s)
    if arrival.attempt:
        limit_s *= policy.retry_patience_ratio
    if wait_s <= limit_s:
        return Take()
    later_s = retry_after_s(wait_s, limit_s, arrival.attempt, policy, rng)
    claims = wait_s > max(limit_s, min(class_s, arrival.queue_ttl_s))
    return Shed(wait_s, limit_s, later_s, claims)


def retry_after_s(wait_s: float, limit_s: float, attempt: int, policy: SheddingPolicy, rng: Random) -> float:
    """Return when to come back, seconds: once the queue is predicted to be short enough, and not all at once.

    Later with each attempt, so that those who were refused before do not crowd out those who come first.
    """
    return spread_s(max(policy.min_retry_after_s, wait_s - limit_s) * (1 + min(attempt, 16)), policy, rng)


def spread_s(later_s: float, policy: SheddingPolicy, rng: Random) -> float:
    """Return the time within its bounds, and up to ``jitter_ratio`` more at random."""
    within_s = min(policy.max_retry_after_s, max(policy.min_retry_after_s, later_s))
    return within_s * (1.0 + policy.jitter_ratio * rng.random())


class Sheddable(Protocol):
    """``number`` is unique and grows with submission."""

    @property
    def number(self) -> int: ...

    @property
    def rank(self) -> ShedRank: ...

    @property
    def retried(self) -> bool: ...


Item = TypeVar("Item", bound=Sheddable)


class SheddingOrder(Generic[Item]):
    """The waiting placements of one pool in the order in which they are shed. Each call is O(ranks)."""

    def __init__(self) -> None:
        # By number, in the order of coming: the newest stands last.
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
        """Forget the item; KeyError if it is not there."""
        del self._items[item.rank, item.retried][item.number]
        self._count -= 1

    def first(self) -> Item | None:
        """Return what is shed first, None when nothing that may be shed waits."""
        for (rank, _), items in self._items.items():
            if items and rank is not ShedRank.BEGUN:
                return items[next(reversed(items))]
        return None

    def victim_for(self, rank: ShedRank, *, retried: bool) -> Item | None:
        """Return what goes instead of one of this rank that comes: None when that one itself is to go."""
        found = self.first()
        if found is None or (found.rank, not found.retried) >= (rank, not retried):
            return None
        return found
