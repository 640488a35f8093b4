"""What waits: a queue per model version with its sums, and indexes by gateway, version, tenant and deadline.

Written by the queue that owns them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.errors import QueueFull, ShareExceeded
from services.core.generation import PlaceSpec
from services.core.limits import share_of
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.core.records import Priority
from services.scheduler.policy.overload.rates import MAX_WAIT_S, MIN_WAIT_S, DrainRate
from services.scheduler.policy.placement.candidate import RoomSummary
from services.scheduler.policy.placement.shared_prefix import shareable_blocks
from services.scheduler.policy.queue.fair_order import FairOrder, OrderPolicy
from services.scheduler.policy.queue.fairness import ServiceWeights
from services.scheduler.policy.queue.length import LengthPolicy
from services.scheduler.queue.refusals import queue_full, share_full
from services.scheduler.queue.rules import QueueDiscipline
from services.scheduler.queue.service_ledger import ServiceLedger
from services.scheduler.queue.waiting import Earmarks, QueuedPlacement

Key = tuple[int, int]  # gateway session, placement id

_SPARE_ENTRIES: Final = 64
_ENTRY_BYTES: Final = 1024  # memory of a waiting placement besides its strings
_NAME_BYTES: Final = 40  # memory of a prefix block's name: an integer and its reference
_SIZES: Final = 40


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queues."""

    # Reserved per sequence, unless its own limit is less, until ``output_samples`` of the version were seen.
    predicted_output_tokens: int = 256
    output_quantile: float = 0.8  # the level of the prediction from then on
    output_samples: int = 32
    max_per_pool: int = 8192
    max_bytes_per_tenant: int = 16 * 1024 * 1024
    max_total: int = 65536
    length: LengthPolicy = field(default_factory=LengthPolicy)
    weights: ServiceWeights = field(default_factory=ServiceWeights)

    @property
    def max_per_tenant(self) -> int:
        """Placements of one tenant over all versions: half of what one queue and all of them hold."""
        return share_of(min(self.max_per_pool, self.max_total))


@dataclass(slots=True)
class _Sizes:
    """Sizes in binary digits. ``counts``: how many have n digits; ``present``: bit n is set if there is
    any."""

    counts: list[int] = field(default_factory=lambda: [0] * _SIZES)
    present: int = 0

    def count(self, tokens: int, change: int) -> None:
        size = tokens.bit_length()
        self.counts[size] += change
        self.present = self.present | 1 << size if self.counts[size] else self.present & ~(1 << size)

    @property
    def least_tokens(self) -> int:
        """Lower bound of all sizes; 0 without any."""
        return (self.present & -self.present) >> 1

    def check_integrity(self, count: int) -> None:
        assert sum(self.counts) == count
        assert self.present == sum(1 << size for size, found in enumerate(self.counts) if found)


@dataclass(slots=True, eq=False)
class Pool:
    """Queue of one version. ``fresh``: placements that no pass has tried. ``sizes``: reserved tokens of each
    placement. ``least``: the same, when workers share all of the prompt that can be shared."""

    order: FairOrder[QueuedPlacement]
    rate: DrainRate = field(default_factory=DrainRate)
    earmarks: Earmarks = field(default_factory=Earmarks)
    fresh: int = 0
    sizes: _Sizes = field(default_factory=_Sizes)
    least: _Sizes = field(default_factory=_Sizes)

    def count(self, item: QueuedPlacement, change: int) -> None:
        self.sizes.count(item.demand.reserved_tokens, change)
        self.least.count(_least_tokens(item), change)
        if not item.tried:
            self.fresh += change

    def is_hopeless(self, room: RoomSummary, *, sharing: bool) -> bool:
        """Whether every placement was tried before and none fits into this room. ``sharing``: some sequences
        of the version hold blocks that others may share."""
        sizes = self.least if sharing else self.sizes
        return not self.fresh and room.room_tokens < sizes.least_tokens

    def check_integrity(self) -> None:
        """Raise AssertionError when the pool counts other placements than it holds."""
        mine = list(self.order.items())
        assert self.fresh == sum(not item.tried for item in mine)
        self.sizes.check_integrity(len(mine))
        self.least.check_integrity(len(mine))
        assert {item.number for item in self.earmarks} == {item.number for item in mine if item.earmark}


def _least_tokens(item: QueuedPlacement) -> int:
    """Return the tokens that the placement needs where all shareable blocks of its prompt are shared."""
    demand = item.demand
    shared = shareable_blocks(item.query.prefix_hashes, demand.prompt_tokens)
    return demand.reserved_tokens - shared * PREFIX_BLOCK_TOKENS


