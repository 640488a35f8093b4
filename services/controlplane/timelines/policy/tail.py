"""Which ended requests keep their timelines: failed ones, and the slowest of each model.

Tail sampling: the decision is taken when the latency is known. Pure; single writer: the leader's collector.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final, Generic, TypeVar

from services.core.estimates.finished import FinishedRequest

MAX_SLOW: Final = 192
MAX_SLOW_OF_MODEL: Final = 64
MAX_FAILED: Final = 64
MAX_SLOW_BYTES: Final = 24 * 1024 * 1024
MAX_FAILED_BYTES: Final = 8 * 1024 * 1024
MAX_KEPT_BYTES: Final = 512 * 1024  # a larger timeline is kept without the other requests of its batches
KEPT_S: Final = 3600.0
SLOW_PER_ROUND: Final = 4
FAILED_PER_ROUND: Final = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """A timeline that outlives the recorders' rings."""

    request: FinishedRequest
    kept_unix_s: float
    size_bytes: int
    timeline: T


class KeptTimelines(Generic[T]):
    """Bounded in number, bytes and age. ``evicted`` counts what made room for others."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept[T]] = OrderedDict()
        self.size_bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, request_id: str) -> Kept[T] | None:
        return self._kept.get(request_id)

    def wanted(self, ended: Iterable[FinishedRequest]) -> list[FinishedRequest]:
        """Return which of these to collect, the slowest first: a bounded number for each round."""
        fresh = [one for one in ended if one.request_id not in self._kept]
        slow_ones = self._slow()
        floors = {model: _floor_us(model, slow_ones) for model in {one.model for one in fresh}}
        slow = [one for one in fresh if not one.failed and one.total_us > floors[one.model]]
        slow.sort(key=lambda one: one.total_us, reverse=True)
        failed = [one for one in fresh if one.failed]
        return [*slow[:SLOW_PER_ROUND], *failed[-FAILED_PER_ROUND:]]

    def add(self, kept: Kept[T]) -> None:
        """Keep a timeline; others make room for it."""
        request = kept.request
        self._drop(request.request_id)
        self._kept[request.request_id] = kept
        self.size_bytes += kept.size_bytes
        if request.failed:
            while _bytes(failed := self._failed()) > MAX_FAILED_BYTES or len(failed) > MAX_FAILED:
                self._evict(failed[0])
            return
        while _passes(slow := self._slow(), 0, 0) or len(slow.get(request.model, ())) > MAX_SLOW_OF_MODEL:
            self._evict(_least(slow))

    def expire(self, now_unix_s: float) -> None:
        """Drop what is older than ``KEPT_S``."""
        for one in list(self._kept.values()):
            if one.kept_unix_s < now_unix_s - KEPT_S:
                self._drop(one.request.request_id)

    def _failed(self) -> list[Kept[T]]:
        return [one for one in self._kept.values() if one.request.failed]

    def _slow(self) -> dict[str, list[Kept[T]]]:
        """Return those that did not fail, by model."""
        found: dict[str, list[Kept[T]]] = {}
        for one in self._kept.values():
            if not one.request.failed:
                found.setdefault(one.request.model, []).append(one)
        return found

    def _evict(self, one: Kept[T]) -> None:
        self.evicted += 1
        self._drop(one.request.request_id)

    def _drop(self, request_id: str) -> None:
        if (old := self._kept.pop(request_id, None)) is not None:
            self.size_bytes -= old.size_bytes


def _bytes(kept: Iterable[Kept[T]]) -> int:
    return sum(one.size_bytes for one in kept)


def _passes(slow: Mapping[str, list[Kept[T]]], more: int, more_bytes: int) -> bool:
    """Return whether so many more would pass the bounds of all models together."""
    held = list(chain.from_iterable(slow.values()))
    return len(held) + more > MAX_SLOW or _bytes(held) + more_bytes > MAX_SLOW_BYTES


def _least(slow: Mapping[str, list[Kept[T]]]) -> Kept[T]:
    """Return the fastest of the models with the most: each comes to an equal share of a full store."""
    most = max(map(len, slow.values()))
    tied = chain.from_iterable(mine for mine in slow.values() if len(mine) == most)
    return min(tied, key=lambda one: one.request.total_us)


def _floor_us(model: str, slow: Mapping[str, list[Kept[T]]]) -> int:
    """Return the latency that a further request of the model has to exceed: of what it would displace."""
    mine = slow.get(model, [])
    most = max(map(len, slow.values()), default=0)
    full = len(mine) == MAX_SLOW_OF_MODEL or _passes(slow, 1, MAX_KEPT_BYTES)
    if not full or len(mine) + 1 < most:
        return -1
    tied = (one for each in slow.values() if each is mine or len(each) > len(mine) for one in each)
    return min((one.request.total_us for one in tied), default=-1)
