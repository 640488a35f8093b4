"""The leader's view of health: what it is told, whom it bars, and that it never bars everybody."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.fleet import PoolSnapshot, ReportSnapshot, SequenceUsage
from services.core.generation import PlaceSpec
from services.core.records import Priority
from services.scheduler.health.worker_health import (
    EJECTED,
    WORKER_FAILING,
    ZONE_FAILING,
    FleetHealth,
    HealthPolicy,
    Ticked,
)
from services.scheduler.policy.step_time import StepModel

DIGEST = "sha256:" + "1" * 64
MODEL = StepModel(10e-3, 0.0, 0.0, 0.0, samples=1000.0)
POOL = PoolSnapshot(DIGEST, 1000, 0, 16, 0, 0, 64, 4096)


class Fleet:
    """Workers that report every half second, in zones of two."""

    def __init__(self, count: int, policy: HealthPolicy | None = None) -> None:
        self.health = FleetHealth(policy or HealthPolicy(), lambda _kind: MODEL)
        self.steps = {f"w{number}": 0 for number in range(count)}
        self.seconds = dict.fromkeys(self.steps, 0.0)
        self.factors = dict.fromkeys(self.steps, 1.0)
        self.zones = {name: f"z{int(name[1:]) // 2}" for name in self.steps}
        self.lives = dict.fromkeys(self.steps, 1)
        self.now_s = 50.0
        self.barred: dict[str, str] = {}
        self.numbers = 0

    def run(self, seconds: float, *, ends: int = 0) -> Ticked:
        found = Ticked()
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            for name in self.steps:
                self.report(name, ends=ends)
            found = self.tick()
        return found

    def tick(self) -> Ticked:
        found = self.health.tick(lambda _digest: list(self.steps), self.now_s)
        for barring in found.barrings:
            if barring.reason:
                self.barred[barring.worker_id] = barring.reason
            else:
                self.barred.pop(barring.worker_id, None)
        return found

    def report(self, name: str, *, ends: int = 0) -> None:
        self.steps[name] += int(50 / self.factors[name])
        self.seconds[name] += 0.5
        usage = [self.ended() for _ in range(ends)]
        pool = replace(POOL, steps=self.steps[name], step_seconds=self.seconds[name])
        self.health.reported(
            ReportSnapshot(
                name, self.lives[name], "h:1", zone=self.zones[name], pools=(pool,), usage=tuple(usage)
            ),
            self.now_s,
        )

    def ended(self) -> SequenceUsage:
        self.numbers += 1
        return SequenceUsage(f"r{self.numbers}", 0, "t", DIGEST, 10, 10, ended=True)

    def lose(self, name: str, count: int = 1) -> None:
        for _ in range(count):
            self.numbers += 1
            self.health.resubmitted(lost(f"r{self.numbers}", name), self.now_s)

    def states(self) -> dict[str, str]:
        return {found.worker_id: found.state for found in self.health.worker_health()}


def lost(request_id: str, *workers: str) -> PlaceSpec:
    return PlaceSpec(
        request_id, 0, "t", Priority.STANDARD, "m", DIGEST, 1, 10, 10, 0, 30.0, b"", excluded_workers=workers
    )


def test_a_slow_worker_is_barred_told_of_and_tried_again() -> None:
    fleet = Fleet(4)
    fleet.run(10)
    fleet.factors["w1"] = 3.0
    fleet.run(15)
    assert fleet.barred == {"w1": EJECTED}
    assert fleet.states() == {"w0": "healthy", "w1": "ejected", "w2": "healthy", "w3": "healthy"}
    found = next(one for one in fleet.health.worker_health() if one.worker_id == "w1")
    assert 2.5 < found.slowness_ratio < 3.5
    assert found.next_probe_s - found.since_s == 30.0
    fleet.factors["w1"] = 1.0
    while fleet.states()["w1"] == "ejected":
        fleet.run(0.5)
        assert fleet.now_s < found.next_probe_s + 1.0
    assert fleet.states()["w1"] == "probing"
    assert fleet.barred == {}
    assert fleet.health.granted("w1", DIGEST, fleet.now_s), "one probe is under way: no other for now"
    fleet.run(10)
    assert fleet.states()["w1"] == "healthy"


def test_lost_sequences_cut_their_worker_off_and_trials_bring_it_back() -> None:
    fleet = Fleet(4)
    fleet.run(5, ends=1)
    fleet.lose("w2", 20)
    news = fleet.run(1)
    assert fleet.barred == {"w2": WORKER_FAILING}
    assert [(change.kind, change.name) for change in news.circuits] == []  # told of by the first tick
    fleet.run(5)
    assert fleet.states()["w2"] == "trial"
    assert fleet.health.granted("w2", DIGEST, fleet.now_s)
    fleet.run(3, ends=1)
    assert fleet.states()["w2"] == "healthy"
    assert fleet.barred == {}


def test_one_loss_counts_once_however_often_it_is_sent() -> None:
    fleet = Fleet(4)
    fleet.run(2)
    for _ in range(50):
        fleet.health.resubmitted(lost("r1", "w2"), fleet.now_s)
    fleet.run(2)
    assert fleet.barred == {}


def test_a_worker_that_drains_refuses_by_intent() -> None:
    fleet = Fleet(4)
    fleet.run(1)
    report = ReportSnapshot("w2", 1, "h:1", draining=True, pools=(POOL,))
    fleet.health.reported(report, fleet.now_s)
    fleet.lose("w2", 50)
    fleet.tick()
    assert fleet.barred == {}


def test_engine_restarts_count_against_their_worker() -> None:
    fleet = Fleet(4)
    fleet.run(2)
    for _ in range(6):
        fleet.steps["w0"] = 0
        fleet.run(0.5)
        fleet.steps["w0"] = 1000
        fleet.run(0.5)
    assert fleet.barred == {"w0": WORKER_FAILING}


def test_a_zone_that_fails_is_left_alone() -> None:
    fleet = Fleet(6)
    fleet.run(2)
    for _ in range(4):  # few for each worker, many for the zone
        fleet.lose("w2")
        fleet.lose("w3")
    fleet.now_s += 12.0  # the workers' counts fade below their own limit
    for _ in range(3):
        fleet.lose("w2")
        fleet.lose("w3")
    fleet.run(0.5)
    assert set(fleet.barred.values()) <= {WORKER_FAILING, ZONE_FAILING}
    assert set(fleet.barred) == {"w2", "w3"}


def test_a_version_that_fails_everywhere_passes_trials_only() -> None:
    fleet = Fleet(6)
    fleet.run(2)
    for name in fleet.steps:
        fleet.lose(name, 4)
    assert fleet.health.failing_s(DIGEST, fleet.now_s) is not None
    fleet.run(6)
    assert fleet.health.failing_s(DIGEST, fleet.now_s) is None
    assert fleet.health.failing_s(DIGEST, fleet.now_s) is not None
    fleet.run(3, ends=2)
    assert fleet.health.failing_s(DIGEST, fleet.now_s) is None


def test_one_worker_that_dies_with_many_does_not_condemn_its_version() -> None:
    fleet = Fleet(2)
    fleet.run(2, ends=1)
    fleet.lose("w0", 64)
    assert fleet.health.failing_s(DIGEST, fleet.now_s) is None


@given(
    count=st.integers(1, 9),
    slow=st.lists(st.integers(0, 8), max_size=9),
    lossy=st.lists(st.integers(0, 8), max_size=40),
)
@settings(max_examples=30, deadline=None)
def test_somebody_always_serves(count: int, slow: list[int], lossy: list[int]) -> None:
    fleet = Fleet(count)
    fleet.run(4)
    for number in slow:
        fleet.factors[f"w{number % count}"] = 4.0
    for number in lossy:
        fleet.lose(f"w{number % count}")
    for _ in range(40):
        fleet.run(1)
        assert len(fleet.barred) < count
        assert len(fleet.barred) <= max(1, count // 2)


def test_what_is_not_heard_of_is_forgotten() -> None:
    fleet = Fleet(3)
    fleet.run(2)
    fleet.now_s += HealthPolicy().forget_s + 1.0
    fleet.tick()
    assert fleet.health.worker_health() == ()


def test_names_of_workers_are_bounded() -> None:
    fleet = Fleet(30, HealthPolicy(max_workers=20))
    for _ in range(3):
        fleet.run(1)
        assert len(fleet.health.worker_health()) <= 20
    assert len(fleet.health._seen) <= 20