def size_bytes_of(spec: PlaceSpec) -> int:
    """Return the approximate memory of a waiting placement in the leader."""
    return (
        _ENTRY_BYTES
        + len(spec.ticket)
        + sum(map(len, spec.excluded_workers))
        + _NAME_BYTES * len(spec.prefix_hashes)
    )


@dataclass(slots=True)
class TenantQueued:
    """Waiting placements of one tenant, over all versions."""

    count: int = 0
    size_bytes: int = 0


_NO_SHARE: Final = TenantQueued()  # never written to


class TenantShares:
    """The shares of the tenants with waiting placements."""

    def __init__(self) -> None:
        self._shares: dict[str, TenantQueued] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def of(self, tenant: str) -> TenantQueued:
        """Return the tenant's share. Read only."""
        return self._shares.get(tenant, _NO_SHARE)

    def add(self, item: QueuedPlacement) -> None:
        share = self._shares.get(item.spec.tenant_id)
        if share is None:
            share = self._shares[item.spec.tenant_id] = TenantQueued()
        share.count += 1
        share.size_bytes += item.size_bytes

    def remove(self, item: QueuedPlacement) -> None:
        share = self._shares[item.spec.tenant_id]
        share.count -= 1
        share.size_bytes -= item.size_bytes
        if not share.count:
            del self._shares[item.spec.tenant_id]

    def check_integrity(self, queued: Sequence[QueuedPlacement]) -> None:
        """Raise AssertionError when the shares are not those of what is queued."""
        for tenant, share in self._shares.items():
            mine = [item for item in queued if item.spec.tenant_id == tenant]
            assert share.count == len(mine) > 0, "a tenant's share is miscounted"
            assert share.size_bytes == sum(item.size_bytes for item in mine)
        assert sum(share.count for share in self._shares.values()) == len(queued)


class Deadlines:
    """Waiting placements by deadline. One that ended otherwise is dropped when its deadline is read, or when
    most entries are of this kind. ``waiting``: the placements that still wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, QueuedPlacement]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, item: QueuedPlacement) -> None:
        heapq.heappush(self._heap, (item.deadline_s, item.number, item))

    def pop_due(self, now_s: float, waiting: Mapping[Key, QueuedPlacement]) -> QueuedPlacement | None:
        """Return a waiting placement whose deadline has passed, the earliest first; None without any."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, item = heapq.heappop(self._heap)
            if waiting.get((item.session, item.placement_id)) is item:
                return item
        return None

    def next_s(self, waiting: Mapping[Key, QueuedPlacement]) -> float:
        """Return the first deadline of a waiting placement; infinite without any."""
        while self._heap:
            deadline_s, _, item = self._heap[0]
            if waiting.get((item.session, item.placement_id)) is item:
                return deadline_s
            heapq.heappop(self._heap)
        return math.inf

    def tidy(self, waiting: Mapping[Key, QueuedPlacement]) -> None:
        """Remove ended placements when they are more than about half of the entries."""
        if len(self._heap) > _SPARE_ENTRIES + 2 * len(waiting):
            self._heap = [(found.deadline_s, found.number, found) for found in waiting.values()]
            heapq.heapify(self._heap)


