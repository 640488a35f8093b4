"""Paged KV blocks (PagedAttention, SOSP'23).

A block is an index into the KV pool; this module tracks its holders, the executor its content.
Placement is next-fit and prefers the block after the last one: most sequences then lie in one run of
consecutive blocks, which attention reads as a view instead of gathering it. Nothing depends on it.

The pool grows and shrinks at its end. Blocks to be returned are *closed*: their holders keep
them, no sequence receives one, and free ones at the end are returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Protocol

from services.worker.engine.sequence import SequenceState

_FREE: Final = 0  # values of the byte map, which is searched at memchr speed
_HELD: Final = 1
_CLOSED: Final = 2  # free, and not to be allocated


class OutOfBlocks(Exception):
    """More blocks were requested than are free; nothing was allocated."""


class BlockPool(Protocol):
    """What the planner needs of a pool. ``BlockManager`` documents each part."""

    @property
    def block_size(self) -> int: ...

    @property
    def blocks_total(self) -> int: ...

    @property
    def is_closing(self) -> bool: ...

    @property
    def blocks_free(self) -> int: ...

    @property
    def blocks_used(self) -> int: ...

    def blocks_for(self, tokens: int) -> int: ...

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]: ...

    def release(self, blocks: Iterable[int]) -> None: ...

    def freed_by(self, tables: Iterable[Sequence[int]], *, kept: Collection[int] = ()) -> int: ...

    def idle_of(self, roots: Iterable[int]) -> int: ...

    def evict_of(self, roots: Iterable[int], count: int) -> int: ...

    def holds_closed(self, table: Sequence[int]) -> bool: ...

    def grow(self, blocks: int) -> None: ...

    def shrink(self, blocks: int) -> int: ...

    def drain(self) -> int: ...

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None: ...


class BlockManager:
    def __init__(self, blocks_total: int, block_size: int, *, least_blocks: int = 1) -> None:
        """``least_blocks`` are never given back: what one sequence may need."""
        if blocks_total < 1 or block_size < 1:
            raise ValueError(f"{blocks_total} blocks of {block_size} tokens are no pool")
        self.blocks_total = blocks_total
        self.block_size = block_size
        self.blocks_free = blocks_total
        self.blocks_open = blocks_total  # first closed block
        self._least = min(least_blocks, blocks_total)
        self._state = bytearray(blocks_total)
        self._closed_free = 0
        self._cursor = 0  # start of the search for a new run

    @property
    def blocks_used(self) -> int:
        return self.blocks_total - self.blocks_free - self._closed_free

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]:
        """Return ``count`` blocks without a holder, in the order of their use.

        ``after`` is the block that the first one should follow; without it, or where that one is taken, a new
        run is placed where ``expected`` blocks are free in a row, so that the sequence can grow. Raises
        OutOfBlocks.
        """
        if count > self.blocks_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.blocks_free} free")
        start = self._run_after(after, count) if after is not None else -1
        if start < 0 and (after is None or expected):
            start = self._new_run(count, expected)
        blocks = list(range(start, start + count)) if start >= 0 else self._scattered(count)
        for block in blocks:
            self._state[block] = _HELD
        self.blocks_free -= count
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Free each of the blocks."""
        state, opened = self._state, self.blocks_open
        for block in blocks:
            assert state[block] == _HELD, f"block {block} released twice"
            if block < opened:
                state[block] = _FREE
                self.blocks_free += 1
            else:
                state[block] = _CLOSED
                self._closed_free += 1

    def freed_by(self, tables: Iterable[Sequence[int]], *, kept: Collection[int] = ()) -> int:
        """Return how many more blocks would be free without these tables, those in ``kept`` left out."""
        if self.blocks_open == self.blocks_total and not kept:
            return sum(map(len, tables))
        return sum(block < self.blocks_open and block not in kept for table in tables for block in table)

    def idle_of(self, roots: Iterable[int]) -> int:
        """Return how many blocks are cached in the domains of these roots without a holder."""
        return 0

    def evict_of(self, roots: Iterable[int], count: int) -> int:
        """Evict up to ``count`` of the blocks of ``idle_of``; return how many went."""
        return 0

    # --- slabs ---------------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """Whether closed blocks are still held."""
        return self.blocks_open < self.blocks_total

    def holds_closed(self, table: Sequence[int]) -> bool:
        """Whether one of the blocks is closed."""
        return bool(table) and max(table) >= self.blocks_open

    def grow(self, blocks: int) -> None:
        """Have ``blocks`` more at the end; a shrink in progress is over, and what it closed is open."""
        self._state = self._state.replace(bytes((_CLOSED,)), bytes((_FREE,)))
        self._state += bytes(blocks)
        self.blocks_free += self._closed_free + blocks
        self._closed_free = 0
        self.blocks_total = self.blocks_open = self.blocks_total + blocks

    def close(self, blocks: int) -> None:
        """Close the last ``blocks`` of the pool, down to ``least_blocks``; what was closed stays so."""
        opened = min(self.blocks_open, max(self._least, self.blocks_total - blocks))
        tail = self._state[opened : self.blocks_open]
        free = tail.count(_FREE)
        self._state[opened : self.blocks_open] = tail.replace(bytes((_FREE,)), bytes((_CLOSED,)))
        self.blocks_open = opened
        self.blocks_free -= free
        self._closed_free += free

    def drain(self) -> int:
        """Give back the closed blocks after the last one that is held; return how many."""
        given = len(self._state) - len(self._state.rstrip(bytes((_CLOSED,))))
        if given:
            del self._state[-given:]
            self.blocks_total -= given
            self._closed_free -= given
            self.blocks_open = min(self.blocks_open, self.blocks_total)
        return given

    def shrink(self, blocks: int) -> int:
        """Close that many and give back what is free of them at the end; return how many those are.

        The rest follows by ``drain`` as its holders let it go.
        """
        self.close(blocks)
        return self.drain()

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the blocks in use are those of the tables in ``held``, each of one."""
        expected = Counter(block for table in held for block in table)
        for block, state in enumerate(self._state):
            used = state == _HELD
            assert used == expected[block], f"block {block}: in use {used}, {expected[block]} holders"
            assert used or (state == _CLOSED) == (block >= self.blocks_open), f"block {block} is lost"
        assert len(self._state) == self.blocks_total >= self.blocks_open >= self._least, "the size is off"
        assert self.blocks_used == len(expected), "the free count is off"
        assert self._closed_free == self._state.count(_CLOSED), "the closed count is off"

    # --- placement -----------------------------------------------------------------------------------

    def _run_after(self, last: int, count: int) -> int:
        """Return the block after ``last`` if a run starts there, else -1 as ``bytearray.find`` does."""
        return self._state.find(bytes(count), last + 1, last + 1 + count)

    def _new_run(self, count: int, expected: int) -> int:
        for length in (max(count, expected), count):
            if length > self.blocks_free:
                continue  # The search would walk all of a full pool for nothing.
            run = bytes(length)
            start = self._state.find(run, self._cursor)
            if start < 0:
                start = self._state.find(run)
            if start >= 0:
                self._cursor = start + length
                return start
        return -1

    def _scattered(self, count: int) -> list[int]:
        blocks: list[int] = []
        start = 0
        for _ in range(count):
            block = self._state.find(_FREE, start)
            blocks.append(block)
            start = block + 1
        return blocks


def extend(sequence: SequenceState, count: int, pool: BlockPool) -> None:
    """Give the sequence ``count`` blocks more, which are free; after its last one where that can be."""
    held = sequence.blocks
    last = held[-1] if held else None
    most = pool.blocks_for(sequence.prompt_tokens + sequence.limits.max_tokens)
    expected = 0 if sequence.capacity else most - len(held)  # it starts: all that it may come to need
    added = pool.allocate(count, after=last, expected=expected)
    runs = added[-1] - added[0] == count - 1 and (last is None or added[0] == last + 1)
    sequence.contiguous = runs and (last is None or sequence.contiguous)
    held += added
    sequence.table_version += 1
    sequence.capacity = len(held) * pool.block_size


def cut(sequence: SequenceState, pool: BlockPool) -> None:
    """Free the blocks beyond its computed tokens."""
    blocks = sequence.blocks
    kept = pool.blocks_for(sequence.computed)
    if kept < len(blocks):
        pool.release(blocks[kept:])
        del blocks[kept:]
        sequence.table_version += 1
        sequence.capacity = kept * pool.block_size
        sequence.contiguous = blocks == list(range(blocks[0], blocks[0] + kept))


def clear(sequence: SequenceState, pool: BlockPool) -> None:
    """Free all of its blocks: nothing of it is computed."""
    pool.release(sequence.blocks)
    sequence.blocks.clear()
    sequence.table_version += 1
    sequence.capacity = 0
    sequence.computed = 0
    sequence.cached = 0
