"""What an operator is warned of before an objective shapes serving."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.controlplane.objectives.servicer import SliListing, warnings_of
from services.core.records import LatencyTarget, Meta, Objective, Priority
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from tests.support.no_plane import NoPlane
from tests.support.slis import Measurements, key_of, sums_of

CLOCK = SystemClock()
SHAPING = Objective(Meta("o"), "chat", ttft=LatencyTarget(0.02), shapes_serving=True)


@pytest.fixture
async def measured() -> SliListing:
    """Two tenants, of which one has longer prompts; another class and another model are faster."""
    supervisor = Supervisor(CLOCK)
    found = Measurements(CLOCK)
    await found.start(supervisor)
    found.report(key_of(), sums_of(ttft_s=[0.08, 0.1, 0.12], requests=3, started=3))
    found.report(key_of(tenant="b"), sums_of(ttft_s=[1.0, 2.0, 3.0], requests=3, started=3))
    found.report(key_of(priority=Priority.BATCH), sums_of(ttft_s=[0.01], requests=1, started=1))
    found.report(key_of("other"), sums_of(ttft_s=[0.01], requests=1, started=1))
    return SliListing(found.store, NoPlane())


async def test_an_objective_that_observes_warns_of_nothing(measured: SliListing) -> None:
    assert await warnings_of(replace(SHAPING, shapes_serving=False), measured) == []


async def test_a_target_below_what_an_idle_model_takes_is_called_so(measured: SliListing) -> None:
    what, how = await warnings_of(SHAPING, measured)
    assert "standard requests of chat are refused when their predicted wait exceeds 0.02 s" in what
    assert how.startswith(
        "half of the standard requests of chat of the last hour had their first token after 0.1"
    )
    assert len(await warnings_of(replace(SHAPING, ttft=LatencyTarget(0.2)), measured)) == 1


async def test_without_figures_it_says_what_it_does(measured: SliListing) -> None:
    assert len(await warnings_of(SHAPING, NoPlane())) == 1
    assert len(await warnings_of(replace(SHAPING, model="new"), measured)) == 1
    (pace,) = await warnings_of(replace(SHAPING, ttft=LatencyTarget(), itl=LatencyTarget(0.05)), measured)
    assert pace == "prefill on the workers of chat is paced for 0.05 s"