class QueueIndex:
    """All waiting placements of a term, and the limits on them."""

    def __init__(
        self,
        limits: QueueLimits,
        order: OrderPolicy,
        discipline: QueueDiscipline,
        ledger: ServiceLedger,
        predicted_s: Callable[[str, Priority, float], float | None],
    ) -> None:
        """``predicted_s``: ``QueueGate.wait_s``."""
        self._predicted_s = predicted_s
        self._limits = limits
        self._order = order
        self._discipline = discipline
        self._ledger = ledger
        self._pools: dict[str, Pool] = {}
        self._items: dict[Key, QueuedPlacement] = {}
        self._deadlines = Deadlines()
        self._tenants = TenantShares()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def get(self, key: Key) -> QueuedPlacement | None:
        return self._items.get(key)

    def of_session(self, session: int) -> list[QueuedPlacement]:
        """Return the placements of one gateway."""
        return [item for key, item in self._items.items() if key[0] == session]

    def pool(self, digest: str) -> Pool | None:
        """Return the queue of a version, None when nothing waited for it lately."""
        return self._pools.get(digest)

    def by_version(self) -> dict[str, list[QueuedPlacement]]:
        """Return the placements by version, in approximate order of the pass."""
        return {digest: list(pool.order.items()) for digest, pool in self._pools.items()}

    def of_version(self, digest: str) -> Iterator[QueuedPlacement]:
        """Yield the placements of a version. None may enter or leave meanwhile."""
        pool = self._pools.get(digest)
        if pool is not None:
            yield from pool.order.items()

    def add(self, item: QueuedPlacement) -> None:
        self._items[item.session, item.placement_id] = item
        pool = self._pool_for(item.spec.version_digest)
        pool.order.add(item)
        pool.count(item, 1)
        self._tenants.add(item)
        self._deadlines.add(item)

    def remove(self, item: QueuedPlacement) -> None:
        """Remove the placement. Its pool stays until ``drop_empty``."""
        del self._items[item.session, item.placement_id]
        pool = self._pools[item.spec.version_digest]
        pool.order.discard(item)
        pool.count(item, -1)
        pool.earmarks.release(item)
        self._tenants.remove(item)
        self._deadlines.tidy(self._items)

    def drop_empty(self, digest: str) -> None:
        """Remove the pool of the version if nothing waits in it."""
        pool = self._pools.get(digest)
        if pool is not None and not len(pool.order):
            del self._pools[digest]

    def pop_due(self, now_s: float) -> QueuedPlacement | None:
        """Return a placement whose deadline has passed, the earliest first; None without any."""
        return self._deadlines.pop_due(now_s, self._items)

    def next_deadline_s(self) -> float:
        """Return the first deadline; infinite without any."""
        return self._deadlines.next_s(self._items)

    def predicted_wait_s(self, digest: str, priority: Priority, now_s: float) -> float | None:
        """Return the wait behind a class and the higher ones, which refusals and operators' views state.

        Before the tokens per second are known it is that of the whole queue; None without recent grants.
        """
        pool, found_s = self._pools.get(digest), self._predicted_s(digest, priority, now_s)
        if found_s is not None or pool is None:
            return found_s
        return pool.rate.drain_s(len(pool.order), now_s)

    def later_s(self, spec: PlaceSpec, now_s: float) -> float:
        """Return after how long a client should send its request again."""
        found_s = self.predicted_wait_s(spec.version_digest, spec.priority, now_s)
        if found_s is None:
            return MIN_WAIT_S if spec.version_digest not in self._pools else MAX_WAIT_S
        return min(MAX_WAIT_S, max(MIN_WAIT_S, found_s))

    def over_limit(self, spec: PlaceSpec, size_bytes: int, now_s: float) -> QueueFull | ShareExceeded | None:
        """Return the refusal by the first exceeded limit. The tenant's own limits come first."""
        pool = self._pools.get(spec.version_digest)
        share = self._tenants.of(spec.tenant_id)
        queued = 0 if pool is None else len(pool.order)
        limits = self._limits
        if share.count >= limits.max_per_tenant:
            what, most = f"{share.count} placements", limits.max_per_tenant
        elif share.size_bytes + size_bytes > limits.max_bytes_per_tenant:
            what, most = f"{share.size_bytes} bytes of placements", limits.max_bytes_per_tenant
        elif queued >= limits.max_per_pool:
            what, most = f"the queue of {spec.model} is full, with {queued} placements", 0
        elif len(self._items) >= limits.max_total:
            what, most = f"the scheduler's queues are full, with {len(self._items)} placements", 0
        else:
            return None
        later_s = self.later_s(spec, now_s)
        if most:
            return share_full(what, most, model=spec.model, retry_after_s=later_s)
        return queue_full(what, model=spec.model, retry_after_s=later_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when an entry is in one index only or a share is miscounted."""
        queued = [item for pool in self._pools.values() for item in pool.order.items()]
        assert len(queued) == len(self._items) == sum(len(pool.order) for pool in self._pools.values())
        assert all(self._items[item.session, item.placement_id] is item for item in queued)
        assert len(self._items) <= len(self._deadlines), "a placement has no deadline"
        self._tenants.check_integrity(queued)
        assert all(item.bypassed <= self._order.max_bypasses for item in queued), "bypassed too often"
        for pool in self._pools.values():
            pool.check_integrity()

    def _pool_for(self, digest: str) -> Pool:
        pool = self._pools.get(digest)
        if pool is None or not len(pool.order):
            order = self._discipline.order(self._order, self._ledger.shares(digest))
            pool = self._pools[digest] = Pool(order, DrainRate() if pool is None else pool.rate)
        return pool
