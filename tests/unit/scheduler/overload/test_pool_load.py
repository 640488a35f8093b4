"""Overload and gray failure through a whole term: who is refused, who keeps its promise, who gets no work."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import (
    DeadlineUnmeetable,
    OverCommitment,
    Overloaded,
    QueueFull,
    ShareExceeded,
    VersionFailing,
)
from services.core.records import Priority
from services.gateway.faces.openai.errors import error_headers
from services.rpc.convert.scheduler import pool_to_proto
from services.rpc.status import to_proto
from services.scheduler.policy.overload.shedding import SheddingPolicy, ShedRank, shed_rank
from services.scheduler.queue.index import QueueLimits
from services.scheduler.queue.report import Now, pools_of
from services.scheduler.term import TermSettings
from tests.unit.scheduler.model import DIGEST
from tests.unit.scheduler.plant import TICK_S, Asked, Plant

# A request is 100 tokens; two workers of 1,000 tokens per second do 20 of them per second.
CAPACITY = 20.0


class Load:
    """Arrivals of some classes at steady rates, per second."""

    def __init__(self, plant: Plant, **rates: float) -> None:
        self.plant = plant
        self.rates = rates
        self.due = dict.fromkeys(rates, 0.0)
        self.made: dict[str, list[Asked]] = {name: [] for name in rates}

    def __call__(self) -> None:
        for name, rate in self.rates.items():
            self.due[name] += rate * TICK_S
            while self.due[name] >= 1.0:
                self.due[name] -= 1.0
                self.made[name].append(self.plant.ask(Priority(name), tenant=name))


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def test_a_burst_of_ten_times_costs_the_low_class_and_not_the_high_one() -> None:
    plant = Plant(2)
    usual = Load(plant, interactive=5.0, standard=10.0)
    plant.run(30, usual)
    assert all(one.error is None for one in plant.asked.values())
    burst = Load(plant, interactive=5.0, standard=10.0 * CAPACITY)
    plant.run(30, burst)
    after = Load(plant, interactive=5.0, standard=10.0)
    plant.run(30, after)
    plant.run(40)
    interactive = burst.made["interactive"]
    assert all(one.error is None for one in interactive)
    assert p95([one.wait_s for one in interactive]) <= SheddingPolicy().targets.interactive_s
    refused = [one for one in burst.made["standard"] if one.error is not None]
    assert len(refused) > len(burst.made["standard"]) / 2
    for one in refused:
        assert isinstance(one.error, Overloaded)
        assert one.error.retry_after_s is not None
        assert one.error.retry_after_s >= 1.0
        assert one.refused_s is not None
        assert one.refused_s - one.at_s < 1.0, "refused early, not after a wait"
    served = [one for one in burst.made["standard"] if one.error is None]
    assert p95([one.wait_s for one in served]) <= 1.5 * SheddingPolicy().targets.standard_s
    assert len(served) >= 0.8 * 30 * (CAPACITY - 5.0), "the pool is kept busy"
    assert all(one.error is None for one in after.made["standard"][-100:]), "over when the burst is"


def test_batch_goes_before_anything_else_of_the_pool() -> None:
    plant = Plant(2)
    warm(plant)
    for _ in range(100):
        plant.ask(Priority.BATCH)
    plant.run(TICK_S)
    waiting = [one for one in plant.asked.values() if one.granted_s is None and one.error is None]
    assert waiting
    load = Load(plant, standard=5 * CAPACITY)
    plant.run(15, load)
    shed = [one for one in plant.asked.values() if one.error is not None]
    assert [one.spec.priority for one in shed[:1]] == [Priority.BATCH]
    first = next(one.refused_s for one in shed if one.spec.priority is Priority.STANDARD)
    assert first is not None
    assert all(
        one.granted_s is not None or one.refused_s is not None
        for one in waiting
        if one.spec.priority is Priority.BATCH and one.at_s < first
    ), "no batch waits while a standard request is refused"


def warm(plant: Plant) -> None:
    """Let the pool be busy until its throughput is known, and then done."""
    plant.run(10, Load(plant, standard=0.55 * CAPACITY * len(plant.machines)))
    while any(one.granted_s is None and one.error is None for one in plant.asked.values()):
        plant.run(1)
    plant.run(2)
    plant.asked.clear()


@given(seed=st.integers(0, 10**6), workers=st.integers(1, 3))
@settings(max_examples=6, deadline=None)
def test_there_is_no_class_inversion(seed: int, workers: int) -> None:
    """When something is refused for the pool's sake, nothing of a lower rank waits there."""
    rng = Random(seed)
    plant = Plant(workers, settings=TermSettings(queue=QueueLimits(max_per_pool=rng.choice((20, 8192)))))
    warm(plant)
    refused: list[Asked] = []
    plant.on_refused = refused.append

    def worth(one: Asked) -> tuple[ShedRank, bool]:
        spec = one.spec
        rank = shed_rank(spec.priority, over_quota=spec.over_quota, begun=spec.begun)
        return rank, spec.attempt == 0

    def arrive() -> None:
        for _ in range(rng.randrange(4 * workers)):
            plant.ask(
                rng.choice(list(Priority)),
                tenant=rng.choice("abc"),
                prompt=rng.randrange(1, 200),
                output=rng.randrange(1, 200),
                attempt=rng.choice((0, 0, 1, 3)),
                over_quota=rng.random() < 0.2,
                begun=rng.random() < 0.1,
            )
        check()

    def check() -> None:
        waiting = [one for one in plant.asked.values() if one.granted_s is None and one.error is None]
        # What arrived in this very tick is decided in its end.
        waiting = [one for one in waiting if one.at_s < plant.now_s and not one.spec.begun]
        for one in refused:
            assert one.error is not None
            assert isinstance(one.error, Overloaded | OverCommitment | QueueFull | ShareExceeded)
            own = isinstance(one.error, ShareExceeded)
            lower = [found for found in waiting if found.at_s < one.at_s and worth(found) < worth(one)]
            lower = [found for found in lower if not own or found.spec.tenant_id == one.spec.tenant_id]
            assert not lower, f"{worth(one)} was refused while {worth(lower[0])} waited"
            assert not one.spec.begun or isinstance(one.error, QueueFull | ShareExceeded)
        refused.clear()

    plant.run(10, arrive)


