"""Error budgets, burn rates over two windows, and the events of an alert."""

from __future__ import annotations

from functools import partial

import pytest

from services.controlplane.objectives.policy.burn import (
    BUDGET_S,
    DAY_S,
    HOUR_S,
    BurnRings,
    EventCounts,
    alert_of,
    burn_of,
    counted,
    status_of,
    transitions,
)
from services.core.arms import SliSums
from services.core.records import BurnAlert, LatencyTarget, Meta, Objective, ObjectiveStatus, Sli

NOW = 1_800_000_000.0
OBJECTIVE = Objective(
    Meta("o"), "chat", availability=0.999, completion=0.99, ttft=LatencyTarget(2.0), itl=LatencyTarget(0.1)
)


def rings_with(*parts: tuple[float, float, float]) -> BurnRings:
    """Return rings of 1,000 events a minute: (from, to) seconds before now, and the ratio of bad ones."""
    rings = BurnRings()
    for since_s, until_s, ratio in sorted(parts, reverse=True):
        for minute in range(int(since_s // 60), int(until_s // 60), -1):
            counts = {Sli.AVAILABILITY: EventCounts(1000, round(1000 * ratio))}
            rings.add(counts, NOW - 60 * minute + 30)
    return rings


def alert(rings: BurnRings) -> BurnAlert:
    return alert_of(OBJECTIVE, Sli.AVAILABILITY, partial(rings.over, unix_s=NOW))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (((HOUR_S, 0, 0.015),), BurnAlert.ACUTE),  # 15x in both windows
        (((HOUR_S, 300, 0.02), (300, 0, 0.0)), BurnAlert.FAST),  # the last five minutes are good
        (((HOUR_S, 1800, 0.1), (1800, 0, 0.0)), BurnAlert.SLOW),
        (((6 * HOUR_S, 0, 0.007),), BurnAlert.FAST),
        (((3 * DAY_S, 0, 0.002),), BurnAlert.SLOW),
        (((3 * DAY_S, 0, 0.0),), BurnAlert.NONE),
        (((300, 0, 0.0),), BurnAlert.NONE),
    ],
)
def test_an_alert_needs_both_of_its_windows(
    parts: tuple[tuple[float, float, float], ...], expected: BurnAlert
) -> None:
    assert alert(rings_with(*parts)) is expected


def burn(rings: BurnRings) -> float:
    return burn_of(OBJECTIVE, partial(rings.over, unix_s=NOW))


def test_replicas_follow_what_burns_in_both_windows_and_no_broken_stream() -> None:
    rings = BurnRings()
    rings.add({Sli.AVAILABILITY: EventCounts(100, 100)}, NOW - 1800.0)
    assert burn(rings) == 0.0, "it has ended"
    rings.add({Sli.AVAILABILITY: EventCounts(100, 10)}, NOW)
    allowed = 1.0 - OBJECTIVE.availability
    assert burn(rings) == pytest.approx(0.1 / allowed)
    few, broken = BurnRings(), BurnRings()
    few.add({Sli.AVAILABILITY: EventCounts(5, 5)}, NOW)
    broken.add({Sli.COMPLETION: EventCounts(100, 100)}, NOW)
    assert burn(few) == burn(broken) == 0.0


def test_a_promise_of_the_total_latency_alone_alerts() -> None:
    promised, rings = Objective(Meta("o"), "chat", total=LatencyTarget(5.0, 0.99)), BurnRings()
    rings.add({Sli.TOTAL: EventCounts(100, 20)}, NOW)
    (found,) = status_of(promised, partial(rings.over, unix_s=NOW))
    assert (found.sli, found.alert, found.burn_rates[0]) == (Sli.TOTAL, BurnAlert.ACUTE, 20.0)


def test_few_events_are_no_alert() -> None:
    rings = BurnRings()
    rings.add({Sli.AVAILABILITY: EventCounts(5, 5)}, NOW)
    assert alert(rings) is BurnAlert.NONE


def test_the_budget_is_of_four_weeks() -> None:
    rings = BurnRings()
    rings.add({Sli.AVAILABILITY: EventCounts(90_000, 0)}, NOW - 20 * DAY_S)
    rings.add({Sli.AVAILABILITY: EventCounts(10_000, 50)}, NOW - DAY_S)
    rings.add({Sli.AVAILABILITY: EventCounts(10_000, 10_000)}, NOW - BUDGET_S - DAY_S)
    (found, *_) = status_of(OBJECTIVE, partial(rings.over, unix_s=NOW))
    assert (found.events, found.bad_events, found.budget_left_ratio) == (100_000, 50, 0.5)
    assert found.burn_rates[-1] == pytest.approx(5.0)


def test_old_bins_are_forgotten() -> None:
    rings = BurnRings()
    for day in range(60):
        rings.add({Sli.AVAILABILITY: EventCounts(1, 0)}, NOW + day * DAY_S)
    assert max(map(len, rings.rings)) <= 361
    assert rings.forget(NOW + 200 * DAY_S)


def test_good_and_bad_events_of_each_promise() -> None:
    sums = SliSums(requests=10, errors=2, started=8, broken=1)
    for seconds in (0.5, 1.9, 2.5, 9.0):
        sums.ttft_of(1).add(seconds)
    sums.itl.add(0.05, 90)
    sums.itl.add(0.2, 10)
    assert counted(sums, OBJECTIVE) == {
        Sli.AVAILABILITY: EventCounts(10, 2),
        Sli.COMPLETION: EventCounts(8, 1),
        Sli.TTFT: EventCounts(4, 2),
        Sli.ITL: EventCounts(100, 10),
    }
    for seconds in (1.0, 4.0, 40.0):
        sums.total.add(seconds)
    promised = Objective(Meta("o"), "chat", total=LatencyTarget(5.0, 0.9))
    assert counted(sums, promised) == {Sli.TOTAL: EventCounts(3, 1)}
    assert counted(sums, Objective(Meta("o"), "chat", availability=0.9)).keys() == {Sli.AVAILABILITY}


def test_an_alert_is_one_event_when_it_begins_and_one_when_it_ends() -> None:
    good = status_of(OBJECTIVE, partial(rings_with((HOUR_S, 0, 0.0)).over, unix_s=NOW))
    bad = status_of(OBJECTIVE, partial(rings_with((HOUR_S, 0, 0.02)).over, unix_s=NOW))
    calm, burning = ObjectiveStatus(good, NOW), ObjectiveStatus(bad, NOW)
    (begun,) = transitions(OBJECTIVE, calm, burning)
    assert (begun.reason, begun.resource, begun.warning) == ("AVAILABILITY_BURN_ACUTE", "o", True)
    assert transitions(OBJECTIVE, burning, burning) == ()
    (ended,) = transitions(OBJECTIVE, burning, calm)
    assert (ended.reason, ended.warning) == ("AVAILABILITY_BURN_ENDED", False)
    assert [one.reason for one in transitions(OBJECTIVE, None, burning)] == ["AVAILABILITY_BURN_ACUTE"]
