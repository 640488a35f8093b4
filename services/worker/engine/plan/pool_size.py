"""The size of an engine's KV pool: requests are carried out between two steps.

Blocks are closed at once and returned when they have no holder; the memory behind them changes when the
last of them is free, once for each ``Resize``. Growing has memory before it has blocks.
"""

from __future__ import annotations

from contextlib import suppress

from services.worker.engine.execute.executor import Executor
from services.worker.engine.plan.block_manager import BlockPool
from services.worker.engine.speculation.speculator import Speculator


class PoolSize:
    """Owns the changes of one pool, of the memory behind it, and of the draft model's pool."""

    def __init__(self, blocks: BlockPool, executor: Executor, speculation: Speculator | None) -> None:
        self._blocks = blocks
        self._executor = executor
        self._speculation = speculation
        self._backed = blocks.blocks_total  # blocks that have memory
        self._wanted: int | None = None  # the size that was requested and has no answer yet

    @property
    def changing(self) -> bool:
        """Whether a change is to be carried out: no batch may be planned ahead of another."""
        return self._wanted is not None

    def request(self, blocks: int) -> None:
        """Close what is beyond ``blocks``, or open what was closed; the rest is for ``settle``."""
        self._wanted = max(1, blocks)
        self._blocks.grow(0)
        if self._wanted < self._blocks.blocks_total:
            self._blocks.shrink(self._blocks.blocks_total - self._wanted)

    def settle(self) -> int | None:
        """Carry out what can be, while nothing is computed; the blocks that there are if that was the end."""
        if self._wanted is None:
            return None
        self._blocks.drain()
        if self._blocks.is_closing:
            return None
        wanted, total = self._wanted, self._blocks.blocks_total
        size = max(wanted, total)  # ``least_blocks`` may be more than was requested
        try:
            self._have_memory(size)
        except MemoryError:
            size = self._backed
        if size > total:
            self._blocks.grow(size - total)
        self._wanted = None
        return size

    def _have_memory(self, blocks: int) -> None:
        """Raises MemoryError where there is none, with as much as before."""
        before = self._backed
        if blocks == before:
            return
        try:
            self._executor.resize(blocks)
            if self._speculation is not None:
                self._speculation.resize(blocks)
        except MemoryError:
            with suppress(MemoryError):
                self._executor.resize(before)
            raise
        self._backed = blocks
