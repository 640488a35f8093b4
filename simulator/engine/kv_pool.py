"""A device's KV by counts: blocks that sequences hold, and prefix blocks that stay behind until evicted.

Blocks have no contents here, so they need no identity: a sequence's own block is ``OWN``, a shared one the
name of its prefix. A prefix block of ``PREFIX_BLOCK_TOKENS`` is several blocks. It belongs to the cache from
the step that computed it, is held while a sequence uses it, and is free otherwise: evicted, least recently
used first, when blocks are needed. The end of a prefix is older than its beginning, since it is of no use
without. Output is cached when its sequence gives its blocks up, not block by block.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from services.core.prefix import PREFIX_BLOCK_TOKENS, extend
from services.worker.engine.plan.block_manager import OutOfBlocks
from services.worker.engine.prefix.reuse import Attached
from services.worker.engine.sequence import SequenceState

OWN: Final = 0  # prefixes are never named so


class SimKvPool:
    """Implements ``BlockPool`` and ``PrefixReuse``. ``cache`` false: no prefix is ever found."""

    def __init__(self, blocks_total: int, block_size: int, *, cache: bool = True) -> None:
        if blocks_total < 1 or block_size < 1 or (cache and PREFIX_BLOCK_TOKENS % block_size):
            raise ValueError(f"{blocks_total} blocks of {block_size} tokens are no pool")
        self.blocks_total = blocks_total
        self.blocks_open = blocks_total  # fewer while the pool shrinks
        self.block_size = block_size
        self._cache = cache
        self._each = PREFIX_BLOCK_TOKENS // block_size if cache else 1  # blocks of a prefix block
        self._own = 0
        self._holders: dict[int, int] = {}  # number of holders of each cached prefix block, by name
        self._idle: dict[int, None] = {}  # blocks without holders, least recently used first
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    # --- BlockPool ----------------------------------------------------------------------------------

    @property
    def blocks_free(self) -> int:
        """Blocks without a holder, blocks of idle prefixes included."""
        return max(0, self.blocks_open - self.blocks_used)

    @property
    def blocks_used(self) -> int:
        return self._own + (len(self._holders) - len(self._idle)) * self._each

    @property
    def prefix_blocks(self) -> int:
        """Prefix blocks that are here, held or idle."""
        return len(self._holders)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]:
        if count > self.blocks_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.blocks_free} free")
        self._own += count
        self._evict_beyond(self.blocks_open)
        return [OWN] * count

    def release(self, blocks: Iterable[int]) -> None:
        held = blocks if isinstance(blocks, list) else list(blocks)
        own = held.count(OWN)
        self._own -= own
        assert self._own >= 0, "blocks released twice"
        # The end first: it is to be evicted before what comes before it.
        for index in range(len(held) - own - self._each, -1, -self._each):
            self._let_go(held[index])

    def freed_by(self, tables: Iterable[Sequence[int]], *, kept: Collection[int] = ()) -> int:
        """See ``BlockManager``. A prefix that only these tables hold counts once."""
        own, counted = 0, Counter[int]()
        for table in tables:
            of_table = table.count(OWN)
            own += of_table
            counted.update(table[: len(table) - of_table : self._each])
        gone = (name for name, count in counted.items() if count == self._holders[name] and name not in kept)
        return own + self._each * sum(1 for _ in gone)

    @property
    def is_closing(self) -> bool:
        """See ``BlockManager``."""
        return self.blocks_open < self.blocks_total

    def holds_closed(self, table: Sequence[int]) -> bool:
        """See ``BlockManager``. Closed blocks are not recorded: any holder may be preempted."""
        return self.is_closing and bool(table)

    def grow(self, blocks: int) -> None:
        """See ``BlockManager``."""
        self.blocks_total = self.blocks_open = self.blocks_total + blocks

    def shrink(self, blocks: int) -> int:
        """See ``BlockManager``."""
        self.blocks_open = min(self.blocks_open, max(1, self.blocks_total - blocks))
        return self.drain()

    def drain(self) -> int:
        """See ``BlockManager``."""
        self._evict_beyond(self.blocks_open)
        held = self._own + len(self._holders) * self._each
        given = self.blocks_total - max(self.blocks_open, held)
        self.blocks_total -= given
        return given

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the accounting matches exactly the block tables in ``held``."""
        counted = Counter(name for table in held for name in table)
        assert self._own == counted.pop(OWN, 0), "own blocks leaked"
        assert counted == {name: n * self._each for name, n in self._holders.items() if n}, "holders are off"
        assert list(self._idle) == [name for name in self._idle if not self._holders[name]]
        assert len(self._idle) == sum(not n for n in self._holders.values()), "an idle prefix is lost"
        assert self._own + len(self._holders) * self._each <= self.blocks_total, "more blocks than there are"

    # --- PrefixReuse --------------------------------------------------------------------------------

    def reusable(self, sequence: SequenceState) -> tuple[int, int]:
        names = self._found(sequence)
        shared = sum(self._holders[name] > 0 for name in names)
        return len(names) * PREFIX_BLOCK_TOKENS, shared * self._each

    def found(self, sequence: SequenceState) -> list[int]:
        return [name for name in self._found(sequence) for _ in range(self._each)]

    def attach(self, sequence: SequenceState) -> Attached:
        blocks: list[int] = []
        for name in self._found(sequence):
            self._hold(name)
            blocks += [name] * self._each
        return Attached(blocks, len(blocks) * self.block_size)

    def advance(self, sequence: SequenceState) -> None:
        chain, most = sequence.prefix_names, (len(sequence.tokens) - 1) // PREFIX_BLOCK_TOKENS
        first = place = sequence.computed // PREFIX_BLOCK_TOKENS
        if place != self._shared(sequence):
            return
        while place < min(most, len(chain) - 1) and chain[place + 1] in self._holders:
            self._share(sequence, place)
            place += 1
        if place > first:
            began = sequence.computed > sequence.cached
            sequence.computed = place * PREFIX_BLOCK_TOKENS
            sequence.cached = sequence.cached if began else sequence.computed

    def next_name(self, sequence: SequenceState) -> int | None:
        place = sequence.computed // PREFIX_BLOCK_TOKENS + 1
        return sequence.prefix_names[place] if self._cache and place < len(sequence.prefix_names) else None

    def publish(self, sequence: SequenceState) -> None:
        whole = sequence.computed // PREFIX_BLOCK_TOKENS
        for place in range(self._shared(sequence), min(whole, len(sequence.prefix_names) - 1)):
            if (name := sequence.prefix_names[place + 1]) not in self._holders:
                self._add(name)
            self._share(sequence, place)

    def retain(self, sequence: SequenceState) -> None:
        if self._cache and sequence.prefix_names:
            _continue(sequence, sequence.computed // PREFIX_BLOCK_TOKENS)
            self.publish(sequence)

    def discard(self, sequence: SequenceState) -> None:
        """Nothing is wrong where nothing is computed."""

    def take_changes(self) -> tuple[list[int], list[int]]:
        """See ``PrefixReuse``."""
        if not (self._added or self._removed):
            return [], []
        added, removed = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return added, removed

    def _found(self, sequence: SequenceState) -> list[int]:
        if not self._cache:
            return []
        most = (len(sequence.tokens) - 1) // PREFIX_BLOCK_TOKENS  # the last token is always computed
        found: list[int] = []
        for name in sequence.prefix_names[1 : most + 1]:
            if name not in self._holders:
                break
            found.append(name)
        return found

    def _shared(self, sequence: SequenceState) -> int:
        """Return how many prefix blocks of a table are the cache's; of no cache, all that there could be."""
        if not self._cache:
            return len(sequence.prefix_names)
        return (len(sequence.blocks) - sequence.blocks.count(OWN)) // self._each

    def _share(self, sequence: SequenceState, place: int) -> None:
        """Put a prefix block that is here in the place of a sequence's own."""
        name, each = sequence.prefix_names[place + 1], self._each
        self._hold(name)
        self._own -= each
        sequence.blocks[place * each : (place + 1) * each] = [name] * each
        sequence.table_version += 1

    def _add(self, name: int) -> None:
        self._holders[name] = 0
        self._idle[name] = None
        self._added[name] = None

    def _hold(self, name: int) -> None:
        if not self._holders[name]:
            del self._idle[name]
        self._holders[name] += 1

    def _let_go(self, name: int) -> None:
        assert self._holders[name] > 0, "a prefix block released twice"
        self._holders[name] -= 1
        if not self._holders[name]:
            self._idle[name] = None

    def _evict_beyond(self, blocks: int) -> None:
        """Evict blocks without a holder until the pool holds so many blocks."""
        while self._idle and self._own + len(self._holders) * self._each > blocks:
            self._evict()

    def _evict(self) -> None:
        name = next(iter(self._idle))
        del self._idle[name]
        del self._holders[name]
        if name in self._added:
            del self._added[name]
        else:
            self._removed[name] = None


def _continue(sequence: SequenceState, whole: int) -> None:
    """Extend the chain over the whole blocks that the prompt's names do not reach."""
    chain = sequence.prefix_names
    for index in range(len(chain) - 1, whole):
        start = index * PREFIX_BLOCK_TOKENS
        block = array("I", sequence.tokens[start : start + PREFIX_BLOCK_TOKENS])
        chain.append(extend(chain[-1], block.tobytes()))
