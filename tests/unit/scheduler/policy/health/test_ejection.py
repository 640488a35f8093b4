"""Slow workers are found and tried again; noise, idleness and a slowdown of all eject nobody."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.health.ejection import Ejection, EjectionChange, EjectionPolicy, EjectionState

POLICY = EjectionPolicy()
STEP_S = 0.02


class Pool:
    """Workers that are all busy and report every half second; ``factor`` is how slow each is."""

    def __init__(self, count: int, policy: EjectionPolicy = POLICY, *, kind: str = "gpu") -> None:
        self.ejection = Ejection(policy)
        self.factors = {f"w{number}": 1.0 for number in range(count)}
        self.now_s = 100.0
        self.kind = kind
        self.grants = dict.fromkeys(self.factors, 0)
        self.idle: set[str] = set()
        self.trusted = True
        self.news: list[tuple[float, EjectionChange]] = []

    def run(self, seconds: float, *, noise: Callable[[], float] = lambda: 1.0, serve: bool = True) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            for worker_id, factor in self.factors.items():
                if serve and not self.ejection.barred(worker_id, self.now_s):
                    self.grants[worker_id] += 1
                    self.ejection.granted(worker_id, self.now_s)
                self._report(worker_id, factor * noise())
            for change in self.ejection.tick(tuple(self.factors), self.now_s):
                self.news.append((self.now_s, change))

    def _report(self, worker_id: str, factor: float) -> None:
        steps = 0 if worker_id in self.idle else int(0.5 / (STEP_S * factor))
        self.ejection.observe(
            worker_id,
            kind=self.kind,
            steps=steps,
            measured_s=steps * STEP_S * factor,
            predicted_s=steps * STEP_S,
            trusted=self.trusted,
            now_s=self.now_s,
        )

    def standing(self, worker_id: str) -> EjectionState:
        found = {health.worker_id: health.standing for health in self.ejection.health()}
        return found[worker_id]

    @property
    def out(self) -> list[str]:
        return [name for name in self.factors if self.standing(name) is not EjectionState.HEALTHY]


def test_a_worker_three_times_slow_is_found_within_fifteen_seconds() -> None:
    pool = Pool(8)
    pool.run(20)
    pool.factors["w3"] = 3.0
    pool.run(15)
    assert pool.out == ["w3"]
    assert pool.news[0][0] - 120.0 <= 12.0


def test_of_two_workers_the_model_decides() -> None:
    pool = Pool(2)
    pool.run(20)
    pool.factors["w1"] = 3.0
    pool.run(15)
    assert pool.out == ["w1"]


def test_a_model_that_is_not_fitted_decides_nothing() -> None:
    pool = Pool(2)
    pool.trusted = False
    pool.factors["w1"] = 3.0
    pool.run(60)
    assert pool.out == []


@given(count=st.integers(1, 12), factor=st.floats(0.2, 20.0))
@settings(max_examples=40, deadline=None)
def test_a_slowdown_of_all_ejects_nobody(count: int, factor: float) -> None:
    pool = Pool(count)
    pool.run(10)
    pool.factors = dict.fromkeys(pool.factors, factor)
    pool.run(60)
    assert pool.news == []


@given(seed=st.integers(0, 10**6), count=st.integers(2, 12))
@settings(max_examples=30, deadline=None)
def test_equal_workers_with_noise_are_left_alone(seed: int, count: int) -> None:
    """Half-second averages that vary by a factor of 1.5 either way, with bursts of twice that."""
    rng = Random(seed)

    def noise() -> float:
        burst = 2.0 if rng.random() < 0.02 else 1.0
        return burst * math.exp(rng.gauss(0.0, 0.4))

    pool = Pool(count)
    pool.run(120, noise=noise)
    assert pool.news == []


def test_idle_workers_are_not_judged() -> None:
    pool = Pool(4)
    pool.factors["w0"] = 5.0
    pool.idle = {"w0"}
    pool.run(60)
    assert pool.out == []
    assert all(math.isnan(found.ratio) for found in pool.ejection.health() if found.worker_id == "w0")


def test_a_lone_worker_and_one_beside_idle_ones_stay() -> None:
    pool = Pool(1)
    pool.factors["w0"] = 10.0
    pool.run(60)
    assert pool.out == []
    pool = Pool(3)
    pool.idle = {"w1", "w2"}
    pool.factors["w0"] = 10.0
    pool.run(60)
    assert pool.out == []


@given(slow=st.integers(1, 12), count=st.integers(2, 12))
@settings(max_examples=30, deadline=None)
def test_the_cap_holds_and_one_always_serves(slow: int, count: int) -> None:
    pool = Pool(count)
    for number in range(min(slow, count)):
        pool.factors[f"w{number}"] = 3.0 + number
    for _ in range(60):
        pool.run(2)
        assert len(pool.out) <= max(1, math.floor(count * POLICY.max_ejection_ratio))
        assert len(pool.out) < count
        assert any(not pool.ejection.barred(name, pool.now_s) for name in pool.factors)


def test_the_slow_one_gets_less_than_five_percent_afterwards() -> None:
    pool = Pool(4)
    pool.factors["w2"] = 3.0
    pool.run(15)
    assert pool.out == ["w2"]
    before = dict(pool.grants)
    pool.run(300)
    since = {name: pool.grants[name] - before[name] for name in pool.grants}
    assert 0 < since["w2"] < 0.05 * sum(since.values())


def test_probes_are_few_and_far_between() -> None:
    ejection = Ejection(replace(POLICY, base_ejection_time_s=1.0))
    for number in range(40):
        for name in ("a", "b", "c", "d"):
            slow = 4.0 if name == "a" else 1.0
            ejection.observe(
                name, kind="gpu", steps=25, measured_s=0.5 * slow, predicted_s=0.5, now_s=number * 0.5
            )
        if any(found.after is EjectionState.PROBING for found in ejection.tick("abcd", number * 0.5)):
            break
    began_s, probes, grants = number * 0.5, [], 0
    for tick in range(600):  # probed, and silent: nothing says yet how it is
        now_s = began_s + tick * 0.1
        ejection.granted("b", now_s)
        grants += 1
        if not ejection.barred("a", now_s):
            ejection.granted("a", now_s)
            probes.append(now_s)
    assert probes[0] == began_s
    assert all(
        later - earlier >= POLICY.probe_interval_s - 1e-9 for earlier, later in itertools.pairwise(probes)
    )
    assert 5 <= len(probes) <= 2 + POLICY.probe_share_ratio * (grants + len(probes))


def test_each_ejection_is_twice_as_long_and_bounded() -> None:
    pool = Pool(4)
    pool.factors["w0"] = 4.0
    pool.run(1500)
    began = [at_s for at_s, change in pool.news if change.after is EjectionState.EJECTED]
    probed = [at_s for at_s, change in pool.news if change.after is EjectionState.PROBING]
    lengths = [end - start for start, end in zip(began, probed, strict=False)]
    assert [round(length) for length in lengths[:5]] == [30, 60, 120, 240, 300]
    assert max(lengths) <= POLICY.max_ejection_time_s + 1.0


def test_a_recovered_worker_is_probed_and_readmitted() -> None:
    pool = Pool(4)
    pool.factors["w0"] = 3.0
    pool.run(12)
    assert pool.standing("w0") is EjectionState.EJECTED
    pool.factors["w0"] = 1.0
    pool.run(25)
    assert pool.standing("w0") is EjectionState.EJECTED
    pool.run(40)
    assert pool.standing("w0") is EjectionState.HEALTHY
    assert [change.after for _, change in pool.news] == [
        EjectionState.EJECTED,
        EjectionState.PROBING,
        EjectionState.HEALTHY,
    ]


def test_what_it_was_ejected_for_is_forgiven_after_a_while() -> None:
    pool = Pool(4)
    pool.factors["w0"] = 3.0
    pool.run(12)
    pool.factors["w0"] = 1.0
    pool.run(60 + POLICY.forgive_s + 10)
    assert {found.worker_id: found.ejections for found in pool.ejection.health()}["w0"] == 0


def test_a_new_life_proves_itself_before_it_is_readmitted() -> None:
    pool = Pool(4)
    pool.factors["w0"] = 3.0
    pool.run(12)
    pool.factors["w0"] = 1.0
    pool.ejection.restarted("w0", pool.now_s)
    pool.run(1)
    assert pool.standing("w0") is EjectionState.PROBING
    pool.run(15)
    assert pool.standing("w0") is EjectionState.HEALTHY


def test_the_ejected_one_serves_when_no_other_does() -> None:
    pool = Pool(3)
    pool.factors["w0"] = 3.0
    pool.run(15)
    assert pool.out == ["w0"]
    changes = pool.ejection.tick(("w0",), pool.now_s + 0.1)
    assert [(change.worker_id, change.after) for change in changes] == [("w0", EjectionState.HEALTHY)]


def test_types_are_compared_among_themselves() -> None:
    """A model that is wrong by a factor for one type ejects none of it."""
    ejection = Ejection(POLICY)
    names = [f"{kind}{number}" for kind in ("old", "new") for number in range(4)]
    for tick in range(120):
        now_s = tick * 0.5
        for name in names:
            factor = 2.9 if name.startswith("old") else 1.0
            ejection.observe(
                name, kind=name[:3], steps=25, measured_s=0.5 * factor, predicted_s=0.5, now_s=now_s
            )
        assert ejection.tick(names, now_s) == ()


def test_few_long_steps_are_evidence_too() -> None:
    pool = Pool(4, replace(POLICY, min_steps=50))
    pool.factors["w1"] = 40.0  # steps of 0.8 s: less than one per report
    for _ in range(40):
        pool.now_s += 0.5
        for name in pool.factors:
            slow = name == "w1"
            pool.ejection.observe(
                name,
                kind="gpu",
                steps=1 if slow else 25,
                measured_s=0.8 if slow else 0.5,
                predicted_s=STEP_S if slow else 0.5,
                now_s=pool.now_s,
            )
        pool.ejection.tick(tuple(pool.factors), pool.now_s)
    assert pool.out == ["w1"]
