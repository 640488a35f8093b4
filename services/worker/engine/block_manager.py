"""Paged KV blocks (PagedAttention, SOSP'23).

A block is an index into the KV pool; whether it is held is known here, what it contains is the executor's.
Placement is next-fit and prefers the block after the last one: most sequences then lie in one run of
consecutive blocks, which attention reads as a view instead of gathering it. Nothing depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol


class OutOfBlocks(Exception):
    """More blocks were asked for than are free; nothing was allocated."""


class BlockPool(Protocol):
    """What the planner needs of a pool. ``BlockManager`` says what each part holds."""

    @property
    def block_size(self) -> int: ...

    @property
    def blocks_free(self) -> int: ...

    @property
    def blocks_used(self) -> int: ...

    def blocks_for(self, tokens: int) -> int: ...

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]: ...

    def release(self, blocks: Iterable[int]) -> None: ...

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None: ...


class BlockManager:
    def __init__(self, blocks_total: int, block_size: int) -> None:
        if blocks_total < 1 or block_size < 1:
            raise ValueError(f"{blocks_total} blocks of {block_size} tokens are no pool")
        self.blocks_total = blocks_total
        self.block_size = block_size
        self.blocks_free = blocks_total
        self._used = bytearray(blocks_total)  # 1 where held; a byte map is searched at memchr speed
        self._cursor = 0  # where the search for a new run starts

    @property
    def blocks_used(self) -> int:
        return self.blocks_total - self.blocks_free

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]:
        """Return ``count`` blocks that nobody holds, in the order they are to be used.

        ``after`` is the block that the first one should follow; without it a new run is placed where
        ``expected`` blocks are free in a row, so that the sequence can grow. Raises OutOfBlocks.
        """
        if count > self.blocks_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.blocks_free} free")
        start = self._run_after(after, count) if after is not None else self._new_run(count, expected)
        blocks = list(range(start, start + count)) if start >= 0 else self._scattered(count)
        for block in blocks:
            self._used[block] = 1
        self.blocks_free -= count
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Free each of the blocks."""
        for block in blocks:
            assert self._used[block], f"block {block} released twice"
            self._used[block] = 0
            self.blocks_free += 1

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the blocks in use are those of the tables in ``held``, each of one."""
        expected = Counter(block for table in held for block in table)
        for block, used in enumerate(self._used):
            assert used == expected[block], f"block {block}: in use {used}, {expected[block]} holders"
        assert self.blocks_free == self.blocks_total - len(expected), "the free count is off"

    def _run_after(self, last: int, count: int) -> int:
        """Return the block after ``last`` if a run starts there, else -1 as ``bytearray.find`` does."""
        return self._used.find(bytes(count), last + 1, last + 1 + count)

    def _new_run(self, count: int, expected: int) -> int:
        for length in (max(count, expected), count):
            run = bytes(length)
            start = self._used.find(run, self._cursor)
            if start < 0:
                start = self._used.find(run)
            if start >= 0:
                self._cursor = start + length
                return start
        return -1

    def _scattered(self, count: int) -> list[int]:
        blocks: list[int] = []
        start = 0
        for _ in range(count):
            block = self._used.find(0, start)
            blocks.append(block)
            start = block + 1
        return blocks
