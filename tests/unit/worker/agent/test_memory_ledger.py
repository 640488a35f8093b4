"""What is granted never exceeds the device; a refusal says why."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from services.core.errors import DoesNotFit
from services.worker.memory_ledger import MIN_KV_BYTES, SLAB_BYTES, MemoryLedger

MIB = 2**20
TOTAL = 256 * MIB


def test_a_second_version_gets_what_is_left_in_slabs() -> None:
    ledger = MemoryLedger(TOTAL)
    assert ledger.grant("v1", weight_bytes=100 * MIB, kv_bytes=64 * MIB).kv_bytes == 64 * MIB
    second = ledger.grant("v2", weight_bytes=50 * MIB, kv_bytes=64 * MIB)
    assert second.kv_bytes == 32 * MIB, "42 MiB are left: two slabs"
    assert ledger.free_bytes == 10 * MIB


def test_a_refusal_names_the_need_the_room_and_who_holds_it() -> None:
    ledger = MemoryLedger(TOTAL)
    ledger.grant("v1", weight_bytes=200 * MIB, kv_bytes=16 * MIB)
    with pytest.raises(
        DoesNotFit, match=r"v2 needs 100 MiB .* 40 MiB of 256 MiB are free \(v1 holds 216 MiB\)"
    ):
        ledger.grant("v2", weight_bytes=100 * MIB, kv_bytes=16 * MIB)
    ledger.release("v1")
    ledger.release("v1")
    assert ledger.grant("v2", weight_bytes=100 * MIB, kv_bytes=16 * MIB).bytes == 116 * MIB


def test_working_memory_counts_and_is_named() -> None:
    ledger = MemoryLedger(TOTAL)
    grant = ledger.grant("v1", weight_bytes=100 * MIB, working_bytes=50 * MIB, kv_bytes=200 * MIB)
    assert (grant.fixed_bytes, grant.kv_bytes) == (150 * MIB, 96 * MIB), "106 MiB are left: six slabs"
    with pytest.raises(
        DoesNotFit, match=r"v2 needs 1 MiB for weights, 5 MiB for working memory and at least 16 MiB for KV"
    ) as refused:
        ledger.grant("v2", weight_bytes=1 * MIB, working_bytes=5 * MIB, kv_bytes=16 * MIB)
    assert refused.value.metadata["needed_bytes"] == str(22 * MIB)
    ledger.settle_kv("v1", 80 * MIB)
    assert ledger.free_bytes == 26 * MIB
    with pytest.raises(DoesNotFit):
        ledger.settle_kv("v1", 107 * MIB)
    assert ledger.free_bytes == 26 * MIB


def test_settling_books_what_was_taken_and_refuses_what_is_not_there() -> None:
    ledger = MemoryLedger(TOTAL)
    ledger.grant("v1", weight_bytes=100 * MIB, kv_bytes=64 * MIB)
    ledger.settle("v1", weight_bytes=90 * MIB, kv_bytes=60 * MIB)
    assert ledger.free_bytes == 106 * MIB
    with pytest.raises(DoesNotFit):
        ledger.settle("v1", weight_bytes=250 * MIB, kv_bytes=60 * MIB)
    assert ledger.free_bytes == 106 * MIB


class Ledger(RuleBasedStateMachine):
    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger(TOTAL)
        self.held: dict[str, int] = {}
        self.count = 0

    @rule(target=owners, weights=st.integers(0, TOTAL), kv=st.integers(1, TOTAL))
    def grant(self, weights: int, kv: int) -> str:
        self.count += 1
        owner = f"v{self.count}"
        free = TOTAL - sum(self.held.values())
        try:
            grant = self.ledger.grant(owner, weight_bytes=weights, kv_bytes=kv)
        except DoesNotFit:
            room = free - weights
            assert room < kv
            assert room < max(MIN_KV_BYTES, SLAB_BYTES)
        else:
            assert grant.weight_bytes == weights
            assert 0 < grant.kv_bytes <= kv
            self.held[owner] = grant.bytes
        return owner

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        self.ledger.release(owner)
        self.held.pop(owner, None)

    @invariant()
    def adds_up(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.free_bytes == TOTAL - sum(self.held.values()) >= 0


TestLedger = Ledger.TestCase
TestLedger.settings = settings(deadline=None, max_examples=60)
