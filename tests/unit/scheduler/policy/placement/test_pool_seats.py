"""The index of a version's workers against a look at each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from services.core.fleet import LONG_PROMPT_TOKENS
from services.scheduler.policy.placement.candidate import Candidate, PlaceQuery, demand_of, length_filters
from services.scheduler.policy.placement.choose import Chosen, NoWorker, PlacementProfile, choose
from services.scheduler.policy.placement.pool_seats import SERVING, PoolSeats, SeatLevel
from services.scheduler.policy.queue.length import LengthPolicy
from tests.unit.scheduler.policy.room_oracle import room_of

BASE = Candidate("w0", 4096, 4096, block_size=16, slots=8, max_model_len=4096)
PROFILE = PlacementProfile(sample=2, holders=2)


def level(candidate: Candidate) -> SeatLevel:
    reasons = (
        (candidate.ready, "ready"),
        (candidate.reporting, "heard"),
        (not candidate.draining, "not_draining"),
        (not candidate.ejected, "not_ejected"),
    )
    return SeatLevel(
        next((reason for passes, reason in reasons if not passes), SERVING),
        candidate.kv_tokens_room,
        candidate.slots,
        candidate.kv_tokens_total,
        candidate.max_model_len,
        int(candidate.worker_id[1:]),
    )


@dataclass
class Pool:
    """Seats over candidates that the test changes."""

    workers: dict[str, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seats = PoolSeats(lambda worker_id, _: self.workers[worker_id])

    def put(self, candidate: Candidate) -> None:
        self.workers[candidate.worker_id] = candidate
        self.seats.put(candidate.worker_id, level(candidate))

    def take(self, worker_id: str, tokens: int) -> None:
        """A grant."""
        had = self.workers[worker_id]
        self.workers[worker_id] = replace(
            had, kv_tokens_room=had.kv_tokens_room - tokens, slots=had.slots - 1
        )
        self.seats.take(worker_id, level(self.workers[worker_id]))

    def drop(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.seats.drop(worker_id)


candidates = st.builds(
    Candidate,
    worker_id=st.sampled_from([f"w{n}" for n in range(12)]),
    kv_tokens_total=st.sampled_from([1024, 4096]),
    kv_tokens_room=st.integers(-64, 1024),
    block_size=st.just(16),
    slots=st.sampled_from([0, 1, 2, 2]),
    max_model_len=st.sampled_from([0, 512, 4096]),
    queued_prefill_tokens=st.sampled_from([0, 0, 100, 1500, 300_000]),
    ready=st.sampled_from([True] * 15 + [False]),
    draining=st.sampled_from([False] * 15 + [True]),
    reporting=st.sampled_from([True] * 15 + [False]),
    ejected=st.sampled_from([False] * 15 + [True]),
    long_prefills=st.integers(0, 2),
)
queries = st.builds(
    PlaceQuery,
    demand=st.builds(
        demand_of, st.sampled_from([1, 50, 400, 900, 5000]), st.sampled_from([1, 200]), st.just(100)
    ),
    excluded_workers=st.lists(st.sampled_from(["w0", "w1", "w2", "gone"]), max_size=2).map(tuple),
    over_share=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.one_of(candidates, candidates, st.sampled_from([f"w{n}" for n in range(12)])),
        min_size=5,
        max_size=40,
    ),
    asked=st.lists(queries, min_size=1, max_size=4),
    seed=st.integers(0, 3),
    holders=st.lists(st.sampled_from([f"w{n}" for n in range(12)]), max_size=2, unique=True),
)
def test_it_finds_a_worker_exactly_when_a_look_at_each_does(
    changes: list[Candidate | str], asked: list[PlaceQuery], seed: int, holders: list[str]
) -> None:
    pool, rng = Pool(), Random(seed)
    for change in changes:
        if isinstance(change, Candidate):
            pool.put(change)
        elif change in pool.workers:
            pool.drop(change)
        pool.seats.check_integrity()
        assert pool.seats.room() == room_of(pool.workers.values())
    known = [name for name in holders if name in pool.workers]
    for query in [*asked, *asked]:
        found = pool.seats.choose(query, PROFILE, rng, holders=known)
        exact = choose(query, pool.workers.values(), PROFILE, rng)
        if isinstance(exact, Chosen):
            assert isinstance(found, Chosen)
            candidate = pool.workers[found.worker_id]
            assert all(check(query, candidate) for check in PROFILE.filters)
            pool.take(found.worker_id, query.demand.reserved_tokens)
        else:
            assert isinstance(found, NoWorker)
            assert (found.never_fits, found.waits_for_room) == (exact.never_fits, exact.waits_for_room)
            if not exact.waits_for_room:
                assert sorted(found.rejections.counts) == sorted(exact.rejections.counts)
        pool.seats.check_integrity()


def test_what_was_looked_for_everywhere_is_looked_for_again_once_a_seat_is_better() -> None:
    pool = Pool()
    looks: list[str] = []

    def cached(workers: Sequence[str]) -> Mapping[str, int]:
        looks.extend(workers)
        return {}

    for n in range(64):
        pool.put(replace(BASE, worker_id=f"w{n}", queued_prefill_tokens=10**6))
    query = PlaceQuery(demand_of(100, 10, 10))
    larger = PlaceQuery(demand_of(101, 10, 10))
    smaller = PlaceQuery(demand_of(99, 10, 10))
    assert isinstance(pool.seats.choose(query, PROFILE, Random(1), cached_tokens=cached), NoWorker)
    assert len(looks) > 64
    looks.clear()
    assert isinstance(pool.seats.choose(larger, PROFILE, Random(1), cached_tokens=cached), NoWorker)
    assert not looks
    pool.seats.choose(smaller, PROFILE, Random(1), cached_tokens=cached)
    assert len(looks) > 64, "what asks for less may fit"
    pool.put(replace(BASE, worker_id="w9"))
    found = pool.seats.choose(query, PROFILE, Random(1), cached_tokens=cached)
    assert isinstance(found, Chosen)
    assert found.worker_id == "w9"


def test_that_one_that_gives_way_finds_nobody_says_nothing_of_the_others() -> None:
    pool = Pool()
    for n in range(64):
        pool.put(replace(BASE, worker_id=f"w{n}", queued_prefill_tokens=1500))
    query = PlaceQuery(demand_of(1000, 10, 10))
    polite = replace(query, over_share=True)
    assert isinstance(pool.seats.choose(polite, PROFILE, Random(1)), NoWorker)
    assert isinstance(pool.seats.choose(query, PROFILE, Random(1)), Chosen)
    assert isinstance(pool.seats.choose(polite, PROFILE, Random(1)), NoWorker)


@pytest.mark.parametrize(("cached_tokens", "is_taken"), [(5000 - LONG_PROMPT_TOKENS, False), (1000, True)])
def test_a_long_prompt_goes_past_long_prefills_where_enough_of_it_is_cached(
    cached_tokens: int, is_taken: bool
) -> None:
    pool = Pool()
    busy = replace(BASE, kv_tokens_total=10**5, kv_tokens_room=10**5, max_model_len=0, long_prefills=2)
    for n in range(20):
        pool.put(replace(busy, worker_id=f"w{n}"))

    def cached(workers: Sequence[str]) -> Mapping[str, int]:
        return {"w3": cached_tokens} if "w3" in workers else {}

    query = PlaceQuery(demand_of(5000, 10, 10))
    for _ in range(2):  # with and without a look at every one that was futile
        found = pool.seats.choose(query, PROFILE, Random(1), holders=("w3",), cached_tokens=cached)
        assert isinstance(found, Chosen) == is_taken
        assert isinstance(pool.seats.choose(query, PROFILE, Random(1)), NoWorker)


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "is_taken"),
    [(2000, 1600, True), (2000, 1000, False), (300, 150, True), (300, 149, False), (300, 0, False)],
)
def test_what_is_nearly_all_cached_goes_behind_any_backlog_there(
    prompt_tokens: int, cached_tokens: int, is_taken: bool
) -> None:
    pool = Pool()
    for n in range(20):
        pool.put(replace(BASE, worker_id=f"w{n}", queued_prefill_tokens=10**6))
    query = PlaceQuery(demand_of(prompt_tokens, 10, 10))
    profile = dataclasses.replace(
        PROFILE, prompt_filters=length_filters(LengthPolicy(min_backlog_tokens=512))
    )
    found = pool.seats.choose(
        query, profile, Random(1), holders=("w3",), cached_tokens=lambda _: {"w3": cached_tokens}
    )
    assert isinstance(found, Chosen) == is_taken


def test_what_a_longer_prompt_was_refused_a_shorter_one_may_get() -> None:
    pool = Pool()
    for n in range(20):
        pool.put(
            replace(BASE, worker_id=f"w{n}", kv_tokens_total=10**5, kv_tokens_room=10**5, max_model_len=0)
        )
        pool.put(replace(pool.workers[f"w{n}"], long_prefills=2))
    long = PlaceQuery(demand_of(5000, 10, 10))
    assert isinstance(pool.seats.choose(long, PROFILE, Random(1)), NoWorker)
    short = PlaceQuery(demand_of(4000, 3000, 3000))
    assert isinstance(pool.seats.choose(short, PROFILE, Random(1)), Chosen)


def test_excluded_workers_are_no_reason_to_wait() -> None:
    pool = Pool()
    pool.put(replace(BASE, worker_id="w0"))
    pool.put(replace(BASE, worker_id="w1", kv_tokens_total=64, kv_tokens_room=64))
    pool.put(replace(BASE, worker_id="w2", draining=True))
    query = PlaceQuery(demand_of(500, 10, 10), excluded_workers=("w0", "w0", "gone"))
    for _ in range(2):
        found = pool.seats.choose(query, PROFILE, Random(1))
        assert isinstance(found, NoWorker)
        assert (found.never_fits, found.waits_for_room) == (True, False)
        counts = {"not_draining": 1, "not_excluded": 1, "fits_when_empty": 1}
        assert dict(found.rejections.counts) == counts
    assert isinstance(pool.seats.choose(replace(query, excluded_workers=()), PROFILE, Random(1)), Chosen)


def test_few_of_many_are_looked_at_and_the_holders_among_them() -> None:
    pool = Pool()
    for n in range(1000):
        pool.put(replace(BASE, worker_id=f"w{n}"))
    rng = Random(1)
    looked: list[int] = []

    def cached(workers: Sequence[str]) -> Mapping[str, int]:
        looked.append(len(workers))
        assert {"w7", "w8"} <= set(workers)
        return {"w7": 200}

    query = PlaceQuery(demand_of(256, 10, 10))
    for _ in range(50):
        found = pool.seats.choose(query, PlacementProfile(), rng, holders=("w7", "w8"), cached_tokens=cached)
        assert isinstance(found, Chosen)
        assert found.worker_id == "w7"
        assert found.offer.cached_tokens == 200
        assert dict(found.parts(query, PlacementProfile()))["w7"]
    assert max(looked) <= 10


def test_the_sample_spreads_over_all() -> None:
    pool = Pool()
    for n in range(100):
        pool.put(replace(BASE, worker_id=f"w{n}", slots=1000, kv_tokens_total=10**6, kv_tokens_room=10**6))
    rng = Random(1)
    for _ in range(3000):
        found = pool.seats.choose(PlaceQuery(demand_of(100, 10, 10)), PlacementProfile(), rng)
        assert isinstance(found, Chosen)
        pool.take(found.worker_id, 110)
    counts = [1000 - candidate.slots for candidate in pool.workers.values()]
    assert min(counts) >= 12
    assert max(counts) <= 48


@pytest.mark.parametrize("sample", [1, 8, None])
def test_the_one_with_room_is_found_among_a_thousand(sample: int | None) -> None:
    pool = Pool()
    for n in range(1000):
        pool.put(replace(BASE, worker_id=f"w{n}", kv_tokens_room=64))
    pool.put(replace(BASE, worker_id="w500", kv_tokens_room=640))
    found = pool.seats.choose(PlaceQuery(demand_of(500, 10, 10)), PlacementProfile(sample=sample), Random(1))
    assert isinstance(found, Chosen)
    assert found.worker_id == "w500"


def test_a_pool_that_shrinks_keeps_no_heap_of_what_it_was() -> None:
    pool = Pool()
    for n in range(40):
        pool.put(replace(BASE, worker_id=f"w{n}"))
    for turn in range(3):
        for n in range(40):
            pool.put(replace(BASE, worker_id=f"w{n}", kv_tokens_room=2048 + turn))
    for n in range(39):
        pool.seats.drop(f"w{n}")
        pool.seats.check_integrity()
    assert pool.seats.room().room_tokens == 2050


def test_room_does_not_make_up_for_a_model_length_that_is_too_short() -> None:
    pool = Pool()
    for n in range(20):
        pool.put(replace(BASE, worker_id=f"w{n}", kv_tokens_room=BASE.kv_tokens_total, max_model_len=64))
    found = pool.seats.choose(PlaceQuery(demand_of(32, 64, 1)), PROFILE, Random(1))
    assert isinstance(found, NoWorker)
    assert found.never_fits
