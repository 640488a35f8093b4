"""The block table of a sequence: how it gets longer, shorter and empty."""

from __future__ import annotations

from services.worker.engine.plan.block_manager import BlockPool
from services.worker.engine.sequence import SequenceState


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
