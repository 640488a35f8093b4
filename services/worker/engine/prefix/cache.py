"""KV of earlier sequences, by the tokens that it belongs to.

A whole block is keyed by its prefix (automatic prefix caching of vLLM, RadixAttention of SGLang): where it
ends a prefix block of ``core.prefix`` by that one's name, else by the name before it and the tokens since. So
keys are chained to the root of an isolation domain, and no domain finds another's. The gateway
names the prompt's blocks with the secret that roots are keyed by; later blocks are named here.

A cached block has a count of holders. Without one it stays until it is evicted, and counts as free.
A sequence refers to a run of cached blocks at the beginning of its table, the rest is its own. It enters what
it computes of its prompt in the step that does so, and its output when it gives its blocks up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.worker.engine.plan.block_manager import BlockManager, OutOfBlocks
from services.worker.engine.prefix.cached_blocks import NOTHING, CachedBlocks
from services.worker.engine.prefix.eviction import EvictionLimits, EvictionOrder, FrequencySketch
from services.worker.engine.prefix.reuse import Attached, block_key, name_of
from services.worker.engine.sequence import SequenceState


class _Match(NamedTuple):
    """The last of the whole blocks that are there, how many they are, and what is copied after them."""

    last: int
    blocks: int
    copy_from: int | None
    copied_tokens: int


class PrefixCache:
    """Implements ``BlockPool`` and ``PrefixReuse`` over a block manager, which it owns.

    Raises ValueError where KV blocks do not divide a prefix block: nothing could be shared.
    """

    def __init__(self, blocks: BlockManager, limits: EvictionLimits | None = None) -> None:
        size, total = blocks.block_size, blocks.blocks_total
        if PREFIX_BLOCK_TOKENS % size:
            raise ValueError(f"blocks of {size} tokens do not divide prefix blocks")
        self.block_size = size
        self._blocks = blocks
        self._cached = CachedBlocks(total, size)
        limits = limits if limits is not None else EvictionLimits()
        self._order = EvictionOrder(self._cached, limits, blocks=total, block_size=size)
        self._sketch = FrequencySketch(total)
        self._idle: Counter[int] = Counter()  # cached blocks without a holder, by root
        self._idle_total = 0

    # --- BlockPool -----------------------------------------------------------------------------------

    @property
    def blocks_total(self) -> int:
        return self._blocks.blocks_total

    @property
    def blocks_free(self) -> int:
        """Blocks without a holder; cached ones are among them."""
        return self._blocks.blocks_free + self._idle_total

    @property
    def blocks_used(self) -> int:
        return self._blocks.blocks_used - self._idle_total

    def blocks_for(self, tokens: int) -> int:
        return self._blocks.blocks_for(tokens)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]:
        """See ``BlockManager``; evicts what is lacking. Raises OutOfBlocks."""
        if count > self.blocks_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.blocks_free} free")
        while self._blocks.blocks_free < count:
            self._evict(self._order.next())
        return self._blocks.allocate(count, after=after, expected=expected)

    def release(self, blocks: Iterable[int]) -> None:
        """Let a sequence's table go. What is cached stays; of a chain the end is to go first."""
        cached = self._cached
        own: list[int] = []
        for block in reversed(list(blocks)):
            if cached.is_own(block):
                own.append(block)
            else:
                self._let_go(block)
        self._blocks.release(reversed(own))

    def freed_by(self, tables: Iterable[Sequence[int]], *, kept: Collection[int] = ()) -> int:
        """See ``BlockManager``. A shared block counts once, if only these tables hold it.

        The holders of a block hold what is before it: each chain is walked from its end, with as many holders
        as came that way, up to a block that has others. O(tables + freed blocks).
        """
        cached, blocks = self._cached, self._blocks
        freed = 0
        others: dict[int, int] = {}  # holders besides the counted ones
        for table in tables:
            place = self._shared(table)
            freed += blocks.freed_by([table[place:]])
            holders = 1
            for block in reversed(table[:place]):
                others[block] = others.get(block, cached.refs[block]) - holders
                if others[block] or block in kept:
                    break
                freed += not cached.is_withdrawn(block) or block < blocks.blocks_open
                holders = cached.refs[block]
        return freed

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the books are exactly those of the block tables in ``held``."""
        cached = self._cached
        own: list[int] = []
        references: Counter[int] = Counter()
        for table in held:
            shared = self._shared(table)
            references.update(table[:shared])
            own += table[shared:]
            assert all(not cached.is_own(block) for block in table[:shared]), "a hole in what is shared"
            assert all(cached.is_own(block) for block in table[shared:]), "shared after its own"
        withdrawn = [block for block in references if cached.is_withdrawn(block)]
        here = cached.cached()
        assert all(cached.refs[block] == references[block] for block in [*here, *withdrawn]), (
            "holders are off"
        )
        assert all(block < self._blocks.blocks_open for block in here), "a closed block is cached"
        idle = Counter(cached.root[block] for block in here if not cached.refs[block])
        assert (self._idle, self._idle_total) == (idle, idle.total()), "an idle block is lost"
        self._blocks.check_integrity([own, here, withdrawn])
        cached.check_integrity()
        self._order.check_integrity()

    def idle_of(self, roots: Iterable[int]) -> int:
        """See ``BlockManager``."""
        return sum(self._idle[root] for root in roots)

    def evict_of(self, roots: Iterable[int], count: int) -> int:
        """See ``BlockManager``. In each domain those go first that eviction would take first."""
        evicted = 0
        for root in roots:
            while evicted < count and (block := self._order.next_of(root)) is not None:
                self._evict(block)
                evicted += 1
        return evicted

    # --- slabs ---------------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """See ``BlockManager``."""
        return self._blocks.is_closing

    def holds_closed(self, table: Sequence[int]) -> bool:
        """See ``BlockManager``."""
        return self._blocks.holds_closed(table)

    def grow(self, blocks: int) -> None:
        """See ``BlockManager``."""
        self._blocks.grow(blocks)
        self._resize()

    def shrink(self, blocks: int) -> int:
        """See ``BlockManager``. What is cached of the closed blocks can no longer be found."""
        self._blocks.close(blocks)
        self._withdraw(range(self._blocks.blocks_open, self.blocks_total))
        return self.drain()

    def drain(self) -> int:
        """See ``BlockManager``."""
        given = self._blocks.drain()
        if given:
            self._resize()
        return given

    # --- PrefixReuse ---------------------------------------------------------------------------------

    def reusable(self, sequence: SequenceState) -> tuple[int, int]:
        match = self._match(sequence)
        return match.blocks * self.block_size + match.copied_tokens, self._held(sequence, match)

    def found(self, sequence: SequenceState) -> list[int]:
        return self._cached.path(self._match(sequence).last)

    def attach(self, sequence: SequenceState) -> Attached:
        match = self._match(sequence)
        blocks = self._cached.path(match.last)
        for block in blocks:
            self._hold(block)
        self._count_requests(sequence, blocks)
        return Attached(blocks, match.blocks * self.block_size + match.copied_tokens, match.copy_from)

    def advance(self, sequence: SequenceState) -> None:
        table, size = sequence.blocks, self.block_size
        place = sequence.computed // size
        most = (len(sequence.tokens) - 1) // size
        if place >= most or not sequence.prefix_names or not self._continues(table, place):
            return
        first = place
        while (
            place < most
            and (block := self._cached.find(block_key(sequence, place, self.block_size))) is not None
        ):
            self._share(table, place, block)
            place += 1
        if place == first:
            return
        began = sequence.computed > sequence.cached
        sequence.computed = place * size
        if not began:
            sequence.cached = sequence.computed
        _moved(sequence)

    def next_name(self, sequence: SequenceState) -> int | None:
        place = sequence.computed // PREFIX_BLOCK_TOKENS + 1
        if not sequence.prefix_names or place * PREFIX_BLOCK_TOKENS > len(sequence.tokens):
            return None
        if not self._continues(sequence.blocks, sequence.computed // self.block_size):
            return None  # what it computes is not entered: who waited for it would wait for nothing
        return name_of(sequence, place)

    def publish(self, sequence: SequenceState) -> None:
        table = sequence.blocks
        whole = sequence.computed // self.block_size
        first = self._shared(table) if sequence.prefix_names else whole
        if first >= whole or not self._continues(table, first):
            return
        shares = False
        for place in range(first, whole):
            key = block_key(sequence, place, self.block_size)
            block = self._cached.find(key)
            if block is not None:
                self._share(table, place, block)
                shares = True
            elif table[place] < self._blocks.blocks_open:
                self._enter(sequence, place, key)
            else:
                break
        if shares:
            _moved(sequence)

    def retain(self, sequence: SequenceState) -> None:
        self.publish(sequence)
        place, rest = divmod(sequence.computed, self.block_size)
        table = sequence.blocks
        if not rest or not sequence.prefix_names or not self._continues(table, place):
            return
        block, parent, root = table[place], table[place - 1] if place else NOTHING, sequence.prefix_names[0]
        if block >= self._blocks.blocks_open:
            return
        tokens = list(sequence.tokens[place * self.block_size : sequence.computed])
        earlier = self._cached.tail(parent, root)
        if earlier is not None:
            if earlier.tokens[:rest] == tokens:
                return
            self._evict(earlier.block)
        self._cached.enter_tail(block, tokens, parent=parent, root=root)
        self._cached.requests[block] = 1
        self._order.entered(block)
        self._hold(block, is_new=True)

    def discard(self, sequence: SequenceState) -> None:
        table, first = sequence.blocks, sequence.cached // self.block_size
        self._withdraw(frozenset(table[first : self._shared(table)]))
        sequence.prefix_names = []

    def clear(self) -> None:
        self._withdraw(frozenset(self._cached.cached()))
        assert not self._idle_total, "a sequence holds a block"

    def take_changes(self) -> tuple[list[int], list[int]]:
        return self._cached.take_changes()

    def names(self) -> list[int]:
        """Return the names of the prefix blocks that are here."""
        return self._cached.names()

    # --- looking up ----------------------------------------------------------------------------------

    def _match(self, sequence: SequenceState) -> _Match:
        """Return what is there of all but the last token."""
        if not sequence.prefix_names:
            return _Match(NOTHING, 0, None, 0)
        find, size = self._cached.find, self.block_size
        most = (len(sequence.tokens) - 1) // size
        each = PREFIX_BLOCK_TOKENS // size
        # A name is here only if those before it are: as many as the first that is not.
        names = bisect_left(
            range(most // each), True, key=lambda place: find(name_of(sequence, place + 1)) is None
        )
        last, blocks = (find(name_of(sequence, names)), names * each) if names else (NOTHING, 0)
        assert last is not None
        while blocks < most and (block := find(block_key(sequence, blocks, self.block_size))) is not None:
            last = block
            blocks += 1
        return _Match(last, blocks, *self._copyable(sequence, last, blocks))

    def _copyable(self, sequence: SequenceState, last: int, blocks: int) -> tuple[int | None, int]:
        """Return the block that begins as the sequence's next one does, and with how many tokens."""
        size, root = self.block_size, sequence.prefix_names[0]
        start = blocks * size
        most = len(sequence.tokens) - 1 - start
        if most == size - 1:  # The prompt ends with its block, and the last token is computed again.
            whole = self._cached.find(block_key(sequence, blocks, self.block_size))
            if whole is not None:
                return whole, most
        tail = self._cached.tail(last, root)
        if tail is None:
            return None, 0
        same = _same(tail.tokens, sequence.tokens[start : start + min(most, len(tail.tokens))])
        return (tail.block, same) if same else (None, 0)

    def _held(self, sequence: SequenceState, match: _Match) -> int:
        """Return how many blocks of a match have holders: those at its beginning."""
        parent, refs, each = self._cached.parent, self._cached.refs, PREFIX_BLOCK_TOKENS // self.block_size

        def last(place: int) -> int:
            block = self._cached.find(name_of(sequence, place + 1))
            assert block is not None, "a name within a match"
            return block

        names = match.blocks // each
        held = bisect_left(range(names), True, key=lambda place: not refs[last(place)])
        block, count = (last(held), (held + 1) * each) if held < names else (match.last, match.blocks)
        while block >= 0 and not refs[block]:
            block = parent[block]
            count -= 1
        return count

    # --- holders -------------------------------------------------------------------------------------

    def _hold(self, block: int, *, is_new: bool = False) -> None:
        if not is_new and not self._cached.refs[block]:
            self._count_idle(block, -1)
        self._cached.refs[block] += 1

    def _let_go(self, block: int) -> None:
        cached = self._cached
        assert cached.refs[block] > 0, f"block {block} released twice"
        cached.refs[block] -= 1
        if cached.refs[block]:
            return
        if cached.is_withdrawn(block):
            cached.free(block)
            self._blocks.release((block,))
            return
        self._count_idle(block, 1)
        self._order.let_go(block)
        if not cached.children[block]:
            self._order.add(block)

    def _count_idle(self, block: int, change: int) -> None:
        root = self._cached.root[block]
        self._idle[root] += change
        self._idle_total += change
        if not self._idle[root]:
            del self._idle[root]

    def _shared(self, table: Sequence[int]) -> int:
        """Return how many blocks at a table's beginning are the cache's."""
        return bisect_left(table, True, key=self._cached.is_own)

    def _continues(self, table: Sequence[int], place: int) -> bool:
        """Whether what is cached of a table ends right before ``place``, and can be continued."""
        if place and not self._cached.is_whole(table[place - 1]):
            return False
        return self._cached.is_own(table[place])

    def _share(self, table: list[int], place: int, block: int) -> None:
        """Put a cached block in the place of a sequence's own."""
        self._blocks.release((table[place],))
        table[place] = block
        self._hold(block)

    def _enter(self, sequence: SequenceState, place: int, key: int) -> None:
        table = sequence.blocks
        block, parent = table[place], table[place - 1] if place else NOTHING
        self._cached.enter(block, key, parent=parent, root=sequence.prefix_names[0])
        end = place * self.block_size // PREFIX_BLOCK_TOKENS + 1
        name = sequence.prefix_names[end] if end < len(sequence.prefix_names) else key
        self._cached.requests[block] = self._sketch.requests(name)
        self._order.entered(block)
        self._hold(block, is_new=True)

    def _count_requests(self, sequence: SequenceState, blocks: Sequence[int]) -> None:
        """Count a request for the prompt; its cached blocks record the count."""
        if sequence.preemptions or not sequence.prefix_names:
            return
        each, requests = PREFIX_BLOCK_TOKENS // self.block_size, self._cached.requests
        names = len(sequence.tokens) // PREFIX_BLOCK_TOKENS
        for place in range(names):
            count = self._sketch.count(name_of(sequence, place + 1))
            for block in blocks[place * each : (place + 1) * each]:
                requests[block] = count
        for place in range(names * each, len(sequence.tokens) // self.block_size):
            count = self._sketch.count(block_key(sequence, place, self.block_size))
            for block in blocks[place : place + 1]:
                requests[block] = count

    def _evict(self, block: int) -> None:
        self._order.left(block)
        self._count_idle(block, -1)
        parent = self._cached.remove(block)
        self._blocks.release((block,))
        if parent >= 0 and self._cached.is_idle_leaf(parent):
            self._order.add(parent)

    def _withdraw(self, blocks: Collection[int]) -> None:
        """Remove these and their descendants from the index; those without holders are free."""
        cached = self._cached
        doomed = cached.below(blocks)
        idle = [block for block in doomed if not cached.refs[block]]
        parents = {cached.parent[block]: None for block in doomed}
        for block in doomed:
            self._order.left(block)
        cached.withdraw(doomed)
        for block in idle:
            self._count_idle(block, -1)
        self._blocks.release(idle)
        for parent in parents:
            if parent >= 0 and cached.is_idle_leaf(parent):
                self._order.add(parent)

    def _resize(self) -> None:
        self._cached.resize(self.blocks_total)
        self._order.resize(self.blocks_total)


def _same(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens at the beginning of both are the same."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _moved(sequence: SequenceState) -> None:
    """Blocks of its table were exchanged."""
    table = sequence.blocks
    sequence.table_version += 1
    sequence.contiguous = table == list(range(table[0], table[0] + len(table)))
