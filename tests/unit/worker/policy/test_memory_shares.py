"""Nobody has more than there is or less than its least, who waits is helped, and nothing flaps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.memory_ledger import SLAB_BYTES
from services.worker.policy.memory_shares import MemoryShare, kv_targets

MIB = 2**20
WISH = 256 * MIB
FIRST = MemoryShare("first", 1, 50 * MIB, 6 * MIB, WISH, WISH)
SECOND = MemoryShare("second", 1, 50 * MIB, 16 * MIB, WISH)


def slabs(count: int) -> int:
    return count * SLAB_BYTES


def test_who_waits_has_the_others_shrink_to_their_fair_share() -> None:
    total = 400 * MIB
    assert kv_targets(total, [FIRST]) == {"first": WISH}
    targets = kv_targets(total, [FIRST, SECOND])
    assert targets == {"first": slabs(9), "second": slabs(9)}, "300 MiB for two: nine slabs each"


def test_what_one_cannot_use_is_the_others() -> None:
    small = replace(SECOND, wished_bytes=40 * MIB)
    assert kv_targets(400 * MIB, [FIRST, small]) == {"first": slabs(16), "second": 40 * MIB}
    long = replace(FIRST, least_bytes=250 * MIB)
    assert kv_targets(400 * MIB, [long, SECOND]) == {"first": 250 * MIB, "second": slabs(3)}


def test_when_one_leaves_the_others_grow_to_their_wish() -> None:
    assert kv_targets(400 * MIB, [replace(FIRST, kv_bytes=slabs(9))]) == {"first": WISH}


def test_nobody_shrinks_for_who_is_there_already() -> None:
    grown, poor = replace(FIRST, kv_bytes=slabs(14)), replace(SECOND, kv_bytes=slabs(2))
    assert kv_targets(400 * MIB, [grown, poor]) == {"first": slabs(14), "second": slabs(4)}


def test_memory_goes_by_priority() -> None:
    above = replace(FIRST, rank=2)
    assert kv_targets(400 * MIB, [above, SECOND]) == {"first": WISH, "second": slabs(2)}
    assert kv_targets(360 * MIB, [above, SECOND]) == {"first": WISH}, "it does not shrink for a lower one"
    below = replace(FIRST, rank=0)
    assert kv_targets(400 * MIB, [below, SECOND]) == {"first": slabs(2), "second": WISH}


def test_one_that_cannot_be_helped_takes_nothing_from_the_others() -> None:
    giant = replace(SECOND, fixed_bytes=1000 * MIB, rank=2)
    assert kv_targets(400 * MIB, [replace(FIRST, kv_bytes=slabs(9)), giant]) == {"first": WISH}


amounts = st.integers(0, 40).map(lambda mib: mib * 5 * MIB + 12345)


@st.composite
def devices(draw: st.DrawFn) -> tuple[int, list[MemoryShare]]:
    """Some versions that run within a total, and some that wait."""
    shares = []
    for number in range(draw(st.integers(1, 5))):
        wished = draw(amounts) + 1
        kv = draw(st.one_of(st.just(0), st.integers(1, wished)))
        least = draw(st.integers(1, kv or wished))
        shares.append(MemoryShare(f"v{number}", draw(st.integers(0, 2)), draw(amounts), least, wished, kv))
    held = sum(share.fixed_bytes + share.kv_bytes for share in shares if share.kv_bytes)
    return held + draw(amounts), shares


def carried_out(shares: list[MemoryShare], targets: dict[str, int]) -> list[MemoryShare]:
    """Everybody got what the plan says; pools are whole blocks of some kilobytes."""
    return [
        replace(share, kv_bytes=max(share.least_bytes, targets[share.owner] // 4096 * 4096))
        if share.owner in targets
        else share
        for share in shares
    ]


@settings(max_examples=400, deadline=None)
@given(devices())
def test_whatever_the_device(device: tuple[int, list[MemoryShare]]) -> None:
    total, shares = device
    targets = kv_targets(total, shares)
    by_owner = {share.owner: share for share in shares}
    taken = sum(by_owner[owner].fixed_bytes + kv_bytes for owner, kv_bytes in targets.items())
    assert taken <= total
    helped = [share for share in shares if share.waits and share.owner in targets]
    for owner, kv_bytes in targets.items():
        share = by_owner[owner]
        assert share.least_bytes <= kv_bytes <= share.wished_bytes
        if kv_bytes < share.kv_bytes:
            assert any(each.rank >= share.rank for each in helped), "it shrank for nobody, or for a lower one"
        if kv_bytes > share.kv_bytes > 0:
            assert not helped, "it grew while somebody waited"
    for one in helped:
        for other in shares:
            if other.rank == one.rank and other.owner in targets and not other.waits:
                richer = targets[other.owner] - max(targets[one.owner], other.least_bytes)
                satisfied = targets[one.owner] == one.wished_bytes
                assert satisfied or richer < SLAB_BYTES, "more than a slab above one that waits"
    assert {share.owner for share in shares if not share.waits} <= targets.keys()


@settings(max_examples=400, deadline=None)
@given(devices())
def test_it_comes_to_rest_and_nobody_ever_shrinks_for_what_grew(
    device: tuple[int, list[MemoryShare]],
) -> None:
    total, shares = device
    before = carried_out(shares, kv_targets(total, shares))
    for _ in range(4):
        after = carried_out(before, kv_targets(total, before))
        waiting = {share.owner for share in before if share.waits}
        for was, now in zip(before, after, strict=True):
            assert now.kv_bytes >= was.kv_bytes or waiting, f"{now.owner} flaps"
        before = after
    assert carried_out(before, kv_targets(total, before)) == before


@settings(max_examples=200, deadline=None)
@given(devices())
def test_who_waits_in_vain_could_not_be_helped(device: tuple[int, list[MemoryShare]]) -> None:
    total, shares = device
    targets = kv_targets(total, shares)
    for one in shares:
        if not one.waits or one.owner in targets:
            continue
        others = sum(
            each.fixed_bytes + (each.least_bytes if each.waits or each.rank <= one.rank else each.kv_bytes)
            for each in shares
            if each is not one and (not each.waits or (each.owner in targets and each.rank >= one.rank))
        )
        assert others + one.fixed_bytes + one.least_bytes > total
