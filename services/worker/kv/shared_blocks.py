"""Which cached prefix blocks the live sequences of one engine share: each is held once, whoever refers to it.

A sequence refers to leading blocks of its prompt. A block that anybody refers to is *held*: the engine
keeps it, and it counts once. A cached block that nobody refers to is evictable: it counts as free until
somebody does. Since a name stands for a whole prefix, whoever refers to a block refers to all before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.worker.kv.prefix_set import PrefixSet

MAX_SHARED: Final = 1024  # blocks of one version that the leader is told of; more count as nobody's
MAX_USED: Final = 65536  # idle blocks that are known to have been of use once


class SharedBlocks:
    """References by name, and what the leader was not told of them yet. Single writer: the sequence table.

    ``told`` are held blocks that more than one sequence referred to, at a time or one after another: most
    prompts end in blocks that are of use to nobody else. Where KV blocks do not divide a prefix block,
    nothing is shared.
    """

    def __init__(self, block_size: int, cached: PrefixSet, *, most: int = MAX_SHARED) -> None:
        self._each = 0 if PREFIX_BLOCK_TOKENS % block_size else PREFIX_BLOCK_TOKENS // block_size
        self._cached = cached
        self._references: dict[int, int] = {}
        self._used: dict[int, None] = {}  # cached, referred to once and no more, the longest idle first
        self.told = PrefixSet(most=most)

    @property
    def each_blocks(self) -> int:
        """KV blocks of one prefix block."""
        return self._each

    @property
    def blocks(self) -> int:
        """KV blocks that are held."""
        return len(self._references) * self._each

    def reach(self, chain: Sequence[int], tokens: int) -> int:
        """Return how many leading blocks of the chain are cached, among those that ``tokens`` fill."""
        most = min(len(chain), tokens // PREFIX_BLOCK_TOKENS) if self._each else 0
        for place in range(most):
            if chain[place] not in self._references and chain[place] not in self._cached:
                return place
        return most

    def held_blocks(self, names: Iterable[int]) -> int:
        """Return how many KV blocks of these somebody refers to."""
        return sum(name in self._references for name in names) * self._each

    def any_of(self, names: Iterable[int]) -> frozenset[int]:
        """Return those of the names that somebody refers to."""
        return frozenset(name for name in names if name in self._references)

    def refer(self, names: Sequence[int]) -> None:
        """One sequence more refers to each of these."""
        for name in names:
            count = self._references[name] = self._references.get(name, 0) + 1
            if count == 2 or (count == 1 and name in self._used):
                self.told.change((name,), ())
            if count == 1:
                self._used.pop(name, None)

    def release(self, names: Sequence[int]) -> None:
        """One sequence less refers to each of these."""
        for name in reversed(names):
            count = self._references[name] = self._references[name] - 1
            if not count:
                del self._references[name]
                self.told.change((), (name,))
                self._used[name] = None
        while len(self._used) > MAX_USED:
            del self._used[next(iter(self._used))]

    def forget(self, evicted: Iterable[int]) -> None:
        """These are cached no more, nor does anybody refer to them."""
        for name in evicted:
            self._used.pop(name, None)

    def check_integrity(self, runs: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the references are those of the live sequences, by their runs."""
        counted: dict[int, int] = {}
        for run in runs:
            for name in run:
                counted[name] = counted.get(name, 0) + 1
        assert counted == self._references, "references to shared blocks leaked"
        assert all(name in counted for name in self.told), "told of what nobody refers to"
        assert not counted.keys() & self._used.keys(), "an idle block is referred to"
