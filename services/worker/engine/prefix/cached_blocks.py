"""The cached KV blocks as a forest: each stands for a whole prefix, its parent for that prefix less a block.

Columns by block number, so that a pool of many blocks costs no object for each of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Final, NamedTuple

from services.core.prefix import PREFIX_BLOCK_TOKENS

NOTHING: Final = -1  # the parent of a first block

_OWN: Final = 0  # not cached: it has one holder, or none
_WHOLE: Final = 1
_TAIL: Final = 2  # a part of its slots is written; it has no holder, but may be copied from
_WITHDRAWN: Final = 3  # no longer cached; free when its last holder releases it


class PartialBlock(NamedTuple):
    """The tokens whose KV the first slots of ``block`` hold, after the prefix that it is kept under."""

    block: int
    tokens: list[int]


class CachedBlocks:
    """``find`` and ``tail`` look up, ``enter`` and ``remove`` change; what has children is not removed.

    A block that is held has a parent that is held, by the same holders at least: so some cached blocks
    without a holder are always leaves. ``refs``, ``parent``, ``children``, ``depth`` (blocks before it),
    ``root`` (of its chain: the isolation domain) and ``asked`` are by block number.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self._each = PREFIX_BLOCK_TOKENS // block_size
        self._kind = bytearray(blocks)
        # Hash of each block's prefix; a tail has its parent's, or its root.
        self._key = array("Q", bytes(8 * blocks))
        self.root = array("Q", bytes(8 * blocks))
        self.refs = array("i", bytes(4 * blocks))
        self.parent = array("i", bytes(4 * blocks))
        self.children = array("i", bytes(4 * blocks))
        self.depth = array("i", bytes(4 * blocks))
        self.requests = bytearray(blocks)
        self._index: dict[int, int] = {}
        self._tails: dict[int, PartialBlock] = {}
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._index) + len(self._tails)

    def find(self, key: int) -> int | None:
        """Return the block whose prefix is named so."""
        return self._index.get(key)

    def tail(self, parent: int, root: int) -> PartialBlock | None:
        """Return what is kept of a block after ``parent``, or at the beginning of a chain."""
        return self._tails.get(self._key[parent] if parent >= 0 else root)

    def is_own(self, block: int) -> bool:
        """Whether it is not cached: only its holder refers to it."""
        return self._kind[block] == _OWN

    def is_whole(self, block: int) -> bool:
        """Whether it can be found, and have children."""
        return self._kind[block] == _WHOLE

    def is_withdrawn(self, block: int) -> bool:
        return self._kind[block] == _WITHDRAWN

    def is_idle_leaf(self, block: int) -> bool:
        """Whether it can be removed."""
        return self._kind[block] in (_WHOLE, _TAIL) and self.refs[block] == 0 and self.children[block] == 0

    def path(self, block: int) -> list[int]:
        """Return the blocks of a prefix, first to last."""
        parent, blocks = self.parent, []
        while block >= 0:
            blocks.append(block)
            block = parent[block]
        blocks.reverse()
        return blocks

    def enter(self, block: int, key: int, *, parent: int, root: int) -> None:
        """Cache a whole block that one sequence holds. ``parent`` is whole, or NOTHING."""
        assert key not in self._index, "a prefix is cached twice"
        self._kind[block] = _WHOLE
        self._key[block] = key
        self._index[key] = block
        self._link(block, parent, root)
        if self._is_named(block):
            self._added[key] = None

    def enter_tail(self, block: int, tokens: list[int], *, parent: int, root: int) -> None:
        """Keep a block that holds the KV of these tokens after ``parent``; there is no tail yet."""
        self._kind[block] = _TAIL
        self._key[block] = key = self._key[parent] if parent >= 0 else root
        assert key not in self._tails, "a prefix has two tails"
        self._tails[key] = PartialBlock(block, tokens)
        self._link(block, parent, root)

    def remove(self, block: int) -> int:
        """Remove a leaf without a holder; return its parent."""
        assert self.is_idle_leaf(block), f"block {block} is of use"
        parent = self.parent[block]
        self._unlist(block)
        self._kind[block] = _OWN
        if parent >= 0:
            self.children[parent] -= 1
        return parent

    def withdraw(self, blocks: Collection[int]) -> None:
        """Cache these no more; they have no descendants but among themselves. Those that are held go last."""
        doomed = set(blocks)
        for block in blocks:
            self._unlist(block)
            parent = self.parent[block]
            if parent >= 0 and parent not in doomed:
                self.children[parent] -= 1
        for block in blocks:
            self._kind[block] = _WITHDRAWN if self.refs[block] else _OWN
            self.parent[block], self.children[block] = NOTHING, 0

    def free(self, block: int) -> None:
        """The last holder let a withdrawn block go."""
        self._kind[block] = _OWN

    def below(self, blocks: Collection[int]) -> list[int]:
        """Return those of the blocks that are cached, and their descendants. Looks at all that is cached."""
        verdict: dict[int, bool] = {NOTHING: False}
        for block in self.cached():
            path = []
            while block not in verdict:
                path.append(block)
                block = self.parent[block]
            for each in reversed(path):
                verdict[each] = verdict[self.parent[each]] or each in blocks
        return [block for block, is_doomed in verdict.items() if is_doomed]

    def cached(self) -> list[int]:
        """Return all that can be found."""
        return [*self._index.values(), *(tail.block for tail in self._tails.values())]

    def names(self) -> list[int]:
        """Return the names of the prefix blocks that are here."""
        return [key for key, block in self._index.items() if self._is_named(block)]

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the names added and removed since the previous call; see ``PrefixReuse``."""
        if not (self._added or self._removed):
            return [], []
        added, removed = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return added, removed

    def resize(self, blocks: int) -> None:
        """Have columns for that many blocks; those that go are not cached."""
        more = blocks - len(self._kind)
        for column in (self._kind, self._key, self.root, self.refs, self.parent, self.children):
            _resize(column, more)
        for column in (self.depth, self.requests):
            _resize(column, more)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the columns agree with each other."""
        cached = self.cached()
        assert len(set(cached)) == len(cached), "a block is cached twice"
        children = dict.fromkeys(cached, 0)
        for block in cached:
            parent = self.parent[block]
            assert self.depth[block] == (self.depth[parent] + 1 if parent >= 0 else 0), "a depth is off"
            if parent >= 0:
                assert self._kind[parent] == _WHOLE, "a cached block without what is before it"
                assert self.refs[parent] >= self.refs[block], "held without what is before it"
                assert self.root[parent] == self.root[block], "a chain crosses domains"
                children[parent] += 1
        assert all(self.children[block] == count for block, count in children.items()), "children are off"
        assert all(self._key[block] == key for key, block in self._index.items()), "a key is off"
        kinds = {block: kind for block, kind in enumerate(self._kind) if kind in (_WHOLE, _TAIL)}
        assert kinds.keys() == children.keys(), "a cached block cannot be found"
        assert all(not self.refs[tail.block] for tail in self._tails.values()), "a tail is held"

    def _link(self, block: int, parent: int, root: int) -> None:
        self.refs[block] = 0
        self.children[block] = 0
        self.parent[block] = parent
        self.root[block] = root
        self.depth[block] = 0
        if parent >= 0:
            self.depth[block] = self.depth[parent] + 1
            self.children[parent] += 1

    def _unlist(self, block: int) -> None:
        key = self._key[block]
        if self._kind[block] == _TAIL:
            del self._tails[key]
            return
        del self._index[key]
        if self._is_named(block):
            _note_removed(key, self._added, self._removed)

    def _is_named(self, block: int) -> bool:
        return (self.depth[block] + 1) % self._each == 0


def _note_removed(name: int, added: dict[int, None], removed: dict[int, None]) -> None:
    if name not in added:
        removed[name] = None
    else:  # unreported so far, unless it was removed before
        del added[name]


def _resize(column: bytearray | array[int], more: int) -> None:
    if more < 0:
        del column[more:]
    elif isinstance(column, bytearray):
        column += bytes(more)
    else:
        column.frombytes(bytes(more * column.itemsize))
