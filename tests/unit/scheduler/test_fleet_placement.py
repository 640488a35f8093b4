"""Placement over a fleet view: what reports and grants teach it of prefixes, speed, zones and prices."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

import pytest

from services.core.fleet import LONG_PROMPT_TOKENS, PoolSnapshot, ReportSnapshot, TenantTokens
from services.core.prefix import PREFIX_BLOCK_TOKENS
from services.scheduler.fleet.view import FleetView
from services.scheduler.fleet.worker import FleetLimits
from services.scheduler.policy.placement.candidate import PlaceQuery, demand_of
from services.scheduler.policy.placement.choose import Chosen, NoWorker, PlacementProfile
from services.scheduler.policy.placement.prefix_index import EXPECTED_S
from services.scheduler.policy.step_time import StepTimes
from tests.unit.scheduler.model import BLOCK, DIGEST

PROFILE = PlacementProfile()
OUTPUT = 64


def prefix(number: int, blocks: int = 32) -> tuple[int, ...]:
    return tuple(1 + number * 10_000 + place for place in range(blocks))


def query(
    chain: tuple[int, ...], *, own: int = 64, zone: str = "", excluded: tuple[str, ...] = ()
) -> PlaceQuery:
    prompt_tokens = len(chain) * PREFIX_BLOCK_TOKENS + own
    return PlaceQuery(demand_of(prompt_tokens, OUTPUT, OUTPUT), excluded, chain, zone)


@dataclass
class Worker:
    """Runs what it is granted for ``run_s``; caches what it ran, if it caches at all."""

    worker_id: str
    caches: bool = True
    zone: str = ""
    cost_per_hour: float = 0.0
    slots: int = 64
    blocks: int = 10_000
    draining: bool = False
    stream: int = 0
    running: deque[tuple[float, int]] = field(default_factory=deque)
    seen: list[int] = field(default_factory=list)
    cached: set[int] = field(default_factory=set)
    added: list[int] = field(default_factory=list)
    steps: int = 0
    step_s: float = 0.01


class Fleet:
    def __init__(self, *workers: Worker, limits: FleetLimits | None = None) -> None:
        self.view = FleetView(1, limits or FleetLimits(), StepTimes())
        self.now_s = 1000.0
        self.rng = Random(5)
        self.workers = {worker.worker_id: worker for worker in workers}
        for number, worker in enumerate(workers):
            worker.stream = number + 1
            self.report(worker)

    def report(self, worker: Worker) -> None:
        while worker.running and worker.running[0][0] <= self.now_s:
            worker.running.popleft()
        worker.steps += 10
        pool = PoolSnapshot(
            DIGEST,
            worker.blocks,
            sum(blocks for _, blocks in worker.running),
            BLOCK,
            len(worker.running),
            0,
            worker.slots,
            100_000,
            steps=worker.steps,
            step_seconds=worker.steps * worker.step_s,
            decode_tokens=worker.steps,
            prefix_added=tuple(worker.added),
        )
        snapshot = ReportSnapshot(
            worker.worker_id,
            1,
            "h:1",
            zone=worker.zone,
            draining=worker.draining,
            pools=(pool,),
            epoch=1,
            grants_seen=tuple(worker.seen),
            device_type="h100",
            cost_per_hour=worker.cost_per_hour,
        )
        worker.added, worker.seen = [], []
        self.view.apply(worker.stream, snapshot, self.now_s)

    def place(self, asked: PlaceQuery, *, start: bool = True, run_s: float = 1.0) -> str:
        found = self.view.choose(DIGEST, asked, PROFILE, self.rng)
        assert isinstance(found, Chosen)
        candidate = self.view.candidates(DIGEST)[found.worker_id]
        assert all(check(asked, candidate) for check in PROFILE.filters)
        grant = self.view.issue(found, asked, digest=DIGEST, route_revision=1, now_s=self.now_s)
        self.view.check_integrity()
        if start:
            worker = self.workers[found.worker_id]
            worker.seen.append(grant.sequence)
            worker.running.append((self.now_s + run_s, grant.kv_blocks))
            if worker.caches:
                worker.added += [name for name in asked.prefix_hashes if name not in worker.cached]
                worker.cached.update(asked.prefix_hashes)
        return found.worker_id

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for worker in self.workers.values():
            self.report(worker)
        self.view.expire(self.now_s)


def fleet_of(count: int, *, caches: bool = True, limits: FleetLimits | None = None) -> Fleet:
    fleet = Fleet(*(Worker(f"w{n}", caches=caches) for n in range(count)), limits=limits)
    for n in range(count):  # each shows whether it caches
        fleet.workers[f"w{n}"].added = [10**9 + n] if caches else []
    fleet.advance(0.1)
    return fleet


def test_long_prompts_of_a_conversation_go_on_where_they_are_cached() -> None:
    """Also beside other long prompts: what these add is short, and takes no long prompt's place."""
    fleet = fleet_of(4)
    chain = prefix(1, 2 * LONG_PROMPT_TOKENS // PREFIX_BLOCK_TOKENS)
    home = fleet.place(query(chain))
    fleet.advance(2.0)
    others = [fleet.place(query(prefix(10 + n, len(chain))), start=False) for n in range(4)]
    assert sorted(others) == sorted(fleet.workers), "one on each"
    for _ in range(4):
        assert fleet.place(query(chain), start=False) == home
    assert fleet.view.candidates(DIGEST)[home].long_prefills == 1


def test_a_cold_prefix_sticks_to_its_worker() -> None:
    fleet = fleet_of(8)
    for number in range(10):
        places = []
        for _ in range(20):
            places.append(fleet.place(query(prefix(number))))
            fleet.advance(2.0)
        assert Counter(places).most_common(1)[0][1] >= 19


def test_a_prefix_with_most_of_the_load_spreads_to_as_many_as_it_needs_and_cold_ones_stick() -> None:
    fleet = fleet_of(8)
    hot: Counter[str] = Counter()
    cold: dict[int, Counter[str]] = {number: Counter() for number in range(1, 11)}
    for turn in range(600):
        for _ in range(4):  # 80 in a second, for 3 s each: 240 at a time, where a worker takes 64
            hot[fleet.place(query(prefix(0)), run_s=3.0)] += 1
        number = 1 + turn % 10
        cold[number][fleet.place(query(prefix(number)), run_s=3.0)] += 1
        fleet.advance(0.05)
    shares = sorted(hot.values(), reverse=True)
    assert sum(share >= 0.05 * hot.total() for share in shares) >= 4, hot
    assert shares[0] <= 0.5 * hot.total()
    stuck = sum(count.most_common(1)[0][1] for count in cold.values())
    assert stuck >= 0.8 * sum(count.total() for count in cold.values())
    tokens = fleet.view.prefix_tokens
    assert tokens.predicted / tokens.granted > 0.9, "spreading costs each worker one computation of it"


def test_a_hot_prefix_that_one_worker_can_carry_stays_there() -> None:
    fleet = fleet_of(8)
    places: Counter[str] = Counter()
    for _ in range(200):
        places[fleet.place(query(prefix(0)), run_s=0.5)] += 1
        fleet.advance(0.2)
    assert places.most_common(1)[0][1] >= 190


def test_a_burst_of_one_new_prefix_finds_one_place_before_any_report() -> None:
    fleet = fleet_of(8)
    places = Counter(fleet.place(query(prefix(3)), start=False) for _ in range(6))
    assert places.most_common(1)[0][1] >= 5
    fleet.now_s += EXPECTED_S
    fleet.advance(EXPECTED_S)
    assert fleet.view.prefixes.match(prefix(3)) is None, "nothing came of it"


def test_workers_that_show_no_cache_are_not_preferred() -> None:
    fleet = fleet_of(8, caches=False)
    places: Counter[str] = Counter()
    for _ in range(80):
        places[fleet.place(query(prefix(3)))] += 1
        fleet.advance(1.0)
    assert places.most_common(1)[0][1] <= 30
    assert fleet.view.prefix_tokens.predicted == 0


def test_switched_off_nothing_is_kept_or_preferred() -> None:
    fleet = fleet_of(8, limits=FleetLimits(prefix_blocks=0))
    places = Counter(fleet.place(query(prefix(3))) for _ in range(80))
    assert places.most_common(1)[0][1] <= 30
    fleet.advance(1.0)
    assert len(fleet.view.prefixes) == 0


def test_a_new_stream_says_all_and_another_life_nothing() -> None:
    fleet = fleet_of(2)
    worker = fleet.workers["w0"]
    worker.added = list(prefix(1))
    fleet.advance(0.1)
    assert fleet.view.prefixes.blocks_on("w0", prefix(1)) == 32
    worker.stream, worker.added = 10, list(prefix(2))
    fleet.advance(0.1)
    assert fleet.view.prefixes.blocks_on("w0", prefix(1)) == 0
    assert fleet.view.prefixes.blocks_on("w0", prefix(2)) == 32
    fleet.view.check_integrity()
    fleet.view.expire(fleet.now_s + 40.0)
    assert fleet.view.workers == 0
    assert fleet.view.prefixes.match(prefix(2)) is None
    fleet.view.check_integrity()


@pytest.mark.parametrize("why", ["draining", "excluded", "barred", "silent", "full"])
def test_a_holder_that_may_not_be_used_is_not(why: str) -> None:
    fleet = fleet_of(12)
    holder = fleet.workers["w7"]
    holder.added = list(prefix(1))
    fleet.advance(0.1)
    assert fleet.place(query(prefix(1)), start=False) == "w7"
    if why == "draining":
        holder.draining = True
    elif why == "full":
        holder.running.extend([(10**9, 1)] * holder.slots)
    fleet.advance(0.1)
    if why == "barred":
        assert fleet.view.bar("w7", DIGEST, barred=True)
        assert not fleet.view.bar("w7", DIGEST, barred=True)
    elif why == "silent":
        del fleet.workers["w7"]
        fleet.advance(2.4)
        fleet.advance(2.4)
    asked = query(prefix(1), excluded=("w7",) if why == "excluded" else ())
    for _ in range(20):
        assert fleet.place(asked, start=False) != "w7"
    if why == "barred":
        assert fleet.view.bar("w7", DIGEST, barred=False)
        assert fleet.place(asked, start=False) == "w7"


def test_the_one_holder_with_room_is_found_among_many_without() -> None:
    fleet = fleet_of(40)
    for n in range(20):
        fleet.workers[f"w{n}"].added = list(prefix(1))
        if n != 13:
            fleet.workers[f"w{n}"].running.extend([(10**9, 1)] * 64)
    fleet.advance(0.1)
    for _ in range(20):
        assert fleet.place(query(prefix(1)), start=False) == "w13"


def test_with_no_other_worker_a_barred_one_is_missing_and_says_so() -> None:
    fleet = fleet_of(1)
    fleet.view.bar("w0", DIGEST, barred=True)
    found = fleet.view.choose(DIGEST, query(()), PROFILE, fleet.rng)
    assert isinstance(found, NoWorker)
    assert (found.never_fits, found.waits_for_room) == (False, False)
    assert found.rejections.counts == (("not_ejected", 1),)
    assert not fleet.view.room(DIGEST).serving


def test_the_own_zone_and_the_cheaper_worker_are_preferred_among_equals() -> None:
    fleet = Fleet(*(Worker(f"w{n}", zone="ab"[n % 2], cost_per_hour=2.0 + n // 2) for n in range(4)))
    for _ in range(30):
        fleet.advance(1.0)
    places = Counter(fleet.place(query((), zone="b"), start=False) for _ in range(5))
    assert set(places) == {"w1"}
    fleet.view.check_integrity()


def test_a_slow_worker_is_predicted_slow_and_gets_less() -> None:
    fleet = fleet_of(6)
    for n in range(6):
        fleet.workers[f"w{n}"].step_s = 0.2 if n == 5 else 0.05
    for _ in range(40):
        fleet.advance(1.0)
    assert fleet.view.candidates(DIGEST)["w5"].slowness_ratio == pytest.approx(4.0, rel=0.1)
    places = Counter(fleet.place(query((), own=2000)) for _ in range(60))
    assert places["w5"] <= 4


def test_cached_tokens_that_are_reported_are_counted() -> None:
    fleet = fleet_of(1)
    used = (TenantTokens("t", DIGEST, prefill=100, output=5, cached=64),)
    fleet.view.apply(1, ReportSnapshot("w0", 1, "h:1", epoch=1, tenants=used), fleet.now_s)
    assert (fleet.view.prefix_tokens.reported, fleet.view.prefix_tokens.cached) == (100, 64)
