"""Which ended requests keep their timelines: failed ones, and the slowest of each model.

Tail sampling: the decision is taken when the latency is known. Pure; single writer: the leader's collector.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from services.core.estimates.finished import FinishedRequest

MAX_SLOW: Final = 192
MAX_SLOW_OF_MODEL: Final = 64
MAX_FAILED: Final = 64
MAX_BYTES: Final = 32 * 1024 * 1024
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
        floors = {model: self._floor_us(model) for model in {one.model for one in fresh}}
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
            self._bound(self._of(failed=True), MAX_FAILED)
        else:
            mine = sorted(self._of(failed=False, model=request.model), key=lambda one: -one.request.total_us)
            for least in mine[MAX_SLOW_OF_MODEL:]:
                self._evict(least)
            self._bound(self._of(failed=False), MAX_SLOW)
        while self.size_bytes > MAX_BYTES:
            self._evict(next(iter(self._kept.values())))

    def expire(self, now_unix_s: float) -> None:
        """Drop what is older than ``KEPT_S``."""
        for one in list(self._kept.values()):
            if one.kept_unix_s < now_unix_s - KEPT_S:
                self._drop(one.request.request_id)

    def _of(self, *, failed: bool, model: str = "") -> Iterator[Kept[T]]:
        for one in self._kept.values():
            if one.request.failed is failed and model in ("", one.request.model):
                yield one

    def _floor_us(self, model: str) -> int:
        """Return the latency that a further slow request of the model has to exceed."""
        mine = sorted((one.request.total_us for one in self._of(failed=False, model=model)), reverse=True)
        return mine[MAX_SLOW_OF_MODEL - 1] if len(mine) >= MAX_SLOW_OF_MODEL else -1

    def _bound(self, kept: Iterator[Kept[T]], most: int) -> None:
        found = list(kept)
        for one in found[: max(0, len(found) - most)]:
            self._evict(one)

    def _evict(self, one: Kept[T]) -> None:
        self.evicted += 1
        self._drop(one.request.request_id)

    def _drop(self, request_id: str) -> None:
        if (old := self._kept.pop(request_id, None)) is not None:
            self.size_bytes -= old.size_bytes
