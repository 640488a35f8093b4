"""Which batch a gateway runs next, and how many of its lines at once. Pure.

Tenants take turns (``TenantTurns``, where batches cost the same): at most one batch of each runs in the
fleet, and of tenants that are due at once the one with the older batch comes first. A batch that had its turn
yields to a waiting tenant when no gateway has room for it. A batch whose lines are only refused is stalled:
it does not count as running, keeps a place that nobody needs, and is the first to yield one. What the lines
then receive of the workers is decided by the scheduler, as for all requests of the lowest class.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InternalError,
    OverQuota,
    RequestCancelled,
    Unavailable,
)
from services.core.fixed_cost.turns import TenantTurns
from services.core.records import Tenant

# A turn while other tenants wait.
TURN_S: Final = 60.0
# Time from a refusal on without any result; at least a turn, since a stalled batch may yield at once.
STALL_S: Final = 60.0
# Attempts of a line that end with an internal error.
MAX_CRASHES: Final = 3
_FIRST_LINES: Final = 2.0
# One refusal of many lines at once counts once.
_SETTLE_S: Final = 1.0
# A line that waited longer, or so much longer than the quickest one of late, found no idle worker. The second
# is the queueing delay of LEDBAT (RFC 6817); the first holds where each line waits as long.
MAX_WAIT_S: Final = 0.1
MAX_DELAY_S: Final = 0.025
_BASE_S: Final = 60.0  # the quickest is that of this time and of the one before


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """A batch, as turns see it. ``ends``: it was cancelled, or its time is over."""

    tenant: str
    batch_id: str
    create_unix_s: float
    ends: bool = False


def next_batches(
    waiting: Sequence[UnfinishedBatch],
    running: Mapping[str, int],
    turns: TenantTurns,
    room: int,
    left_stalled_s: Mapping[tuple[str, str], float] = MappingProxyType({}),
    ending: Collection[str] = (),
) -> tuple[UnfinishedBatch, ...]:
    """Return what a gateway with room for so many batches claims, in order.

    ``running``: batches of each tenant that run anywhere; ``turns``: those that began here;
    ``left_stalled_s``: when a batch, by tenant and id, left its place here because it was stalled. Of
    each tenant the oldest batch is chosen, of those that left the first one after all others. A batch that
    ends waits for no turn, since its lines do not run: one of each tenant, unless it has one in ``ending``
    here, in half of the room.
    """
    ends: dict[str, UnfinishedBatch] = {}
    oldest: dict[str, UnfinishedBatch] = {}

    def order(batch: UnfinishedBatch) -> tuple[float, float, str]:
        return (
            left_stalled_s.get((batch.tenant, batch.batch_id), -math.inf),
            batch.create_unix_s,
            batch.batch_id,
        )

    for batch in sorted(waiting, key=order):
        if batch.ends and batch.tenant not in ending:
            ends.setdefault(batch.tenant, batch)
        if not batch.ends and not running.get(batch.tenant):
            oldest.setdefault(batch.tenant, batch)
    due = sorted(
        oldest.values(), key=lambda one: (turns.begin_s(one.tenant), one.create_unix_s, one.batch_id)
    )
    first = list(ends.values())[: (room + 1) // 2] if room > 0 else []
    return tuple((first + due)[: max(0, room)])


def not_oldest(running: Iterable[UnfinishedBatch]) -> frozenset[str]:
    """Return the batches whose tenant also runs an older one: it was stalled, and they yield."""
    oldest: dict[str, UnfinishedBatch] = {}
    found: set[str] = set()
    for batch in sorted(running, key=lambda one: (one.create_unix_s, one.batch_id)):
        if oldest.setdefault(batch.tenant, batch) is not batch:
            found.add(batch.batch_id)
    return frozenset(found)


@dataclass(slots=True)
class BatchProgress:
    """Whether lines of a batch get results, or only refusals."""

    # Time of the first refusal after the last result.
    _refused_s: float = math.inf

    def result(self) -> None:
        self._refused_s = math.inf

    def refused(self, now_s: float) -> None:
        self._refused_s = min(self._refused_s, now_s)

    def is_stalled(self, now_s: float) -> bool:
        return now_s - self._refused_s >= STALL_S


class Turn(Protocol):
    """A batch that a gateway runs."""

    began_s: float
    stalled: bool


T = TypeVar("T", bound=Turn)


def yielding_turn(turns: Iterable[T], now_s: float, waiting_tenants: int, free_places: int) -> T | None:
    """Return the turn that ends for tenants that no place is free for: a stalled one, or the longest."""
    if waiting_tenants <= free_places:
        return None
    over = (turn for turn in turns if now_s - turn.began_s >= TURN_S)
    return min(over, key=lambda turn: (not turn.stalled, turn.began_s), default=None)


def is_temporary(error: FairwayError, crashes: int) -> bool:
    """Return whether the line is tried again. ``crashes``: internal errors of it before."""
    if isinstance(error, OverQuota):
        return error.retry_after_s is not None
    if isinstance(error, InternalError):
        return crashes + 1 < MAX_CRASHES
    return isinstance(error, Unavailable | DeadlineExceeded | RequestCancelled)


@dataclass(slots=True)
class BatchPace:
    """How many lines of one batch run at once: one more for each window that succeeds, half after a refusal
    or a wait. So a batch takes idle capacity, and leaves it when others need it.

    A batch leaves half of its tenant's concurrency and requests per minute to the tenant's other requests.
    """

    window: float = _FIRST_LINES
    _reduced_s: float = field(default=-math.inf)
    _next_start_s: float = field(default=-math.inf)
    # Least waits of the present and of the previous ``_BASE_S``.
    _least_s: tuple[float, float] = (math.inf, math.inf)
    _base_until_s: float = field(default=-math.inf)

    def room(self, share: int, tenant: Tenant) -> int:
        """Return how many lines may run now. ``share`` is the batch's part of the gateway's lines."""
        most = min(share, tenant.max_concurrency // 2) if tenant.max_concurrency else share
        self.window = min(self.window, float(max(1, most)))
        return max(1, int(self.window))

    def wait_s(self, now_s: float, tenant: Tenant) -> float:
        """Return the time until the next line may start, by the tenant's requests per minute."""
        return max(0.0, self._next_start_s - now_s) if tenant.requests_per_minute else 0.0

    def started(self, now_s: float, tenant: Tenant) -> None:
        if tenant.requests_per_minute:
            self._next_start_s = max(now_s, self._next_start_s) + 120.0 / tenant.requests_per_minute

    def answered(self, waited_s: float, now_s: float) -> None:
        """Count a line that succeeded, after a wait in the queue and for the engine."""
        if now_s >= self._base_until_s:
            self._least_s, self._base_until_s = (math.inf, self._least_s[0]), now_s + _BASE_S
        self._least_s = min(self._least_s[0], waited_s), self._least_s[1]
        if waited_s > min(MAX_WAIT_S, min(self._least_s) + MAX_DELAY_S):
            self.refused(now_s)
        else:
            self.window += 1.0 / self.window

    def refused(self, now_s: float) -> None:
        if now_s - self._reduced_s >= _SETTLE_S:
            self.window, self._reduced_s = max(1.0, self.window / 2), now_s
