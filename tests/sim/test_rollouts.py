"""Rollouts of whole fleets under mixed faults: what holds in a seed of each kind, and the bugs found.

``make sim`` runs 40 seeds and checks that they reach every fault and outcome; ``make sim-tests`` runs all of
these.
"""

from __future__ import annotations

import pytest

from services.controlplane.rollouts.records import FULL, RolloutStrategy
from simulator.fleet.assembly import Parts
from simulator.invariants.splits import (
    CUTOVER,
    FAILED_GATE,
    FENCE,
    LATE,
    ONE_ARM,
    OUTCOME,
    PROBE,
    SPLIT,
    STALE,
    STICKY,
    WRITERS,
)
from simulator.rollouts.seeds import CandidateKind, kind_of, run_rollout, strategy_of, unreached
from tests.sim.planted.planes import (
    DrawsEachRequest,
    JudgesNothing,
    LeadsForEver,
    MissesAborts,
    MissesCutovers,
    MissesReverts,
    PromotesAtOnce,
    StartsTheWithdrawn,
    SwapsVersions,
    TrustsOldRoutes,
    WritesTheRouteApart,
    WritesUnfenced,
    WritesWhatItReadBefore,
)
from tests.sim.planted.workers import AsksNoProbe
from tests.support.sweep import daily

OF_EACH_KIND = (0, 1, 2, 3, 5, 6, 8, 9)
# Of each strategy that moves all traffic at once: slow, failing, good.
AT_ONCE = (21, 23, 24, 31, 33, 34)


@pytest.mark.parametrize("seed", daily((*OF_EACH_KIND, *AT_ONCE), (*OF_EACH_KIND[:2], 23, 31)))
def test_a_rollout_under_faults_keeps_every_invariant(seed: int) -> None:
    result = run_rollout(seed)
    assert result.violations == (), f"python -m simulator rollouts --seeds 1 --first {seed} --trace"


def test_the_seeds_have_every_kind() -> None:
    assert {kind_of(seed) for seed in OF_EACH_KIND} == set(CandidateKind)
    assert {strategy_of(seed) for seed in AT_ONCE} == set(FULL)
    assert {strategy_of(seed) for seed in OF_EACH_KIND} == {RolloutStrategy.CANARY}


@pytest.mark.sweep
def test_a_seed_does_not_reach_everything() -> None:
    """Else the check of ``make sim`` finds nothing."""
    assert "failing" in unreached([run_rollout(0)])


# The bug, the invariant that finds it, and a seed in which it shows: of a good candidate (0, 10), of a slow
# one (1), of an abort (2), of a gateway that is stale for long (12), and of a blue/green one that is
# slow (21) or an instant one that fails (33).
PLANTED = {
    "two planes write": (Parts(plane=WritesUnfenced), WRITERS, 1),
    "the route is written apart": (Parts(plane=WritesTheRouteApart), SPLIT, 0),
    "an abort is overwritten": (Parts(plane=WritesWhatItReadBefore), SPLIT, 2),
    "a slow version is promoted": (Parts(plane=JudgesNothing), OUTCOME, 1),
    "a blue/green soak is not judged": (Parts(plane=PromotesAtOnce), FAILED_GATE, 21),
    "an instant one is not judged": (Parts(plane=PromotesAtOnce), FAILED_GATE, 33),
    "an old view is trusted": (Parts(gateway=TrustsOldRoutes), STALE, 12),
    "a session flips": (Parts(gateway=DrawsEachRequest), STICKY, 0),
    "an abort is missed": (Parts(gateway=MissesAborts), LATE, 2),
    "versions are mixed": (Parts(gateway=SwapsVersions), ONE_ARM, 10),
    "probes are left out": (Parts(worker=AsksNoProbe), PROBE, 8),
    "a cutover is not fenced": (Parts(gateway=MissesCutovers, worker=StartsTheWithdrawn), CUTOVER, 0),
    "a revert is not fenced": (Parts(gateway=MissesReverts, worker=StartsTheWithdrawn), CUTOVER, 6),
    "a fence is ignored": (Parts(gateway=MissesAborts, worker=StartsTheWithdrawn), FENCE, 2),
}


@pytest.mark.parametrize("bug", daily(sorted(PLANTED), ["a fence is ignored"]))
def test_planted_bugs_are_found(bug: str) -> None:
    parts, invariant, seed = PLANTED[bug]
    found = run_rollout(seed, parts=parts).violations
    assert any(text.startswith(invariant) for text in found), found


def test_the_store_rejects_a_control_plane_that_believes_it_leads() -> None:
    assert run_rollout(0, parts=Parts(plane=LeadsForEver)).violations == ()
