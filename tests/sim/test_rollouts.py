"""Rollouts of whole fleets under mixed faults: what holds in 20 seeds, and the bugs that are found."""

from __future__ import annotations

from collections import Counter

import pytest

from services.controlplane.rollouts.records import RolloutPhase
from simulator.fleet.assembly import Parts
from simulator.invariants.arms import FENCE, LATE, ONE_ARM, STALE, STICKY
from simulator.invariants.splits import OUTCOME, SPLIT, WRITERS
from simulator.rollouts.script import CandidateKind, rollout_faults
from simulator.rollouts.seeds import SEEDS, RolloutResult, run_rollout
from tests.sim.planted.planes import (
    DrawsEachRequest,
    JudgesNothing,
    LeadsForEver,
    MissesAborts,
    StartsTheWithdrawn,
    SwapsVersions,
    TrustsOldRoutes,
    WritesTheRouteApart,
    WritesUnfenced,
    WritesWhatItReadBefore,
)


@pytest.fixture(scope="module")
def results() -> list[RolloutResult]:
    """What the seeds of this module came to; filled as they run."""
    return []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_rollout_under_faults_keeps_every_invariant(seed: int, results: list[RolloutResult]) -> None:
    result = run_rollout(seed)
    results.append(result)
    assert result.violations == (), f"python -m simulator rollouts --seeds 1 --first {seed} --trace"


def test_the_seeds_reach_every_kind_fault_and_outcome(results: list[RolloutResult]) -> None:
    """Else the seeds test nothing."""
    assert len(results) == SEEDS, "this test needs those before it"
    assert {result.kind for result in results} == set(CandidateKind)
    struck = Counter[str]()
    reached = Counter[str]()
    for result in results:
        struck.update(result.faults)
        reached.update(result.reached)
    assert set(struck) == {fault.kind.value for fault in rollout_faults(0)}
    assert all(reached.values()), reached
    assert any(len(result.writers) > 2 for result in results), "a failover in the midst of a rollout"
    assert {phase for result in results for phase in result.phases} == set(RolloutPhase)


# The bug, the invariant that finds it, and a seed in which it shows: of a good candidate (0, 10), of a slow
# one (1), of an abort (2), and of a gateway that is stale for long (12).
PLANTED = {
    "two planes write": (Parts(plane=WritesUnfenced), WRITERS, 0),
    "the route is written apart": (Parts(plane=WritesTheRouteApart), SPLIT, 0),
    "an abort is overwritten": (Parts(plane=WritesWhatItReadBefore), SPLIT, 2),
    "a slow version is promoted": (Parts(plane=JudgesNothing), OUTCOME, 1),
    "an old view is trusted": (Parts(gateway=TrustsOldRoutes), STALE, 12),
    "a session flips": (Parts(gateway=DrawsEachRequest), STICKY, 2),
    "an abort is missed": (Parts(gateway=MissesAborts), LATE, 2),
    "versions are mixed": (Parts(gateway=SwapsVersions), ONE_ARM, 10),
    "a fence is ignored": (Parts(gateway=MissesAborts, worker=StartsTheWithdrawn), FENCE, 2),
}


@pytest.mark.parametrize("bug", sorted(PLANTED))
def test_planted_bugs_are_found(bug: str) -> None:
    parts, invariant, seed = PLANTED[bug]
    found = run_rollout(seed, parts=parts).violations
    assert any(text.startswith(invariant) for text in found), found


def test_the_store_rejects_a_control_plane_that_believes_it_leads() -> None:
    assert run_rollout(0, parts=Parts(plane=LeadsForEver)).violations == ()
