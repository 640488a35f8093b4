"""What is booked for a version is what its engine may use: before it grows, and until it gave back."""

from __future__ import annotations

import pytest

from services.core.errors import DoesNotFit
from services.worker.engine_protocol import Capability, LoadFailed, Ready
from services.worker.memory_ledger import MemoryLedger
from services.worker.policy.memory_shares import MemoryShare
from services.worker.slots.version_memory import VersionMemory

MIB = 2**20
BLOCK = MIB // 2


def memory_of(ledger: MemoryLedger, owner: str = "v1") -> VersionMemory:
    return VersionMemory(owner, owner, ledger=ledger, wished_kv_bytes=64 * MIB)


def ready(blocks: int, *, working_mib: int = 10) -> Ready:
    working, resizes = working_mib * MIB, frozenset[Capability]({"resize"})
    return Ready(blocks, 16, 160, 100, BLOCK, 20 * MIB, working_bytes=working, capabilities=resizes)


def running(ledger: MemoryLedger, blocks: int = 64) -> VersionMemory:
    memory = memory_of(ledger)
    memory.take(weight_bytes=20 * MIB, kv_bytes=None)
    memory.settle(ready(blocks))
    return memory


def test_what_an_engine_needs_is_known_once_it_ran() -> None:
    ledger = MemoryLedger(100 * MIB)
    memory = memory_of(ledger)
    assert memory.needed_bytes == 0
    grant = memory.take(weight_bytes=20 * MIB, kv_bytes=None)
    assert (grant.kv_bytes, grant.working_bytes) == (64 * MIB, 16 * MIB), "it is lent what is free"
    memory.settle(ready(100))
    assert ledger.free_bytes == 20 * MIB
    memory.release()
    assert (memory.needed_bytes, memory.granted) == (46 * MIB, None)
    grant = memory.take(weight_bytes=20 * MIB, kv_bytes=32 * MIB)
    assert (grant.working_bytes, grant.kv_bytes) == (10 * MIB, 32 * MIB)


def test_what_did_not_fit_asks_for_what_it_was_told() -> None:
    memory = memory_of(MemoryLedger(60 * MIB))
    memory.take(weight_bytes=20 * MIB, kv_bytes=None)
    memory.release()
    memory.learn(LoadFailed("does_not_fit", "", 21 * MIB, 30 * MIB, 18 * MIB))
    assert memory.needed_bytes == 69 * MIB
    with pytest.raises(DoesNotFit, match=r"21 MiB for weights, 30 MiB .* at least 18 MiB for KV"):
        memory.take(weight_bytes=20 * MIB, kv_bytes=None)


def test_a_shrink_is_booked_when_the_engine_answered() -> None:
    ledger = MemoryLedger(100 * MIB)
    memory = running(ledger)
    assert memory.share(1, movable=True) == MemoryShare(
        "v1", 1, 30 * MIB, 5 * MIB, 64 * MIB, 32 * MIB, held_bytes=32 * MIB
    )
    assert memory.aim(16 * MIB) == 32
    assert memory.releases_memory
    assert memory.aim(24 * MIB) is None, "one at a time"
    assert ledger.free_bytes == 38 * MIB, "it has it still"
    assert memory.share(1, movable=True) == MemoryShare(
        "v1", 1, 30 * MIB, 16 * MIB, 16 * MIB, 16 * MIB, held_bytes=32 * MIB
    )
    memory.resized(40)
    assert (memory.releases_memory, ledger.free_bytes) == (False, 50 * MIB), "as much as it says"


def test_growth_is_booked_before_the_engine_is_asked() -> None:
    ledger = MemoryLedger(100 * MIB)
    memory = running(ledger)
    assert memory.aim(32 * MIB + BLOCK - 1) is None, "less than a block"
    assert memory.aim(48 * MIB + 1) == 96
    assert (ledger.free_bytes, memory.releases_memory) == (22 * MIB, False)
    memory.resized(64)
    assert ledger.free_bytes == 38 * MIB, "the device had no memory"
    assert memory.aim(48 * MIB) is None, "it is not asked again before it starts again"
    assert memory.share(1, movable=True) == MemoryShare(
        "v1", 1, 30 * MIB, 32 * MIB, 32 * MIB, 32 * MIB, held_bytes=32 * MIB
    )
    memory.release()
    memory = running(ledger)
    ledger.grant("other", weight_bytes=30 * MIB, kv_bytes=1)
    assert memory.aim(48 * MIB) is None, "others have it yet"
    assert memory.aim(33 * MIB) == 66


def test_an_engine_that_is_gone_has_no_share_but_a_claim() -> None:
    ledger = MemoryLedger(100 * MIB)
    memory = running(ledger)
    memory.aim(16 * MIB)
    memory.release()
    assert memory.share(2, movable=True) == MemoryShare("v1", 2, 30 * MIB, 16 * MIB, 64 * MIB)
    assert memory_of(ledger).share(1, movable=True) is None
    assert memory.aim(16 * MIB) is None
