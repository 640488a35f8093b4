"""Which cached block is evicted first when KV is short.

Greedy-Dual with frequency (GDSF: Cherkasova, HP Labs 1998; Young, 1994): a released block stays
until its deadline, ``now + value``, and the earliest deadline is evicted. Time counts evictions, so that one
turnover of the pool is as many as it has blocks. The value is what the block costs to compute again
times how often it was requested before, in turnovers. A block requested once
has a sixteenth, and its eviction counts as much: such blocks are evicted in the order of their last use, and
a flood of unrepeated prompts evicts itself.

A block costs the dense part of the model, the same at every position, and attention over what is before it,
which grows with the position. Only leaves are candidates: the end of a chain goes before its beginning.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from services.worker.engine.prefix.cached_blocks import CachedBlocks

MOST: Final = 15  # requests; more count as these
_FULL: Final = 2 * MOST
_HALVED: Final = bytes(count // 2 for count in range(256))
_COLUMNS_PER_REQUEST: Final = 8  # columns at which at most one in fifty names is counted only by collision


class FrequencySketch:
    """How often names were requested lately: a count-min sketch that is halved from time to time (TinyLFU,
    Einziger et al., ACM TOS 2017).

    Two bytes for each of ``8 * history`` columns; after ``history`` requests every count is halved. Names are
    hashes already, so their bits are the positions. A request counts two, so that a name requested once
    outlives one halving.
    """

    def __init__(self, history: int) -> None:
        self._history = max(1, history)
        columns = 1 << (_COLUMNS_PER_REQUEST * self._history - 1).bit_length()
        self._mask = columns - 1
        self._low = bytearray(columns)
        self._high = bytearray(columns)
        self._requests = 0

    def count(self, name: int) -> int:
        """Count one request; return how often the name was requested, this one included."""
        mask, low, high = self._mask, self._low, self._high
        left, right = name & mask, (name >> 32) & mask
        first, second = low[left], high[right]
        least = min(first, second)
        if least < _FULL:  # the larger of the two counts another name as well: it stays (conservative update)
            if first == least:
                low[left] = least + 2
            if second == least:
                high[right] = least + 2
            least += 2
        self._requests += 1
        if self._requests >= self._history:
            self._halve()
        return (least + 1) // 2

    def requests(self, name: int) -> int:
        """Return how often the name was requested lately; halvings are the only cause of an underestimate."""
        return (min(self._low[name & self._mask], self._high[(name >> 32) & self._mask]) + 1) // 2

    def _halve(self) -> None:
        self._low = self._low.translate(_HALVED)
        self._high = self._high.translate(_HALVED)
        self._requests = 0


STALE_TURNOVERS: Final = 4
_UNITS: Final = 16  # units that an eviction and the cost of a first block are counted in
_SLACK: Final = 64  # entries by which a heap may exceed twice what it stands for


@dataclass(frozen=True, slots=True)
class EvictionLimits:
    """``domain_ratio`` of the pool is a domain's share: beyond it, its own blocks go first.

    ``attention_half_tokens`` is the position at which attention costs as much as the rest of the model.
    """

    domain_ratio: float = 0.5
    attention_half_tokens: int = 16_384

    def __post_init__(self) -> None:
        if not 0.0 < self.domain_ratio <= 1.0 or self.attention_half_tokens < 1:
            raise ValueError(f"{self} are no limits")


@dataclass(slots=True)
class _Domain:
    blocks: int = 0  # cached ones, held or not
    heap: list[tuple[int, int]] = field(default_factory=list)  # (deadline, block); some are out of date


class EvictionOrder:
    """Leaves in the order of their deadlines, over all domains and of each. O(log n) a leaf.

    A heap has an entry for each time that a block became a leaf; those out of date are dropped when they
    come up, or when they are more than the others.
    """

    def __init__(self, cached: CachedBlocks, limits: EvictionLimits, *, blocks: int, block_size: int) -> None:
        self._cached = cached
        self._half = max(1, limits.attention_half_tokens // block_size)  # blocks
        self._ratio = limits.domain_ratio
        self._heap: list[tuple[int, int]] = []
        self._domains: dict[int, _Domain] = {}  # domains by root
        self._beyond: dict[int, None] = {}  # domains beyond their share
        self._deadline = array("q")
        self._let_go = array("q")  # time at which each block lost its last holder
        self._now = 0  # evictions, in units
        self._idle_since = array("q")  # the same as a plain count
        self._evictions = 0
        self._blocks = 0
        self.resize(blocks)

    def resize(self, blocks: int) -> None:
        """The pool has that many blocks."""
        for column in (self._deadline, self._let_go, self._idle_since):
            if blocks < len(column):
                del column[blocks:]
            else:
                column.frombytes(bytes(8 * (blocks - len(column))))
        self._blocks = blocks
        self._share = int(self._ratio * blocks)
        self._beyond = {root: None for root, each in self._domains.items() if each.blocks > self._share}

    def entered(self, block: int) -> None:
        """A block came into the cache."""
        root = self._cached.root[block]
        domain = self._domains.get(root)
        if domain is None:
            domain = self._domains[root] = _Domain()
        domain.blocks += 1
        if domain.blocks > self._share:
            self._beyond[root] = None

    def left(self, block: int) -> None:
        """A block is cached no more."""
        root = self._cached.root[block]
        domain = self._domains[root]
        domain.blocks -= 1
        if domain.blocks <= self._share:
            self._beyond.pop(root, None)
        if not domain.blocks:
            del self._domains[root]

    def let_go(self, block: int) -> None:
        """A block lost its last holder."""
        self._let_go[block] = self._now
        self._idle_since[block] = self._evictions

    def add(self, block: int) -> None:
        """A block became a leaf without a holder."""
        self._deadline[block] = deadline = self._let_go[block] + self._value(block)
        domain = self._domains[self._cached.root[block]]
        heappush(self._heap, (deadline, block))
        heappush(domain.heap, (deadline, block))
        if len(self._heap) > 2 * len(self._cached) + _SLACK:
            self._heap = self._current(self._heap)
        if len(domain.heap) > 2 * domain.blocks + _SLACK:
            domain.heap = self._current(domain.heap)

    def next(self) -> int:
        """Return the leaf that goes next, and count its eviction. There is one."""
        first = self._first(self._heap, None)
        assert first is not None, "no leaf is idle"
        stale = self._evictions - self._idle_since[first] > STALE_TURNOVERS * self._blocks
        for root in self._beyond if not stale else ():
            own = self._first(self._domains[root].heap, root)
            if own is not None:
                first = own
                break
        self._now += _UNITS if self._cached.requests[first] > 1 else 1
        self._evictions += 1
        return first

    def next_of(self, root: int) -> int | None:
        """Return the leaf of a domain that goes next, None without one."""
        domain = self._domains.get(root)
        return None if domain is None else self._first(domain.heap, root)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every idle leaf is a candidate and the shares are counted."""
        counted: dict[int, int] = {}
        for block in self._cached.cached():
            root = self._cached.root[block]
            counted[root] = counted.get(root, 0) + 1
        assert counted == {root: domain.blocks for root, domain in self._domains.items()}, "shares are off"
        assert self._beyond.keys() == {root for root, count in counted.items() if count > self._share}
        leaves = {block for block in self._cached.cached() if self._cached.is_idle_leaf(block)}
        heaps = {entry[1] for entry in self._heap if self._is_current(*entry)}
        assert leaves <= heaps, "an idle leaf would never go"
        own: dict[int, set[int]] = {}
        for block in leaves:
            own.setdefault(self._cached.root[block], set()).add(block)
        for root, domain in self._domains.items():
            candidates = {block for _, block in domain.heap}
            assert own.get(root, set()) <= candidates, "an idle leaf is not in its domain"

    def _value(self, block: int) -> int:
        """Return the evictions that a block outlives, in units: cost times earlier requests, in turnovers."""
        cost = _UNITS + _UNITS * self._cached.depth[block] // self._half
        before = min(self._cached.requests[block], MOST) - 1
        return self._blocks * cost * (_UNITS * before if before > 0 else 1) // _UNITS

    def _first(self, heap: list[tuple[int, int]], root: int | None) -> int | None:
        while heap:
            deadline, block = heap[0]
            if self._is_current(deadline, block) and root in (None, self._cached.root[block]):
                return block
            heappop(heap)
        return None

    def _current(self, heap: list[tuple[int, int]]) -> list[tuple[int, int]]:
        entries = list({entry: None for entry in heap if self._is_current(*entry)})
        heapify(entries)
        return entries

    def _is_current(self, deadline: int, block: int) -> bool:
        return block < self._blocks and self._deadline[block] == deadline and self._cached.is_idle_leaf(block)
