"""The cached prefix blocks that live sequences of one engine share. Each shared block is held once.

A sequence refers to leading blocks of its prompt. A block with a reference is *held*: the engine retains it
and it counts once. A cached block without a reference is evictable and counts as free. A name stands for a
whole prefix, so a sequence that refers to a block also refers to all blocks before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.worker.kv.prefix_set import PrefixSet

MAX_SHARED: Final = 1024  # blocks reported as shared, per version; the leader counts others as unshared
MAX_USED: Final = 65536  # idle blocks that are recorded as referred to before


class SharedBlocks:
    """References by block name, and their unreported changes. Single writer: the sequence table.

    ``told`` contains held blocks to which more than one sequence referred, at the same time or in turn: most
    prompts end in blocks that no other prompt has. If the KV block size does not divide a prefix block,
    nothing is shared.
    """

    def __init__(self, block_size: int, cached: PrefixSet, *, most: int = MAX_SHARED) -> None:
        self._each = 0 if PREFIX_BLOCK_TOKENS % block_size else PREFIX_BLOCK_TOKENS // block_size
        self._cached = cached
        self._references: dict[int, int] = {}
        self._used: dict[int, None] = {}  # cached, with past references only; the longest idle first
        self.reported = PrefixSet(most=most)

    @property
    def each_blocks(self) -> int:
        """KV blocks per prefix block; 0: nothing is shared."""
        return self._each

    @property
    def blocks(self) -> int:
        """Number of held KV blocks."""
        return len(self._references) * self._each

    def reach(self, chain: Sequence[int], tokens: int) -> int:
        """Return how many leading blocks of the chain are cached, limited to those that ``tokens`` fill."""
        most = min(len(chain), tokens // PREFIX_BLOCK_TOKENS) if self._each else 0
        for place in range(most):
            if chain[place] not in self._references and chain[place] not in self._cached:
                return place
        return most

    def held_blocks(self, names: Iterable[int]) -> int:
        """Return how many KV blocks of the named prefix blocks are held."""
        return sum(name in self._references for name in names) * self._each

    def any_of(self, names: Iterable[int]) -> frozenset[int]:
        """Return the held names."""
        return frozenset(name for name in names if name in self._references)

    def refer(self, names: Sequence[int]) -> None:
        """Add one reference to each block."""
        for name in names:
            count = self._references[name] = self._references.get(name, 0) + 1
            if count == 2 or (count == 1 and name in self._used):
                self.reported.change((name,), ())
            if count == 1:
                self._used.pop(name, None)

    def release(self, names: Sequence[int]) -> None:
        """Remove one reference from each block."""
        for name in reversed(names):
            count = self._references[name] = self._references[name] - 1
            if not count:
                del self._references[name]
                self.reported.change((), (name,))
                self._used[name] = None
        while len(self._used) > MAX_USED:
            del self._used[next(iter(self._used))]

    def forget(self, evicted: Iterable[int]) -> None:
        """Drop the record of evicted blocks, which have no reference."""
        for name in evicted:
            self._used.pop(name, None)

    def check_integrity(self, runs: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the references equal those of the live sequences' runs."""
        counted: dict[int, int] = {}
        for run in runs:
            for name in run:
                counted[name] = counted.get(name, 0) + 1
        assert counted == self._references, "references to shared blocks leaked"
        assert all(name in counted for name in self.reported), "told of what nobody refers to"
        assert not counted.keys() & self._used.keys(), "an idle block is referred to"