def test_above_the_committed_rate_a_tenant_goes_first_with_a_reason_of_its_own() -> None:
    plant = Plant(2)
    warm(plant)
    made: dict[str, list[Asked]] = {"greedy": [], "modest": []}

    def arrive() -> None:
        if round(plant.now_s / TICK_S) % 2:
            made["modest"].append(plant.ask(tenant="modest", committed_tokens_per_minute=10**9))
        for _ in range(5):
            made["greedy"].append(plant.ask(tenant="greedy", committed_tokens_per_minute=1000))

    plant.run(40, arrive)
    refused = {name: [one for one in found if one.error is not None] for name, found in made.items()}
    assert len(refused["greedy"]) > 100
    assert any(isinstance(one.error, OverCommitment) for one in refused["greedy"])
    assert len(refused["modest"]) <= 0.02 * len(made["modest"])


def test_retries_are_refused_before_first_attempts_and_told_to_wait_longer() -> None:
    plant = Plant(2, settings=TermSettings(shedding=SheddingPolicy(jitter_ratio=0.0)))
    warm(plant)
    made: dict[int, list[Asked]] = {0: [], 2: []}

    def arrive() -> None:
        for attempt, found in made.items():
            found.append(plant.ask(attempt=attempt))

    plant.run(40, arrive)
    shares = {a: sum(one.error is not None for one in found) / len(found) for a, found in made.items()}
    assert shares[2] > 0.5
    assert shares[0] < shares[2] / 2
    waits = {
        attempt: [one.error.retry_after_s or 0.0 for one in found if one.error is not None]
        for attempt, found in made.items()
    }
    assert min(waits[2]) >= 3.0


