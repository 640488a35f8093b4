"""The derived window on a virtual clock: near the best fixed one, and every row answered once."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from services.worker.batcher.policy.start import BatchLimits
from services.worker.batcher.policy.window import DerivedWindow, FixedWindow, Window
from simulator.batcher.costs import BatchCosts
from simulator.batcher.curve import curves, picture
from simulator.batcher.world import (
    BatcherOutcome,
    BatcherSpec,
    BatcherWorld,
    ClosedLoop,
    OpenLoop,
)
from simulator.lab.load.arrivals import OnOff, Poisson

ROWS = 2500
FIXED_S = (0.0, 1e-3, 4e-3)
# Fixed cost against cost per row: little, some, much.
COSTS = {
    "little": BatchCosts.linear(0.5e-3, 0.15e-3),
    "some": BatchCosts.linear(3e-3, 0.1e-3),
    "much": BatchCosts.linear(8e-3, 0.05e-3),
}


def run(load: OpenLoop | ClosedLoop, costs: BatchCosts, window: Window, **more: object) -> BatcherOutcome:
    return BatcherWorld(BatcherSpec(load, costs, window, rows=ROWS, **more)).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("clients", [8, 64])
def test_in_a_closed_loop_it_answers_as_many_as_the_best_fixed_window(cost: str, clients: int) -> None:
    load, costs = ClosedLoop(clients), COSTS[cost]
    best = max(run(load, costs, FixedWindow(window_s)).per_s for window_s in FIXED_S)
    assert run(load, costs, DerivedWindow()).per_s >= 0.95 * best


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("bursty", [False, True])
def test_in_an_open_loop_it_answers_as_soon_as_the_best_fixed_window(cost: str, bursty: bool) -> None:
    costs = COSTS[cost]
    rate_per_s = 0.5 * 100 / costs.mean_s(0, 100)
    arrivals = OnOff(1.8 * rate_per_s, 0.4 * rate_per_s, 0.1, 0.2) if bursty else Poisson(rate_per_s)
    best = min(run(OpenLoop(arrivals), costs, FixedWindow(window_s)).mean_s for window_s in FIXED_S)
    assert run(OpenLoop(arrivals), costs, DerivedWindow()).mean_s <= 1.05 * best


def test_an_idle_device_answers_a_single_client_at_once() -> None:
    costs = COSTS["much"]
    assert run(ClosedLoop(1), costs, DerivedWindow()).mean_s <= 1.02 * costs.mean_s(0, 1)


def test_every_row_is_answered_within_the_limits() -> None:
    limits = BatchLimits(rows=10, padded_tokens=200)
    widths = ((16, 0.7), (64, 0.3))
    outcome = run(OpenLoop(Poisson(1500.0)), COSTS["little"], DerivedWindow(), limits=limits, widths=widths)
    assert outcome.answered == ROWS - ROWS // 10
    assert outcome.answered / outcome.batches <= 10


def test_the_curve_shows_both_ends_of_batching() -> None:
    found = curves(400, (1, 32))
    derived, fixed, static, alone = found.values()
    assert derived[0].p99_ms < 1.1 * alone[0].p99_ms  # one client does not wait
    assert fixed[0].p99_ms > 8.0
    assert static[0].p99_ms > 90.0  # the last row never comes
    assert derived[1].per_s > 1.5 * alone[1].per_s
    root = ElementTree.fromstring(picture(found))
    circles = [each for each in root if each.tag.endswith("circle")]
    assert len(circles) == 8
