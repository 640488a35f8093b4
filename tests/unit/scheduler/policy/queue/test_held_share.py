"""Who gives way: only tenants above their share with a standing queue, and never all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.placement.candidate import (
    CHUNK_TOKENS,
    Candidate,
    Demand,
    PlaceQuery,
    length_filters,
)
from services.scheduler.policy.queue.fairness import HeldShares
from services.scheduler.policy.queue.length import LengthPolicy
from services.scheduler.policy.step_time import PRIOR

TENANTS = ("a", "b", "c", "d")
WEIGHTS = (0.5, 1.0, 4.0)
moves = st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans(), st.sampled_from(WEIGHTS)), max_size=120)
MANY = 1 << 30


def holding(counts: dict[str, int], weights: dict[str, float] | None = None) -> HeldShares:
    held = HeldShares()
    for tenant, count in counts.items():
        for _ in range(count):
            held.take(tenant, (weights or {}).get(tenant, 1.0))
    return held


@settings(max_examples=300, deadline=None)
@given(moves)
def test_who_gives_way_is_what_the_counts_say(drawn: list[tuple[str, bool, float]]) -> None:
    held = HeldShares()
    counts: dict[str, int] = {}
    weights: dict[str, float] = {}
    for tenant, takes, weight in drawn:
        if takes:
            held.take(tenant, weight)
            counts[tenant], weights[tenant] = counts.get(tenant, 0) + 1, weight
        elif counts.get(tenant):
            held.release(tenant)
            counts[tenant] -= 1
            if not counts[tenant]:
                del counts[tenant], weights[tenant]
        held.check_integrity()
        assert len(held) == len(counts)
        assert held.sequences == sum(counts.values())
    total = sum(weights.values())
    for tenant in TENANTS:
        share = held.sequences * weights.get(tenant, 0.0) / total if total else 0.0
        for waiting in (0, 1, 7, MANY):
            over = len(counts) > 1 and tenant in counts and counts[tenant] > share and waiting > share
            assert held.over_share(tenant, waiting) == over
    # Work goes on whatever waits: somebody who holds something always takes what room there is.
    assert not counts or not all(held.over_share(tenant, MANY) for tenant in counts)


def test_a_lone_tenant_never_gives_way() -> None:
    assert not holding({"whale": 500}).over_share("whale", MANY)
    left = holding({"whale": 500, "minnow": 1})
    assert left.over_share("whale", MANY)
    left.release("minnow")
    assert not left.over_share("whale", MANY)
    rounded = holding({"whale": 3, "minnow": 1}, {"whale": 0.1, "minnow": 0.2})
    rounded.release("minnow")  # 0.1 + 0.2 - 0.2 is more than 0.1
    assert not rounded.over_share("whale", MANY)


def test_neither_tenants_at_their_share_nor_short_queues_give_way() -> None:
    held = holding({"whale": 30, "minnow": 10})
    assert held.over_share("whale", 21)
    assert not held.over_share("whale", 20), "no more waits than its share of the 40"
    assert not held.over_share("minnow", MANY)
    assert not held.over_share("new", MANY), "it holds nothing yet"
    assert not holding({"a": 20, "b": 20}).over_share("a", MANY)
    assert not holding({"paying": 30, "free": 10}, {"paying": 3.0}).over_share("paying", MANY)


def test_a_placement_that_gives_way_goes_only_where_hardly_a_prompt_is_queued() -> None:
    _, has_prefill_room = length_filters(LengthPolicy(giving_way_backlog_s=0.05))
    limit = round(0.05 * CHUNK_TOKENS / PRIOR.seconds(1, CHUNK_TOKENS, 0, 0))
    least = max(CHUNK_TOKENS, limit)

    def passes(queued: int, *, over_share: bool, uncached: int = 3000) -> bool:
        query = PlaceQuery(Demand(3000, 3100, 3200), over_share=over_share)
        worker = Candidate("w", 100_000, 100_000, 16, 8, 0, queued_prefill_tokens=queued)
        return has_prefill_room(query, worker, uncached)

    assert passes(0, over_share=True), "an idle worker takes it"
    assert passes(least, over_share=True)
    assert not passes(least + 2, over_share=True)
    assert passes(least + 2, over_share=False)
    assert passes(least + 2, over_share=True, uncached=1000), "most of it is cached there"


def test_who_is_below_its_share_with_one_more() -> None:
    assert not holding({}).is_below("a", 1.0)
    assert not holding({"a": 9}).is_below("a", 1.0), "alone"
    held = holding({"a": 9, "b": 1})
    assert held.is_below("b", 1.0)
    assert not held.is_below("a", 1.0)
    assert held.is_below("c", 1.0), "a third of ten"
    assert not held.is_below("c", 0.1), "by weight"
    assert not holding({"a": 1, "b": 1}).is_below("c", 1.0), "nobody has two"