def test_a_deadline_that_cannot_be_met_is_said_at_once() -> None:
    plant = Plant(1)
    warm(plant)
    for _ in range(60):
        plant.ask()
    plant.run(TICK_S)
    asked = plant.ask(deadline_left_s=0.5)
    plant.run(TICK_S)
    assert isinstance(asked.error, DeadlineUnmeetable)
    assert "deadline" in asked.error.message
    patient = plant.ask(deadline_left_s=25.0)
    plant.run(TICK_S)
    assert patient.error is None


def test_what_has_begun_is_never_shed() -> None:
    plant = Plant(1)
    warm(plant)
    begun = [plant.ask(Priority.BATCH, begun=True) for _ in range(20)]
    plant.run(10, Load(plant, interactive=10 * CAPACITY))
    assert all(one.error is None for one in begun)


def test_a_full_queue_gives_up_the_lowest_first() -> None:
    plant = Plant(1, settings=TermSettings(queue=QueueLimits(max_per_pool=10)))
    plant.run(1)
    batch = [plant.ask(Priority.BATCH, tenant=tenant) for tenant in "abd" for _ in range(9)]
    plant.run(TICK_S)
    batch = [one for one in batch if one.error is None]
    high = plant.ask(Priority.INTERACTIVE, tenant="c")
    low = plant.ask(Priority.BATCH, tenant="c")
    plant.run(TICK_S)
    assert high.error is None
    assert isinstance(low.error, QueueFull)
    shed = [one for one in batch if isinstance(one.error, Overloaded)]
    assert shed == batch[-1:], "the newest"


def test_a_full_share_gives_up_the_lowest_of_its_own_tenant_first() -> None:
    plant = Plant(1, settings=TermSettings(queue=QueueLimits(max_per_pool=20)))
    plant.run(1)
    theirs = [plant.ask(Priority.BATCH, tenant="patient") for _ in range(10)]
    plant.run(TICK_S)
    mine = [plant.ask(Priority.BATCH) for _ in range(18)]
    plant.run(TICK_S)
    mine = [one for one in mine if one.error is None]
    high, low = plant.ask(Priority.INTERACTIVE), plant.ask(Priority.BATCH)
    plant.run(TICK_S)
    assert high.error is None
    assert isinstance(low.error, ShareExceeded)
    assert [one for one in mine if one.error is not None] == mine[-1:], "the newest"
    assert isinstance(mine[-1].error, ShareExceeded)
    assert all(one.error is None for one in theirs)


def test_what_is_too_much_of_one_tenant_costs_others_nothing() -> None:
    plant = Plant(1, settings=TermSettings(queue=QueueLimits(max_per_pool=60)))
    batch = [plant.ask(Priority.BATCH, tenant="patient") for _ in range(28)]
    plant.run(TICK_S)
    greedy = [plant.ask(Priority.INTERACTIVE, tenant="greedy") for _ in range(60)]
    plant.run(TICK_S)
    assert sum(isinstance(one.error, ShareExceeded) for one in greedy) >= 20
    assert all(one.error is None for one in batch)


def test_to_say_that_one_comes_again_is_no_claim_on_others() -> None:
    """A retry is served by a stricter limit, and costs only itself."""
    plant = Plant(1)
    warm(plant)
    batch = [plant.ask(Priority.BATCH) for _ in range(20)]
    for _ in range(70):  # seven seconds of work, of ten that a standard request may wait
        plant.ask()
    plant.run(TICK_S)
    assert all(one.error is None for one in plant.asked.values())
    again = [plant.ask(attempt=1000) for _ in range(10)]
    plant.run(TICK_S)
    assert all(one.error is None for one in batch)
    assert all(one.error is None for one in again), "nothing is refused while a lower class waits"


