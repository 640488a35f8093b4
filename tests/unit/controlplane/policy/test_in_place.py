"""An update in place loads nothing beside: each worker has one engine of the deployment at any time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.controlplane.policy.assign import PutAssignment, plan
from services.core.records import AssignedVersion, Deployment, InPlace, Priority, VersionState
from services.core.rollouts.routes import ModelRoute, RevisedRoute, RouteArm
from tests.unit.controlplane.policy.test_update import (
    LOAD_STEPS,
    NEW,
    NEWER,
    OLD,
    FakeWorker,
    Fleet,
    deployment,
)

SERVED = (VersionState.READY, VersionState.RETIRING)


class InPlaceWorker(FakeWorker):
    """Replaces the weights of the version before, as the agent does."""

    taken_over: frozenset[str] = frozenset()  # versions that load without memory

    def leading(self) -> set[str]:
        return {digest for digest in super().leading() if digest not in self.taken_over}

    def step(self, assigned: dict[str, AssignedVersion]) -> None:
        served = [one for one, (state, _) in self.versions.items() if state in SERVED and one in assigned]
        for digest, version in assigned.items():
            if version.in_place is not None and digest not in self.versions and served and not version.served:
                self.versions[digest] = VersionState.LOADING, LOAD_STEPS
                self.taken_over |= {digest}
        serving = {
            digest
            for digest, version in assigned.items()
            if version.in_place is not None
            and self.versions.get(digest, (VersionState.FAILED, 0))[0] is VersionState.READY
        }
        super().step({one: it for one, it in assigned.items() if not (it.served and serving - {one})})
        for digest in [one for one in self.taken_over if self.versions[one][0] is VersionState.READY]:
            self.taken_over -= {digest}
            self.versions = {digest: self.versions[digest]}


def in_place_fleet(rooms: list[int], replicas: int) -> Fleet:
    fleet = Fleet(rooms)
    fleet.workers = {
        name: InPlaceWorker(one.memory_bytes, one.size_bytes) for name, one in fleet.workers.items()
    }
    fleet.wanted = deployment(OLD, replicas)
    fleet.run(10)
    assert fleet.serving() == (OLD, replicas)
    return fleet


def wanted(digest: str, replicas: int, **fields: object) -> Deployment:
    return deployment(digest, replicas, in_place_s=5.0, revision=41, **fields)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_worker_changes_without_memory_for_both(workers: int) -> None:
    fleet = in_place_fleet([1] * workers, workers)
    for digest in (NEW, NEWER, OLD):
        fleet.wanted = wanted(digest, workers)
        for _ in range(20):
            fleet.step()
            assert all(len(one.leading()) == 1 for one in fleet.workers.values()), "two copies of weights"
        assert fleet.serving() == (digest, workers)
        assert fleet.digests() == {digest}
        fleet.step()
        assert not [one for one in fleet.actions if isinstance(one, PutAssignment)], "it rests"


def test_it_goes_where_the_version_before_is_and_not_to_a_free_worker() -> None:
    fleet = in_place_fleet([2, 2, 2], 1)
    (home,) = [name for name, held in fleet.assignments.items() if held.versions]
    fleet.wanted = wanted(NEW, 1)
    fleet.run(20)
    assert [name for name, held in fleet.assignments.items() if held.versions] == [home]
    assert fleet.serving() == (NEW, 1)


def test_it_evicts_nothing_although_its_need_is_known() -> None:
    fleet = in_place_fleet([2, 2], 2)
    other = replace(deployment(NEWER, 2, priority=Priority.BATCH), meta=replace(fleet.wanted.meta, name="e"))
    fleet.wanted = wanted(NEW, 2, priority=Priority.INTERACTIVE)
    records = [one.record(name) for name, one in fleet.workers.items()]
    actions = plan(
        [fleet.wanted, other], records, [], list(fleet.assignments.values()), estimates={NEW: 10, NEWER: 10}
    )
    puts = [one.assignment for one in actions if isinstance(one, PutAssignment)]
    assert [sorted({one.version_digest for one in put.versions}) for put in puts] == [[OLD, NEW, NEWER]] * 2


def test_the_assignment_states_the_time_to_finish_and_the_revision_of_the_update() -> None:
    fleet = in_place_fleet([1], 1)
    fleet.wanted = wanted(NEW, 1)
    fleet.step()
    held = {one.version_digest: one.in_place for one in fleet.assignments["w0"].versions}
    assert held == {OLD: None, NEW: InPlace(5.0, 42)}


def test_a_version_that_a_revert_brings_back_loads_beside() -> None:
    fleet = in_place_fleet([2], 1)
    fleet.wanted, fleet.beside = wanted(NEW, 1), ("d",)
    fleet.step()
    assert {one.version_digest: one.in_place for one in fleet.assignments["w0"].versions} == {
        OLD: None,
        NEW: None,
    }


def test_a_rollout_loads_its_arms_beside() -> None:
    fleet = in_place_fleet([2], 1)
    fleet.wanted = wanted(OLD, 1)
    arms = (RouteArm("stable", OLD, 9000), RouteArm("canary", NEW, 1000))
    fleet.routes = [RevisedRoute(ModelRoute("d", "salt", arms), 50)]
    fleet.step()
    assert {one.version_digest for one in fleet.assignments["w0"].versions} == {OLD, NEW}
    assert {one.in_place for one in fleet.assignments["w0"].versions} == {None}
