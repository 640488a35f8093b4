"""Simpler schedulers to compare with: other routing or another queue order, all else as in production.

A baseline gets everything that it does not replace: one queue for the fleet from which a request leaves only
as a grant on a worker that has room for it, KV admission, prefix caches in the workers, ejection, shedding.
Any difference is due to the replaced decision. docs/decisions/0018-comparison-baselines.md explains why each
is as it is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from services.core.records import Priority
from services.scheduler.policy.placement.candidate import (
    Offer,
    PlaceQuery,
    kv_headroom,
    prefill_headroom,
    prefix_hit,
)
from services.scheduler.policy.placement.choose import PlacementProfile
from services.scheduler.policy.queue.fair_order import MICROSECONDS, FairOrder, OrderPolicy
from services.scheduler.policy.queue.fairness import FairShares
from services.scheduler.queue.rules import PRODUCTION, BypassLimit, QueueDiscipline, QueueRule
from services.scheduler.queue.waiting import QueuedPlacement
from services.scheduler.term import TermSettings

TIE: Final = 0.01  # far below any difference in the score that it breaks


class ArrivalOrder(FairOrder[QueuedPlacement]):
    """First come, first served by class and arrival; a class waits one head start for each step below the
    highest. The counters are kept, and nothing is ordered by them."""

    def __init__(self, policy: OrderPolicy, shares: dict[Priority, FairShares]) -> None:
        super().__init__(policy, shares)
        self._head_start_us = round(policy.class_head_start_s * MICROSECONDS)
        self._sorted: list[QueuedPlacement] = []

    def add(self, item: QueuedPlacement) -> None:
        super().add(item)
        insort(self._sorted, item, key=self._key)

    def discard(self, item: QueuedPlacement) -> None:
        super().discard(item)
        del self._sorted[bisect_left(self._sorted, self._key(item), key=self._key)]

    def value(self, item: QueuedPlacement) -> float:
        return 0.0

    def in_order(self, now_us: int = 0) -> Iterator[QueuedPlacement]:
        index = 0
        while index < len(self._sorted):
            item = self._sorted[index]
            yield item
            if index < len(self._sorted) and self._sorted[index] is item:
                index += 1

    def _key(self, item: QueuedPlacement) -> tuple[int, int]:
        behind = Priority.INTERACTIVE.rank - item.priority.rank
        return item.arrival_us + behind * self._head_start_us, item.number


ARRIVAL: Final = QueueDiscipline(ArrivalOrder, (BypassLimit,))


class NextInTurn:
    """Round robin: scores highest the worker after the last one used that has room.

    It holds the turn, so that every scheduler needs its own. A query that is scored is placed, and all
    its candidates are scored in a row: a query that was not the last one takes the next turn.
    """

    def __init__(self) -> None:
        self.__name__ = "next_in_turn"
        self._places: dict[str, int] = {}
        self._turn = 0
        self._last: PlaceQuery | None = None
        self._ahead: tuple[int, int] | None = None

    def __call__(self, query: PlaceQuery, offer: Offer) -> float:
        """Return 1 for the next worker in the order, less for each that comes before another."""
        if query is not self._last:
            if self._ahead is not None:  # the last query went to the nearest one
                self._turn = (self._ahead[1] + 1) % len(self._places)
            self._last, self._ahead = query, None
        place = self._places.setdefault(offer.candidate.worker_id, len(self._places))
        steps = (place - self._turn) % len(self._places)
        if self._ahead is None or steps < self._ahead[0]:
            self._ahead = (steps, place)
        return 1.0 - steps / len(self._places)


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduler to compare. ``settings`` makes those of a run anew from the production ones."""

    name: str
    text: str
    settings: Callable[[], TermSettings]


def ours() -> TermSettings:
    """Return what production decides by."""
    return TermSettings()


def round_robin() -> TermSettings:
    return _routed(PlacementProfile(scorers=((NextInTurn(), 1.0),), spread=0.0, sample=None))


def least_loaded() -> TermSettings:
    """The worker with the most free KV and the fewest prompt tokens ahead."""
    return _routed(PlacementProfile(scorers=((kv_headroom, 1.0), (prefill_headroom, 1.0)), sample=None))


def prefix_only() -> TermSettings:
    """The worker that has the most of the prompt cached; among equal ones the least loaded."""
    scorers = ((prefix_hit, 1.0), (kv_headroom, TIE), (prefill_headroom, TIE))
    return _routed(PlacementProfile(scorers=scorers, spread=TIE / 50, sample=None))


def first_come() -> TermSettings:
    """The queue in order of class and arrival, under the bypass limit alone; routing as in production."""
    return replace(TermSettings(), discipline=ARRIVAL)


def without(rule: type[QueueRule]) -> TermSettings:
    """Production without one rule of its queue."""
    left = tuple(each for each in PRODUCTION.rules if each is not rule)
    return replace(TermSettings(), discipline=replace(PRODUCTION, rules=left))


def _routed(profile: PlacementProfile) -> TermSettings:
    return replace(TermSettings(), profile=profile)


OURS: Final = Policy("ours", "fair queue, routing by predicted TTFT and prefix", ours)
ROUND_ROBIN: Final = Policy("round-robin", "the next worker that has room", round_robin)
LEAST_LOADED: Final = Policy("least-loaded", "the worker with the most room", least_loaded)
PREFIX_ONLY: Final = Policy("prefix-only", "the worker that has the most of the prompt", prefix_only)
FIRST_COME: Final = Policy("first-come", "a queue by arrival, our routing", first_come)
POLICIES: Final = (OURS, ROUND_ROBIN, LEAST_LOADED, PREFIX_ONLY, FIRST_COME)
# Production with one rule of the queue less, each.
ABLATIONS: Final = tuple(
    Policy(f"without {rule.__name__}", f"our queue without {rule.__name__}", partial(without, rule))
    for rule in PRODUCTION.rules
)