def test_a_class_that_keeps_being_overtaken_is_told_a_longer_wait() -> None:
    """What is let in waits about as long as it was told, though much of a higher class keeps coming."""
    plant = Plant(2)
    warm(plant)
    load = Load(plant, interactive=0.7 * CAPACITY, standard=0.6 * CAPACITY)
    plant.run(60, load)
    plant.run(30)
    known_s = load.made["standard"][0].at_s + 15.0  # by then it is seen how much of the higher one comes
    served = [one for one in load.made["standard"] if one.error is None]
    later = [one.wait_s for one in served if one.at_s > known_s]
    assert all(one.error is None for one in load.made["interactive"])
    assert all(one.refused_s - one.at_s < 1.0 for one in load.made["standard"] if one.refused_s is not None)
    assert p95(later) <= 1.25 * SheddingPolicy().targets.standard_s
    assert len(served) >= 60 * 0.2 * CAPACITY, "what is left of the pool is used"


def test_a_weight_that_is_taken_back_counts_no_more() -> None:
    plant = Plant(1)
    for weight, kept in ((4.0, {"a": 4.0}), (1.0, {})):
        for _ in range(20):
            plant.ask(tenant="a", tenant_weight=weight)
        plant.run(TICK_S)
        assert plant.term.overload._pools[DIGEST].weights == kept


def test_a_version_that_fails_sends_nobody_away_for_long_nor_all_at_once() -> None:
    settings = TermSettings(shedding=SheddingPolicy(max_retry_after_s=3.0))
    plant = Plant(6, settings=settings)
    plant.run(5)
    for number, name in enumerate([*plant.machines] * 3):
        plant.ask(excluded_workers=(name,), choice=number, begun=True)
    plant.run(TICK_S)
    found = [plant.ask() for _ in range(20)]
    plant.run(TICK_S)
    waits = [one.error.retry_after_s or 0.0 for one in found if isinstance(one.error, VersionFailing)]
    assert len(waits) == 20
    assert len(set(waits)) == 20
    assert all(3.0 <= wait <= 4.5 for wait in waits)


def test_pressure_is_told_while_there_is_any() -> None:
    plant = Plant(2)
    warm(plant)
    plant.run(2)
    assert plant.term.overload.pressures() == ()
    plant.run(5, Load(plant, standard=3 * CAPACITY))
    (found,) = plant.term.overload.pressures()
    assert found.digest == DIGEST
    assert 0.1 < found.pressure_ratio <= 1.0
    assert found.predicted_wait_s > 1.0
    plant.run(1.5)
    assert plant.session.pressures, "and with the next beat it goes to gateways"


def test_a_slow_worker_is_found_and_gets_almost_nothing() -> None:
    plant = Plant(4)
    load = Load(plant, standard=CAPACITY)
    plant.run(30, load)
    plant.machines["w1"].slowness = 3.0
    slow_s = plant.now_s
    while not any(found.state == "ejected" for found in plant.term.health.worker_health()):
        plant.run(0.25, load)
        assert plant.now_s - slow_s <= 15.0
    ejected_s = plant.now_s
    assert {one.worker_id for one in plant.term.health.worker_health() if one.state == "ejected"} == {"w1"}
    plant.run(120, load)
    since = [one for one in plant.asked.values() if one.granted_s is not None and one.granted_s > ejected_s]
    share = sum(one.worker_id == "w1" for one in since) / len(since)
    assert share < 0.05
    assert share > 0.0, "it is probed"


