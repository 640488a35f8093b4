"""The arms of a split divide the KV of one version by their traffic, and come to rest."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.memory_ledger import SLAB_BYTES
from services.worker.policy.memory_shares import MemoryShare, divided, kv_targets

MIB = 2**20
WISH = 256 * MIB
TOTAL = 2000 * MIB
STABLE = MemoryShare("stable", 1, 50 * MIB, 6 * MIB, WISH, WISH, WISH, "d", 9500)
CANARY = MemoryShare("canary", 1, 50 * MIB, 16 * MIB, WISH, split="d", traffic=500)


def target(*shares: MemoryShare, total: int = TOTAL) -> dict[str, int]:
    return divided(kv_targets(total, shares), shares)


def grown(share: MemoryShare, kv_bytes: int) -> MemoryShare:
    return replace(share, kv_bytes=kv_bytes, held_bytes=kv_bytes)


def rest(*shares: MemoryShare, total: int = TOTAL) -> dict[str, int]:
    """Apply targets until nothing changes."""
    now = list(shares)
    for _ in range(8):
        found = target(*now, total=total)
        after = [grown(share, found[share.owner]) for share in now]
        if after == now:
            return found
        now = after
    raise AssertionError("pools are resized for ever")


def test_a_candidate_loads_with_its_part_of_one_version_s_kv() -> None:
    assert target(STABLE, CANARY) == {"stable": 240 * MIB, "canary": 16 * MIB}


def test_pools_follow_the_traffic_and_never_exceed_one_version_s() -> None:
    for traffic in (500, 2500, 5000, 7500):
        found = rest(replace(STABLE, traffic=10_000 - traffic), replace(CANARY, traffic=traffic))
        assert sum(found.values()) == WISH
        assert abs(found["canary"] - WISH * traffic // 10_000) <= SLAB_BYTES


def test_nobody_grows_before_the_other_has_shrunk() -> None:
    stable, canary = replace(STABLE, traffic=5000), replace(grown(CANARY, 16 * MIB), traffic=5000)
    assert target(stable, canary) == {"stable": 128 * MIB, "canary": 16 * MIB}
    shrinking = replace(stable, kv_bytes=128 * MIB)  # requested, and not yet released
    assert target(shrinking, canary)["canary"] == 16 * MIB
    assert target(grown(stable, 128 * MIB), canary) == {"stable": 128 * MIB, "canary": 128 * MIB}


def test_an_aborted_arm_keeps_its_pool_and_the_stable_one_takes_the_rest() -> None:
    aborted = replace(grown(CANARY, 128 * MIB), traffic=0, retires=True)
    stable = replace(grown(STABLE, 96 * MIB), traffic=10_000)
    assert target(stable, aborted) == {"stable": 128 * MIB, "canary": 128 * MIB}
    assert target(stable) == {"stable": WISH}, "alone it grows again"


def test_without_traffic_of_a_split_nothing_is_divided() -> None:
    old, new = replace(STABLE, traffic=0), replace(CANARY, traffic=0)
    shares = (old, new)
    assert target(*shares) == kv_targets(TOTAL, shares)
    other = replace(CANARY, split="e")
    assert target(STABLE, other) == kv_targets(TOTAL, (STABLE, other))


amounts = st.integers(0, 20).map(lambda mib: mib * 13 * MIB + 4321)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(amounts, amounts, st.integers(0, 10_000), st.booleans()), min_size=2, max_size=4),
    st.integers(300, 3000),
)
def test_division_fits_keeps_minima_and_rests(
    drawn: list[tuple[int, int, int, bool]], total_mib: int
) -> None:
    shares = [
        replace(
            STABLE,
            owner=f"v{number}",
            least_bytes=min(least, WISH),
            kv_bytes=max(SLAB_BYTES, min(kv, WISH), min(least, WISH)),
            held_bytes=max(SLAB_BYTES, min(kv, WISH), min(least, WISH)),
            traffic=traffic,
            retires=retires,
        )
        for number, (least, kv, traffic, retires) in enumerate(drawn)
    ]
    total = max(total_mib * MIB, sum(share.fixed_bytes + share.kv_bytes for share in shares))
    found = target(*shares, total=total)
    assert sum(share.fixed_bytes + found[share.owner] for share in shares) <= total
    for share in shares:
        assert found[share.owner] >= min(share.least_bytes, share.kv_bytes)
        assert not share.retires or found[share.owner] >= share.kv_bytes
    rest(*shares, total=total)
