"""The pool of counts against a pool of blocks, and its cache against a model that knows every token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.prefix import PREFIX_BLOCK_TOKENS, prefix_chain
from services.worker.engine.plan.block_manager import BlockManager, OutOfBlocks
from simulator.engine.sim_engine import SimKvPool
from simulator.engine.sim_executor import SimIntake
from simulator.engine.tokens import SimVocabulary
from tests.support.submits import make_submit

operations = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(operations)
def test_without_prefixes_it_counts_as_the_block_manager_does(drawn: list[tuple[bool, int]]) -> None:
    real, counted = BlockManager(30, 4), SimKvPool(30, 4, cache=False)
    tables: list[tuple[list[int], list[int]]] = []
    for allocates, number in drawn:
        if allocates and number:
            outcomes: list[Any] = []
            for pool in (real, counted):
                try:
                    outcomes.append(pool.allocate(number))
                except OutOfBlocks as error:
                    outcomes.append(str(error))
            if isinstance(outcomes[0], str):
                assert outcomes[0] == outcomes[1]
            else:
                assert len(outcomes[0]) == len(outcomes[1])
                tables.append((outcomes[0], outcomes[1]))
        elif tables:
            mine, theirs = tables.pop(number % len(tables))
            real.release(mine)
            counted.release(theirs)
        elif number:
            change(real, counted, number)
        if not real.is_closing:
            assert real.blocks_total == counted.blocks_total
            assert (real.blocks_free, real.blocks_used) == (counted.blocks_free, counted.blocks_used)
        counted.check_integrity(table for _, table in tables)


def change(real: BlockManager, counted: SimKvPool, number: int) -> None:
    """Shrink by a third of the number or grow by it; nothing is held, so the shrink is over at once."""
    for pool in (real, counted):
        if number % 3:
            pool.grow(number)
        else:
            assert pool.shrink(number // 3) == min(number // 3, pool.blocks_total + number // 3 - 1)


def test_a_pool_that_shrinks_waits_for_its_holders_and_evicts_the_rest() -> None:
    pool = SimKvPool(10, 4, cache=False)
    tables = [pool.allocate(4), pool.allocate(3)]
    assert pool.shrink(7) == 3
    assert (pool.blocks_total, pool.blocks_free, pool.is_closing) == (7, 0, True)
    assert all(map(pool.holds_closed, tables))
    pool.release(tables.pop())
    assert (pool.drain(), pool.blocks_total, pool.blocks_free) == (3, 4, 0)
    pool.grow(2)
    assert (pool.blocks_total, pool.blocks_free, pool.is_closing) == (6, 2, False)
    pool.check_integrity(tables)


@dataclass
class Model:
    """A cache by its tokens: the prefixes that are here, least recently used first."""

    here: dict[tuple[int, ...], None] = field(default_factory=dict)

    def found(self, ids: list[int]) -> int:
        blocks = 0
        while (blocks + 1) * PREFIX_BLOCK_TOKENS < len(ids) and tuple(
            ids[: (blocks + 1) * PREFIX_BLOCK_TOKENS]
        ) in self.here:
            blocks += 1
        return blocks

    def touch(self, ids: list[int], blocks: int) -> None:
        for count in range(blocks, 0, -1):  # the end of a prefix is the older
            prefix = tuple(ids[: count * PREFIX_BLOCK_TOKENS])
            self.here.pop(prefix, None)
            self.here[prefix] = None

    def shrink(self, most: int) -> None:
        while len(self.here) > most:
            del self.here[next(iter(self.here))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.integers(1, 150)), max_size=30))
def test_sequences_one_after_the_other_find_what_a_model_of_tokens_finds(
    drawn: list[tuple[int, int, int]],
) -> None:
    """Each prompt begins as others of its family do; output extends what may be found."""
    blocks, size = 48, 16
    each = PREFIX_BLOCK_TOKENS // size
    pool, model = SimKvPool(blocks, size), Model()
    intake = SimIntake(SimVocabulary(101), None)
    names: dict[int, None] = {}
    for handle, (family, prompt, output) in enumerate(drawn):
        ids = [(family * 17 + index) % 101 for index in range(prompt)]
        command = make_submit(
            handle,
            ids,
            output,
            seed=family,
            max_tokens=output,
            prefix_hashes=prefix_chain(5, ids),
            prefix_root=5,
        )
        sequence = intake.sequence(command, arrival=handle, eos_ids=frozenset())
        expected = model.found(ids)
        assert pool.reusable(sequence) == (expected * PREFIX_BLOCK_TOKENS, 0)
        sequence.blocks = pool.attach(sequence).blocks
        total = prompt + output
        model.touch(ids, expected)  # held from now on, so that nothing of it goes
        sequence.blocks += pool.allocate(pool.blocks_for(total - 1) - len(sequence.blocks))
        model.shrink((blocks - len(sequence.blocks) + expected * each) // each)
        sequence.computed = prompt
        pool.publish(sequence)
        sequence.tokens.take(output)  # type: ignore[attr-defined]
        sequence.computed = total - 1
        pool.retain(sequence)
        pool.check_integrity([sequence.blocks])
        pool.release(sequence.blocks)
        intake.forget(handle)
        made = sequence.tokens[:total]
        model.touch(list(made), (total - 1) // PREFIX_BLOCK_TOKENS)
        added, removed = pool.take_changes()
        for name in removed:
            del names[name]
        assert not set(added) & names.keys()
        names |= dict.fromkeys(added)
        assert len(names) == pool.prefix_blocks == len(model.here)
        pool.check_integrity([])
        assert pool.blocks_free == blocks


def test_a_prefix_in_use_is_shared_and_not_evicted() -> None:
    pool = SimKvPool(16, 16)
    intake = SimIntake(SimVocabulary(101), None)
    ids = list(range(100))
    sequences = []
    for handle in range(2):
        command = make_submit(handle, ids, 9, seed=1, prefix_hashes=prefix_chain(5, ids), prefix_root=5)
        sequences.append(intake.sequence(command, arrival=handle, eos_ids=frozenset()))
    first, second = sequences
    first.blocks, first.computed = pool.allocate(7), 100
    pool.publish(first)
    assert pool.reusable(second) == (64, 4)  # four blocks that another holds
    second.blocks = [*pool.attach(second).blocks, *pool.allocate(3)]
    assert pool.blocks_used == 10
    assert pool.freed_by([first.blocks]) == pool.freed_by([second.blocks]) == 3
    assert pool.freed_by([first.blocks, second.blocks]) == 10
    assert pool.freed_by([first.blocks, second.blocks], kept=pool.found(first)) == 6
    pool.release(first.blocks)
    assert pool.blocks_used == 7
    pool.allocate(9)
    assert pool.prefix_blocks == 1
    pool.check_integrity([second.blocks, [0] * 9])
    pool.release(second.blocks)
    pool.allocate(6)
    assert (pool.prefix_blocks, pool.take_changes()) == (0, ([], []))