def test_an_ejected_worker_gets_nothing_and_a_probed_one_little_though_all_others_are_full() -> None:
    plant = Plant(4)
    load = Load(plant, standard=CAPACITY)
    plant.run(30, load)
    plant.machines["w1"].slowness = 3.0
    plant.run(15, load)
    heavy = Load(plant, standard=4 * CAPACITY)
    given: list[float] = []
    told: set[tuple[str, str]] = set()
    for _ in range(round(60 / TICK_S)):
        before = plant.machines["w1"].granted
        plant.run(TICK_S, heavy)
        found = next(found for found in plant.term.health.worker_health() if found.worker_id == "w1")
        told.add((found.state, found.why))
        if plant.machines["w1"].granted > before:
            given.append(plant.now_s)
            assert (found.state, found.why) == ("probing", "probed"), "barred by its probe, and not before it"
    assert {("ejected", "ejected"), ("probing", "probed")} <= told
    assert told <= {("ejected", "ejected"), ("probing", "probed"), ("probing", "")}
    assert all(later - earlier >= 2.0 - TICK_S for earlier, later in itertools.pairwise(given))


def test_a_burst_that_there_is_room_for_is_not_shed() -> None:
    """What arrives in one turn is placed as far as there is room before anything of it is refused."""
    plant = Plant(2, slots=256)
    warm(plant)
    found = [plant.ask(prompt=100, output=100) for _ in range(200)]
    plant.run(TICK_S)
    assert all(one.granted_s is not None for one in found)


def test_a_burst_on_a_pool_of_unknown_speed_is_cut_as_soon_as_that_is_known() -> None:
    plant = Plant(1)
    found = [plant.ask() for _ in range(600)]  # a minute of work
    plant.run(6)
    refused = [one for one in found if one.error is not None]
    assert {type(one.error) for one in refused} == {Overloaded}
    assert 350 <= len(refused) <= 500
    newest = found[len(found) - len(refused) :]
    assert refused == newest or {id(one) for one in refused} == {id(one) for one in newest}
    plant.run(30)
    assert all(one.wait_s <= 20.0 for one in found if one.error is None)


@pytest.mark.parametrize("seed", range(6))
def test_an_objective_that_shapes_serving_reaches_verdict_shedding_and_pressure_alike(seed: int) -> None:
    """A burst is judged, shed and measured by one target, above that of its class or below."""
    rng = Random(seed)
    target_s = rng.choice([rng.uniform(0.02, 0.5), rng.uniform(2.0, 8.0), rng.uniform(20.0, 28.0)])
    plant = Plant(1)
    warm(plant)
    count = rng.randint(240, 300)  # 24 to 30 s of work: beyond 1.5 times the class's 10 s
    found = [plant.ask(ttft_target_s=target_s) for _ in range(count)]
    plant.run(TICK_S)
    (pool,) = plant.term.overload.pressures()
    rate = plant.term.overload._rate(DIGEST, plant.term.overload._pools[DIGEST])
    assert rate is not None
    waiting_s = plant.term.overload._pools[DIGEST].backlog.total(Priority.STANDARD) / rate
    assert pool.pressure_ratio == pytest.approx(min(1.0, waiting_s / target_s))
    plant.run(6)
    refused = [one.error for one in found if one.error is not None]
    assert {type(one) for one in refused} <= {Overloaded}
    allowed_s = 1.5 * target_s
    if count * 0.1 < target_s:
        assert refused == []
    else:
        assert 0.1 * (count - len(refused)) <= allowed_s + 1.5, "what waits is cut to the target"
    for one in refused:
        wait_s, limit_s = float(one.metadata["wait_s"]), float(one.metadata["limit_s"])
        assert wait_s > limit_s == pytest.approx(target_s, rel=1e-3)
        assert f"the predicted wait is {wait_s:.3g} s, longer than {target_s:.3g} s" in one.message
    plant.run(30)
    assert all(one.wait_s <= 2.0 * target_s + 2.0 for one in found if one.error is None)


