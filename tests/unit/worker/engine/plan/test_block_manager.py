"""The block manager against a model of who holds what."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.engine.plan.block_manager import BlockManager, OutOfBlocks


class BlockManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(13, 4, least_blocks=3)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(1, 6), expected=st.integers(0, 20))
    def start(self, count: int, expected: int) -> None:
        free = self.manager.blocks_free
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.manager.allocate(count, expected=expected)
            assert self.manager.blocks_free == free
            return
        blocks = self.manager.allocate(count, expected=expected)
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for table in self.tables for block in table}
        self.tables.append(blocks)

    @precondition(lambda self: self.tables and self.manager.blocks_free)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        used = {block for other in self.tables for block in other}
        (block,) = self.manager.allocate(1, after=table[-1])
        assert block not in used
        assert block < self.manager.blocks_open
        if table[-1] + 1 < self.manager.blocks_open and table[-1] + 1 not in used:
            assert block == table[-1] + 1
        table.append(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        expected = self.manager.blocks_free + self.manager.freed_by([self.tables[index]])
        self.manager.release(self.tables.pop(index))
        assert self.manager.blocks_free == expected

    @rule(blocks=st.integers(0, 6))
    def grow_pool(self, blocks: int) -> None:
        total = self.manager.blocks_total
        self.manager.grow(blocks)
        assert self.manager.blocks_open == self.manager.blocks_total == total + blocks

    @rule(blocks=st.integers(0, 9))
    def shrink(self, blocks: int) -> None:
        """What is given back is at the end, held by nobody, and no more than was asked back."""
        total, opened = self.manager.blocks_total, self.manager.blocks_open
        given = self.manager.shrink(blocks)
        assert self.manager.blocks_total == total - given
        assert self.manager.blocks_open == min(opened, max(3, total - blocks))
        last = max((block for table in self.tables for block in table), default=-1)
        assert self.manager.blocks_total == max(last + 1, self.manager.blocks_open)
        assert self.manager.drain() == 0

    @invariant()
    def nothing_leaks(self) -> None:
        self.manager.check_integrity(self.tables)
        assert self.manager.blocks_used == sum(map(len, self.tables))
        assert self.manager.blocks_free <= self.manager.blocks_open


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_for_rounds_up() -> None:
    manager = BlockManager(4, 16)
    assert [manager.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_sequences_that_grow_side_by_side_stay_contiguous() -> None:
    manager = BlockManager(64, 4)
    tables = [manager.allocate(2, expected=10) for _ in range(6)]
    for _ in range(8):
        for table in tables:
            table += manager.allocate(1, after=table[-1])
    assert all(table == list(range(table[0], table[0] + 10)) for table in tables)


def test_a_full_pool_hands_out_scattered_blocks() -> None:
    manager = BlockManager(6, 4)
    blocks = manager.allocate(6)
    manager.release([blocks[1], blocks[4]])
    assert sorted(manager.allocate(2)) == [1, 4]
    with pytest.raises(OutOfBlocks):
        manager.allocate(1)


def test_what_is_asked_back_drains_as_its_holders_let_it_go() -> None:
    manager = BlockManager(8, 4, least_blocks=2)
    first, second = manager.allocate(3), manager.allocate(3)
    assert manager.shrink(6) == 2
    assert (manager.blocks_total, manager.blocks_free, manager.blocks_used) == (6, 0, 6)
    manager.release(first)
    assert (manager.blocks_free, manager.drain()) == (2, 0)  # the third block is asked back too
    with pytest.raises(OutOfBlocks):
        manager.allocate(3)
    manager.release(second)
    assert (manager.drain(), manager.blocks_total, manager.blocks_free) == (4, 2, 2)
    manager.grow(3)
    assert manager.allocate(5, expected=5) == [0, 1, 2, 3, 4]


def test_releasing_twice_is_our_bug() -> None:
    manager = BlockManager(2, 4)
    blocks = manager.allocate(1)
    manager.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        manager.release(blocks)


def test_a_leak_is_found() -> None:
    manager = BlockManager(2, 4)
    manager.allocate(1)
    with pytest.raises(AssertionError, match="holders"):
        manager.check_integrity([])


@pytest.mark.parametrize(("blocks", "size"), [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_pool_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="no pool"):
        BlockManager(blocks, size)
