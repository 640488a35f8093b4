"""The index of cached blocks against a naive one, its bound, its memory and what it expects of grants."""

from __future__ import annotations

import gc
import tracemalloc
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.policy.placement.prefix_index import EXPECTED_S, PrefixIndex

WORKERS = [f"w{n}" for n in range(6)]


def chain(family: int, length: int) -> tuple[int, ...]:
    """Families share their first blocks with the family of half their number."""
    shared = chain(family // 2, min(length, 8)) if family > 1 else ()
    return shared + tuple(1 + family * 1000 + place for place in range(len(shared), length))


def holders(
    index: PrefixIndex, names: tuple[int, ...], limit: int, rng: Random | None = None, among: int = -1
) -> list[tuple[str, int]]:
    match = index.match(names)
    return [] if match is None else match.holders(limit, rng or Random(1), among=among)


def held(having: set[int], names: tuple[int, ...]) -> int:
    length = 0
    while length < len(names) and names[length] in having:
        length += 1
    return length


class IndexMachine(RuleBasedStateMachine):
    """Workers that cache whole chains and evict from the ends. Within the bound, every match is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[str, set[int]] = {}
        self.rng = Random(1)

    families = st.integers(1, 12)
    lengths = st.integers(1, 40)
    workers = st.sampled_from(WORKERS)

    @rule(worker=workers, family=families, length=lengths)
    def replace(self, worker: str, family: int, length: int) -> None:
        self.index.replace(worker, chain(family, length))
        self.model[worker] = set(chain(family, length))

    @rule(worker=workers, family=families, length=lengths)
    def add(self, worker: str, family: int, length: int) -> None:
        if worker in self.model:
            new = tuple(name for name in chain(family, length) if name not in self.model[worker])
            self.index.add(worker, new)
            self.model[worker].update(new)

    @precondition(lambda self: any(self.model.values()))
    @rule(worker=workers, family=families, keep=st.integers(0, 40))
    def evict_end(self, worker: str, family: int, keep: int) -> None:
        """No longer chain that the worker has goes through what is evicted."""
        if worker in self.model:
            gone = set(chain(family, 40)[keep:]) & self.model[worker]
            kept = self.model[worker] - gone
            if all(
                held(kept, chain(other, 40)) == len(kept & set(chain(other, 40))) for other in range(1, 13)
            ):
                self.index.discard(worker, tuple(sorted(gone)))
                self.model[worker] = kept

    @rule(worker=workers)
    def drop(self, worker: str) -> None:
        self.index.drop(worker)
        self.model.pop(worker, None)

    @rule(family=families, length=lengths, limit=st.integers(1, 6), mask=st.integers(0, 63))
    def look_up(self, family: int, length: int, limit: int, mask: int) -> None:
        names = chain(family, length)
        exact = {worker: held(having, names) for worker, having in self.model.items()}
        for worker in WORKERS:
            assert self.index.blocks_on(worker, names) == exact.get(worker, 0)
        found = holders(self.index, names, limit, self.rng)
        longest = max(exact.values(), default=0)
        best = sum(blocks == longest > 0 for blocks in exact.values())
        assert min(limit, best) <= len(found) == len(dict(found)) <= limit
        assert all(exact[worker] == blocks > 0 for worker, blocks in found)
        assert all(blocks == longest for _, blocks in found[: min(limit, best)]), "the longest come first"
        some = {worker for n, worker in enumerate(self.model) if mask >> n & 1}
        among = sum(1 << self.index.find_number(worker) for worker in some)
        found = holders(self.index, names, 6, self.rng, among=among)
        assert some.issuperset(worker for worker, _ in found)
        assert max((blocks for _, blocks in found), default=0) == max(
            (exact[worker] for worker in some), default=0
        )

    @invariant()
    def in_order(self) -> None:
        self.index.check_integrity()
        # Rows of workers that went are cleaned later.
        assert len(self.index) >= len(set().union(*self.model.values()))


IndexMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestIndex = IndexMachine.TestCase


def test_a_hole_ends_the_match_before_it_and_never_behind() -> None:
    names = chain(1, 33)
    for hole in range(33):
        index = PrefixIndex()
        index.replace("w0", names)
        index.discard("w0", (names[hole],))
        reached = index.blocks_on("w0", names)
        assert reached <= 33
        if reached:
            assert names[reached - 1] != names[hole]
        # What a search of this chain does not come by is no obstacle to it; no more is claimed than is held.
        assert reached <= hole or hole + 1 not in {32, 33}


def test_the_bound_holds_and_what_is_looked_up_stays() -> None:
    index = PrefixIndex(max_blocks=1000)
    index.replace("w0", ())
    hot = chain(1, 100)
    index.add("w0", hot)
    for n in range(200):
        index.add("w0", tuple(1_000_000 + n * 100 + place for place in range(100)))
        assert index.blocks_on("w0", hot) == 100, "positions that a search relies on stay"
        assert len(index) <= 1000
    index.check_integrity()
    assert index.evicted >= 19_000
    cold = tuple(1_000_000 + place for place in range(100))
    assert index.blocks_on("w0", cold) == 0


def test_given_up_numbers_are_reused_and_name_nobody_before() -> None:
    index = PrefixIndex()
    for n in range(40):
        index.replace(f"w{n}", tuple(range(1 + n, 2001 + n)))
    rng = Random(2)
    for turn in range(400):
        worker = f"w{rng.randrange(40)}"
        index.replace(worker, (10**6 + turn,))
        assert index.blocks_on(worker, (5,)) == 0
        assert index.blocks_on(worker, (10**6 + turn,)) == 1
    index.check_integrity()
    assert len(index._workers) < 40 + 3 * 64, "numbers do not run away"


def test_removal_costs_the_same_whatever_the_worker_held() -> None:
    index = PrefixIndex()
    index.replace("w0", tuple(range(1, 200_001)))
    index.drop("w0")
    assert index.blocks_on("w0", (1,)) == 0
    assert holders(index, (1,), 4) == []
    assert len(index) > 190_000, "its rows are cleaned a few at a time"
    for _ in range(600):
        index.replace("w1", ())
    assert len(index) == 0
    index.check_integrity()


@pytest.mark.parametrize(("blocks", "holders", "limit"), [(65_536, 1, 150), (16_384, 8, 260)])
def test_the_memory_of_a_block_over_1024_workers(blocks: int, holders: int, limit: int) -> None:
    rng = Random(3)
    names = [rng.getrandbits(64) | 1 for _ in range(blocks)]
    share = blocks // 1000
    deltas = [
        (f"w{n}", (names + names)[place : place + share * holders])
        for n, place in enumerate(range(0, blocks, share))
    ]
    del names
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = PrefixIndex(max_blocks=blocks)
    for n in range(1024):
        index.replace(f"w{n}", ())
    for worker, added in deltas:
        # As from the wire: every report makes its own integers.
        index.add(worker, tuple(int(str(name)) for name in added))
    del worker, added
    gc.collect()
    took = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(index) == blocks
    print(f"{took / blocks:.0f} bytes a block")
    assert took / blocks < limit


def test_a_grant_makes_its_prefix_expected_for_a_while_and_only_where_a_cache_was_seen() -> None:
    index = PrefixIndex()
    index.replace("caches", (5,))
    index.replace("never", ())
    names = chain(1, 100)
    index.expect("caches", names)
    index.expect("never", names)
    index.expect("unknown", names)
    assert [worker for worker, _ in holders(index, names, 4)] == ["caches"]
    for length in range(1, 101):
        expected = index.blocks_on("caches", chain(1, length))
        assert length * 7 / 8 <= expected <= length
    assert index.blocks_on("never", names) == 0
    index.advance(EXPECTED_S / 2)
    assert index.blocks_on("caches", names) >= 88
    index.advance(EXPECTED_S)
    assert index.blocks_on("caches", names) == 0


def test_what_is_expected_is_bounded_and_goes_with_its_worker() -> None:
    index = PrefixIndex(max_expected=1000)
    index.replace("w0", (1,))
    for n in range(5000):
        index.expect("w0", chain(n + 2, 30))
        index.check_integrity()
        if n > 20:
            break
    for n in range(5000):
        index.expect("w0", (10**9 + n,))
    index.check_integrity()
    last = (10**9 + 4999,)
    assert index.blocks_on("w0", last) == 1
    index.drop("w0")
    index.replace("w1", ())
    assert holders(index, last, 4) == [], "its number is another's now"
