"""Worker by worker: where no worker has room for both versions, all but one replica serve at any time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.controlplane.objectives.policy.gates import Verdict
from services.controlplane.rollouts.fit import by_worker
from services.controlplane.rollouts.policy.operate import Promotion, abort, promote
from services.controlplane.rollouts.records import Rollout, RolloutPhase, RolloutStep
from services.core.records import VersionState
from services.core.rollouts.routes import WHOLE_BP
from tests.unit.controlplane.policy.test_update import NEW, OLD
from tests.unit.controlplane.rollouts.policy.driven import Driven, rollout

WEIGHTS = (100, 5000, WHOLE_BP)


def wished(replicas: int, weights: tuple[int, ...] = WEIGHTS) -> Rollout:
    steps = tuple(RolloutStep(weight_bp, hold_s=5.0) for weight_bp in weights)
    return by_worker(rollout(steps=steps, soak_s=5.0), replicas)


def check(driven: Driven, replicas: int) -> None:
    """All but one replica serve, each with no more than its share of what all but one can take."""
    old, new = driven.fleet.ready(OLD), driven.fleet.ready(NEW)
    assert old + new >= replicas - 1
    for worker in driven.fleet.workers.values():
        assert sum(state is not VersionState.FAILED for state, _ in worker.versions.values()) <= 1
    if driven.phase is RolloutPhase.RUNNING:
        weight_bp = driven.weight_bp()
        assert weight_bp <= new * WHOLE_BP / (replicas - 1)
        assert WHOLE_BP - weight_bp <= old * WHOLE_BP / (replicas - 1) + 1


def run(driven: Driven, phase: RolloutPhase, replicas: int, most: int = 400) -> None:
    for _ in range(most):
        if driven.phase is phase:
            return
        driven.tick()
        check(driven, replicas)
    raise AssertionError(f"still {driven.phase}: {driven.rollout.message}")


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_a_good_version_reaches_every_worker(replicas: int) -> None:
    driven = Driven(wished(replicas), rooms=(1,) * replicas)
    run(driven, RolloutPhase.COMPLETED, replicas)
    driven.tick(20)
    assert (driven.fleet.ready(OLD), driven.fleet.ready(NEW)) == (0, replicas)


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_all_traffic_leaves_the_version_before_on_one_worker(replicas: int) -> None:
    driven = Driven(wished(replicas), rooms=(1,) * replicas)
    run(driven, RolloutPhase.SOAKING, replicas)
    assert (driven.fleet.ready(OLD), driven.fleet.ready(NEW)) == (1, replicas - 1)
    assert driven.weight_bp() == WHOLE_BP


@pytest.mark.parametrize(
    ("replicas", "weights"), [(3, (1000, 3400, WHOLE_BP)), (5, (100, 2100, 4100, WHOLE_BP))]
)
def test_no_session_returns_to_the_version_before(replicas: int, weights: tuple[int, ...]) -> None:
    """The weight never falls: not while a worker passes to the candidate, and not after that."""
    driven, last_bp = Driven(wished(replicas, weights), rooms=(1,) * replicas), 0
    while driven.phase in (RolloutPhase.LOADING, RolloutPhase.RUNNING):
        driven.tick()
        check(driven, replicas)
        assert driven.weight_bp() >= last_bp
        last_bp = driven.weight_bp()
    assert driven.phase is RolloutPhase.SOAKING


def test_an_operator_s_promotion_takes_each_worker_in_its_turn() -> None:
    driven = Driven(wished(4), rooms=(1,) * 4)
    driven.verdict = Verdict.INCONCLUSIVE
    run(driven, RolloutPhase.RUNNING, 4)
    driven.operate(lambda one: promote(one, Promotion(to_end=True), driven.now_s))
    run(driven, RolloutPhase.SOAKING, 4, most=60)
    assert driven.fleet.ready(NEW) == 3


@pytest.mark.parametrize("aborted_after", [1, 8, 16, 24])
def test_an_abort_returns_every_worker(aborted_after: int) -> None:
    driven = Driven(wished(3), rooms=(1,) * 3)
    driven.tick(aborted_after)
    driven.operate(lambda one: abort(one, "", driven.now_s))
    assert driven.weight_bp() == 0
    driven.until(RolloutPhase.ABORTED)
    driven.tick(20)
    assert (driven.fleet.ready(OLD), driven.fleet.ready(NEW)) == (3, 0)


def test_a_version_that_does_not_load_costs_one_replica_at_most_and_for_a_while() -> None:
    driven = Driven(wished(3), rooms=(1,) * 3)
    for worker in driven.fleet.workers.values():
        worker.unloadable = frozenset({NEW})
    run(driven, RolloutPhase.ABORTED, 3)
    driven.tick(10)
    assert driven.fleet.ready(OLD) == 3
    assert "STARTED" not in driven.whats()


def test_each_worker_has_a_step_of_its_own() -> None:
    assert [step.weight_bp for step in wished(5).steps] == [100, 4000, 5000, WHOLE_BP]
    assert [step.weight_bp for step in wished(2).steps] == list(WEIGHTS)
    assert [step.weight_bp for step in wished(3, (WHOLE_BP,)).steps] == [3333, WHOLE_BP]


def at_once(rooms: int) -> Driven:
    """A single step moves all of four workers."""
    steps = (RolloutStep(100, hold_s=5.0), RolloutStep(WHOLE_BP, hold_s=5.0))
    return Driven(replace(rollout(steps=steps, soak_s=5.0), by_worker=True), rooms=(rooms,) * 4)


def test_several_workers_are_taken_one_after_the_other() -> None:
    driven = at_once(1)
    while driven.phase is not RolloutPhase.SOAKING:
        driven.tick()
        assert driven.fleet.ready(OLD) + driven.fleet.ready(NEW) >= 3, driven.rollout.message
    assert (driven.fleet.ready(OLD), driven.fleet.ready(NEW)) == (1, 3)


def test_no_worker_gets_two_versions_also_with_memory_for_both() -> None:
    driven = at_once(2)
    while driven.phase in (RolloutPhase.LOADING, RolloutPhase.RUNNING):
        driven.tick()
        assert all(len(one.versions) <= 1 for one in driven.fleet.assignments.values())
    assert driven.phase is RolloutPhase.SOAKING
