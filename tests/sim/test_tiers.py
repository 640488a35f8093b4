"""Tenants of every isolation tier beside a burst and a lost node: each invariant holds, and finds its bug."""

from __future__ import annotations

import pytest

from simulator.fleet.assembly import Parts
from simulator.fleet.invariant import Looks
from simulator.invariants.isolation import KV_SHARE, OUTSIDE
from simulator.lab.tiers import BESIDE, LOSS, SEEDS, has_new_leader, run_tiers, unreached
from tests.sim.planted.schedulers import FirstComeFirstServed
from tests.sim.planted.tiers import (
    ForgetsShares,
    ForgetsTiersOfRows,
    RefusesNobody,
    SpillsOver,
    TakesEveryGroup,
)
from tests.support.sweep import daily

NEW_LEADER = next(filter(has_new_leader, range(SEEDS)))


@pytest.mark.parametrize("seed", daily(range(SEEDS), [0]))
def test_the_tiers_hold(seed: int) -> None:
    result = run_tiers(seed)
    assert result.violations == ()
    assert unreached([result]) == []


PLANTED = {
    "spills over": (Parts(scheduler=SpillsOver, worker=TakesEveryGroup), OUTSIDE),
    "forgets tiers of rows": (Parts(gateway=ForgetsTiersOfRows), OUTSIDE),
    "forgets shares": (Parts(worker=ForgetsShares), KV_SHARE),
    "refuses nobody": (Parts(scheduler=RefusesNobody), LOSS),
    "serves by arrival": (Parts(scheduler=FirstComeFirstServed), BESIDE),
}


@pytest.mark.parametrize("bug", daily(sorted(PLANTED), ["forgets shares"]))
def test_planted_bugs_are_found(bug: str) -> None:
    parts, invariant = PLANTED[bug]
    found = run_tiers(0, parts=parts, looks=Looks.SAMPLES).violations
    assert any(text.startswith(invariant) for text in found), found