def test_a_loose_objective_keeps_a_burst_that_the_class_would_shed() -> None:
    """The same burst with and without: by the class's target most of it is shed within the first second."""
    shed = {}
    for target_s in (None, 28.0):
        plant = Plant(1)
        warm(plant)
        found = [plant.ask(ttft_target_s=target_s) for _ in range(270)]
        plant.run(1)
        shed[target_s] = sum(one.error is not None for one in found)
    assert shed[28.0] == 0
    assert shed[None] > 100


def test_of_two_workers_the_slow_one_is_found() -> None:
    plant = Plant(2)
    load = Load(plant, standard=CAPACITY / 2)
    plant.run(60, load)
    plant.machines["w0"].slowness = 3.0
    plant.run(15, load)
    states = {one.worker_id: one.state for one in plant.term.health.worker_health()}
    assert states == {"w0": "ejected", "w1": "healthy"}


def test_a_slowdown_of_all_takes_nobody_out() -> None:
    plant = Plant(4)
    load = Load(plant, standard=CAPACITY / 4)
    plant.run(40, load)
    for machine in plant.machines.values():
        machine.slowness = 3.0
    plant.run(60, load)
    assert {one.state for one in plant.term.health.worker_health()} == {"healthy"}


def test_a_version_that_loses_everything_is_refused_but_for_trials() -> None:
    plant = Plant(6)
    plant.run(5)
    for number, name in enumerate([*plant.machines] * 3):
        plant.ask(excluded_workers=(name,), choice=number, begun=True)
    plant.run(TICK_S)
    found = [plant.ask() for _ in range(5)]
    plant.run(TICK_S)
    assert all(isinstance(one.error, VersionFailing) for one in found)
    begun = plant.ask(begun=True)
    plant.run(1)
    assert begun.granted_s is not None
    plant.run(6)
    tried = [plant.ask() for _ in range(5)]
    plant.run(TICK_S)
    assert [one.error is None for one in tried] == [True, False, False, False, False]


def test_shedding_can_be_turned_off() -> None:
    plant = Plant(1, settings=TermSettings(shedding=replace(SheddingPolicy(), enabled=False)))
    warm(plant)
    plant.run(10, Load(plant, standard=5 * CAPACITY))
    assert all(one.error is None for one in plant.asked.values())


@pytest.mark.parametrize("seed", range(6))
def test_a_refusal_states_one_wait_in_its_text_its_header_its_details_and_the_queue(seed: int) -> None:
    rng = Random(seed)
    plant = Plant(rng.randint(1, 3))
    warm(plant)
    priority = rng.choice((Priority.STANDARD, Priority.BATCH))
    plant.run(rng.uniform(8, 20), Load(plant, **{priority.value: rng.uniform(3, 6) * 60}))
    asked = [plant.ask(priority, tenant=priority.value) for _ in range(100)]
    plant.run(TICK_S)
    error = asked[-1].error
    assert isinstance(error, Overloaded)
    assert error.retry_after_s is not None
    headers = dict(error_headers(error))
    assert error.message.endswith(f"; retry in {headers[b'retry-after'].decode()} s")
    assert 0.0 <= int(headers[b"retry-after"]) - error.retry_after_s < 1.0
    assert abs(int(headers[b"retry-after-ms"]) / 1000 - error.retry_after_s) < 1e-3
    detail = to_proto(error)
    assert detail.message == error.message
    assert abs(detail.retry_after.ToMilliseconds() - 1000 * error.retry_after_s) <= 1
    assert f"the {priority.value} queue is full, " in error.message
    now = Now(plant.now_s, 0.0)
    (pool,) = pools_of(plant.term.queue, plant.term.fleet, now)
    (wait,) = [found for found in pool.waits if found.priority is priority]
    assert wait.predicted_wait_s == pytest.approx(float(error.metadata["wait_s"]), rel=0.1)
    assert pool.predicted_wait_s == pytest.approx(wait.predicted_wait_s)
    assert pool_to_proto(pool).waits[-1].predicted_wait.ToMilliseconds() > 1000
