"""The device memory of one engine on this worker: its needs, its grant and the target size of its pool."""

from __future__ import annotations

from typing import Final

from services.core.errors import DoesNotFit
from services.worker.engine_protocol import LoadFailed, Ready
from services.worker.memory_ledger import MIN_KV_BYTES, MemoryGrant, MemoryLedger
from services.worker.policy.memory_shares import MemoryShare

FIRST_WORKING_BYTES: Final = 256 * 1024 * 1024  # granted to a version's first engine, if they are free


class VersionMemory:
    """Single writer: the slots of the versions that share it. The measured needs outlive the engines.

    ``owner`` is one of these versions. ``wished_kv_bytes`` is the upper bound of the pool.
    """

    def __init__(self, owner: str, label: str, *, ledger: MemoryLedger, wished_kv_bytes: int) -> None:
        self._owner = owner
        self._label = label
        self._ledger = ledger
        self._wished_kv_bytes = wished_kv_bytes
        self._least_kv_bytes = min(MIN_KV_BYTES, wished_kv_bytes)  # minimum to load with
        self._weight_bytes = 0  # 0: unknown
        self._working_bytes = 0  # 0: no engine has measured it
        self._engine: Ready | None = None
        self._requested: int | None = None  # requested blocks, until the engine answers
        self._stays = False  # the engine could not resize as requested: no further request until it restarts

    @property
    def owner(self) -> str:
        """The version in whose name the memory is granted."""
        return self._owner

    @property
    def granted(self) -> MemoryGrant | None:
        return self._ledger.held_by(self._owner)

    @property
    def needed_bytes(self) -> int:
        """The least device memory to load it with; 0 while unknown."""
        if not self._weight_bytes:
            return 0
        return self._weight_bytes + self._working_bytes + self._least_kv_bytes

    @property
    def weight_bytes(self) -> int:
        """0 while unknown."""
        return self._weight_bytes

    @property
    def spare_bytes(self) -> int:
        """The part of its granted KV that its running engine does not need."""
        grant, engine = self.granted, self._engine
        if grant is None or engine is None or self._stays:
            return 0
        return max(0, grant.kv_bytes - self._kv_bytes(-(-engine.max_model_len // engine.block_size)))

    @property
    def releases_memory(self) -> bool:
        """Whether a requested shrink of its pool is not complete."""
        grant, requested = self.granted, self._requested
        return grant is not None and requested is not None and self._kv_bytes(requested) < grant.kv_bytes

    # --- an engine's lifetime -------------------------------------------------------------------

    def take(self, *, weight_bytes: int, kv_bytes: int | None) -> MemoryGrant:
        """Grant memory for an engine's start; ``kv_bytes`` None: the upper bound. Raises DoesNotFit."""
        self._weight_bytes = max(weight_bytes, self._weight_bytes)
        wished = self._wished_kv_bytes if kv_bytes is None else min(kv_bytes, self._wished_kv_bytes)
        wished = max(wished, self._least_kv_bytes)
        working_bytes = self._working_bytes
        if not working_bytes:  # An engine takes its working memory out of its KV unless this grant covers it.
            free_bytes = self._ledger.free_bytes - self._weight_bytes - wished
            working_bytes = min(FIRST_WORKING_BYTES, max(0, free_bytes))
        return self._ledger.grant(
            self._owner,
            weight_bytes=self._weight_bytes,
            working_bytes=working_bytes,
            kv_bytes=wished,
            min_kv_bytes=self._least_kv_bytes,
            label=self._label,
        )

    def learn(self, refused: LoadFailed) -> None:
        """Record the minimum that an engine that did not fit reported."""
        self._weight_bytes = max(refused.weight_bytes, self._weight_bytes)
        self._working_bytes = max(refused.working_bytes, self._working_bytes)
        self._least_kv_bytes = max(refused.kv_bytes, self._least_kv_bytes)

    def settle(self, engine: Ready) -> None:
        """Replace the grant by what the engine took. Raises DoesNotFit."""
        self._weight_bytes = max(engine.weight_bytes, self._weight_bytes)
        self._working_bytes = engine.working_bytes
        self._ledger.settle(
            self._owner,
            weight_bytes=engine.weight_bytes,
            working_bytes=engine.working_bytes,
            kv_bytes=engine.kv_blocks_total * engine.kv_bytes_per_block,
        )
        self._engine, self._stays = engine, "resize" not in engine.capabilities

    def adapt(self, adapter_bytes: int) -> None:
        """Grant so many bytes to the adapters of the running engine together. Raises DoesNotFit."""
        grant, engine = self.granted, self._engine
        if grant is not None and engine is not None:
            self._ledger.settle(
                self._owner,
                weight_bytes=engine.weight_bytes + adapter_bytes,
                working_bytes=grant.working_bytes,
                kv_bytes=grant.kv_bytes,
            )

    def stay(self) -> None:
        """Keep the present size until the engine ends: it cannot be resized."""
        self._stays = True

    def release(self) -> None:
        """Release the grant after the engine ended, or if none was started. Idempotent."""
        self._ledger.release(self._owner)
        self._engine, self._requested, self._stays = None, None, False

    def pass_on(self, owner: str, heir: str, label: str) -> None:
        """The memory is the heir's if it was the owner's: the engine goes on without that version."""
        if self._owner == owner:
            self._ledger.rename(owner, heir, label)
            self._owner, self._label = heir, label

    # --- its pool -------------------------------------------------------------------------------

    def share(self, rank: int, *, movable: bool) -> MemoryShare | None:
        """Return its claim on the device's memory, None while unknown.

        The claim is the present size if it is not ``movable``, and while its pool is being resized.
        """
        grant, engine = self.granted, self._engine
        if grant is None:
            fixed_bytes = self._weight_bytes + self._working_bytes
            claim = MemoryShare(self._owner, rank, fixed_bytes, self._least_kv_bytes, self._wished_kv_bytes)
            return claim if self._weight_bytes else None
        kv_bytes = grant.kv_bytes if self._requested is None else self._kv_bytes(self._requested)
        if engine is None or not movable or self._stays or self._requested is not None:
            held_bytes = grant.kv_bytes
            return MemoryShare(self._owner, rank, grant.fixed_bytes, kv_bytes, kv_bytes, kv_bytes, held_bytes)
        least_bytes = self._kv_bytes(-(-engine.max_model_len // engine.block_size))
        wished_bytes = max(self._wished_kv_bytes, kv_bytes)
        return MemoryShare(
            self._owner, rank, grant.fixed_bytes, least_bytes, wished_bytes, kv_bytes, kv_bytes
        )

    def aim(self, kv_bytes: int) -> int | None:
        """Return the number of blocks to request from the engine, or None. Growth is granted here."""
        grant, engine = self.granted, self._engine
        if grant is None or engine is None or self._stays or self._requested is not None:
            return None
        blocks = kv_bytes // engine.kv_bytes_per_block
        if self._kv_bytes(blocks) == grant.kv_bytes:
            return None
        if self._kv_bytes(blocks) > grant.kv_bytes:
            try:
                self._ledger.settle_kv(self._owner, self._kv_bytes(blocks))
            except DoesNotFit:  # other pools have not released it yet
                return None
        self._requested = blocks
        return blocks

    def resized(self, blocks: int) -> None:
        """Record the engine's new pool size, which may differ from the requested one."""
        self._stays = blocks != self._requested
        self._requested = None
        self._ledger.settle_kv(self._owner, self._kv_bytes(blocks))

    def _kv_bytes(self, blocks: int) -> int:
        return 0 if self._engine is None else blocks * self._engine.kv_bytes_per_block
