"""Arrival processes keep their rate and burstiness, and lengths their distribution."""

from __future__ import annotations

import math
import statistics
from itertools import islice, pairwise, takewhile
from random import Random

import pytest

from simulator.lab.load.arrivals import Arrivals, Diurnal, Gamma, Modulated, OnOff, Poisson, Steps
from simulator.lab.load.lengths import Fixed, LogNormal

ROUNDS = 20_000


def gaps(process: Arrivals, *, seed: int = 7, count: int = ROUNDS) -> list[float]:
    times = list(islice(process.times(Random(seed)), count))
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


@pytest.mark.parametrize(
    ("process", "cv"),
    [
        (Poisson(40.0), 1.0),
        (Gamma(40.0, cv=0.5), 0.5),
        (Gamma(40.0, cv=1.0), 1.0),
        (Gamma(40.0, cv=3.0), 3.0),
    ],
)
def test_rate_and_burstiness_are_as_stated(process: Arrivals, cv: float) -> None:
    seen = gaps(process)
    assert min(seen) >= 0
    assert statistics.mean(seen) == pytest.approx(1 / 40, rel=0.06)
    assert statistics.pstdev(seen) / statistics.mean(seen) == pytest.approx(cv, rel=0.08)


def test_on_off_keeps_its_mean_and_is_burstier_than_poisson() -> None:
    process = OnOff(on_rate_per_s=50.0, off_rate_per_s=2.0, mean_on_s=2.0, mean_off_s=6.0)
    seen = gaps(process, count=60_000)
    assert process.mean_rate_per_s == pytest.approx(14.0)
    assert 1 / statistics.mean(seen) == pytest.approx(14.0, rel=0.08)
    assert statistics.pstdev(seen) / statistics.mean(seen) > 1.5


def test_an_off_rate_of_zero_is_silence() -> None:
    seen = gaps(OnOff(on_rate_per_s=1000.0, off_rate_per_s=0.0, mean_on_s=1.0, mean_off_s=10.0), count=5000)
    assert max(seen) > 1.0


def test_diurnal_rate_is_least_at_its_phase_and_most_half_a_period_later() -> None:
    profile = Diurnal(mean_rate_per_s=50.0, swing_ratio=0.8, period_s=100.0, phase_s=10.0)
    times = list(takewhile(lambda at_s: at_s < 1000.0, Modulated(profile).times(Random(3))))
    assert len(times) == pytest.approx(50_000, rel=0.03)
    night = sum(5 <= at_s % 100 < 15 for at_s in times) / 100
    noon = sum(55 <= at_s % 100 < 65 for at_s in times) / 100
    assert night == pytest.approx(50 * 0.2, rel=0.2)
    assert noon == pytest.approx(50 * 1.8, rel=0.1)


@pytest.mark.parametrize(
    "profile", [Diurnal(3.0, 0.9, 60.0, 13.0), Steps.burst(3.0, factor=10.0, from_s=20.0, for_s=5.0)]
)
def test_inverse_of_the_cumulative_rate_is_its_inverse(profile: Diurnal | Steps) -> None:
    assert profile.cumulative(0.0) == pytest.approx(0.0)
    for count in (0.0, 0.5, 17.0, 60.0, 61.0, 209.9, 210.0, 1234.5):
        assert profile.cumulative(profile.inverse(count)) == pytest.approx(count, abs=1e-4)


def test_a_burst_is_ten_times_the_rate_for_its_time() -> None:
    profile = Steps.burst(20.0, factor=10.0, from_s=30.0, for_s=30.0)
    times = list(takewhile(lambda at_s: at_s < 90.0, Modulated(profile).times(Random(5))))
    parts = [sum(from_s <= at_s < from_s + 30 for at_s in times) for from_s in (0, 30, 60)]
    assert parts == [
        pytest.approx(600, rel=0.15),
        pytest.approx(6000, rel=0.05),
        pytest.approx(600, rel=0.15),
    ]


def test_a_time_change_keeps_the_burstiness() -> None:
    flat = Modulated(Steps(((0.0, 40.0),)), cv=3.0)
    seen = gaps(flat)
    assert statistics.pstdev(seen) / statistics.mean(seen) == pytest.approx(3.0, rel=0.08)


@pytest.mark.parametrize("process", [Poisson(5.0), Gamma(5.0, cv=2.0), Modulated(Diurnal(5.0))])
def test_same_seed_same_instants(process: Arrivals) -> None:
    assert gaps(process, count=50) == gaps(process, count=50)
    assert gaps(process, count=50) != gaps(process, seed=8, count=50)


def test_senseless_processes_are_refused() -> None:
    for rate in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="rate_per_s"):
            Poisson(rate)
    with pytest.raises(ValueError, match="cv"):
        Gamma(1.0, cv=0.0)
    with pytest.raises(ValueError, match="swing_ratio"):
        Diurnal(1.0, swing_ratio=1.0)
    with pytest.raises(ValueError, match="off_rate_per_s"):
        OnOff(1.0, -1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="ascend"):
        Steps(((0.0, 1.0), (5.0, 2.0), (5.0, 3.0)))
    with pytest.raises(ValueError, match="begin at 0"):
        Steps(((1.0, 1.0),))


def test_lognormal_lengths_have_their_median_and_bounds() -> None:
    rng, lengths = Random(2), LogNormal(1000.0, 0.9, least_tokens=16, most_tokens=8192)
    drawn = sorted(lengths.draw(rng) for _ in range(ROUNDS))
    assert drawn[ROUNDS // 2] == pytest.approx(1000, rel=0.04)
    assert drawn[round(ROUNDS * 0.8413)] == pytest.approx(1000 * math.exp(0.9), rel=0.05)
    assert drawn[0] >= 16
    assert drawn[-1] == 8192


def test_fixed_lengths_are_all_the_same() -> None:
    assert Fixed(7).draw(Random(2)) == 7


def test_senseless_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="the least is 1"):
        Fixed(0)
    with pytest.raises(ValueError, match="no distribution"):
        LogNormal(100.0, 1.0, least_tokens=9, most_tokens=8)
