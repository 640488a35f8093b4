"""An update never ends what serves: driven against workers that load, run out of memory, retire and leave."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.controlplane.policy.assign import Action, DropAssignment, KeptVersion, PutAssignment, plan
from services.core.records import (
    AssignedVersion,
    Assignment,
    Deployment,
    LoadedVersion,
    Meta,
    Node,
    Priority,
    VersionState,
    Worker,
)
from services.core.rollouts.routes import RevisedRoute

OLD, NEW, NEWER = "sha256:0", "sha256:1", "sha256:2"
LOAD_STEPS, RETIRE_STEPS = 3, 4


def deployment(digest: str, replicas: int, **fields: object) -> Deployment:
    return Deployment(Meta("d"), "m", "v", digest, replicas, **fields)  # type: ignore[arg-type]


@dataclass
class FakeWorker:
    """Memory in bytes and, by digest, (state, steps left in it). Stands in for the agent and its slots."""

    memory_bytes: int
    size_bytes: int
    unloadable: frozenset[str] = frozenset()
    versions: dict[str, tuple[VersionState, int]] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)  # by version; those with the same share one
    fences: dict[str, int] = field(default_factory=dict)  # the least route revisions that it obeys

    def leading(self) -> set[str]:
        """Return the versions that an engine's memory is counted with."""
        loaded = sorted(
            digest for digest, (state, _) in self.versions.items() if state is not VersionState.FAILED
        )
        return set({self.engines.get(digest, digest): digest for digest in reversed(loaded)}.values())

    def granted_bytes(self) -> int:
        return self.size_bytes * len(self.leading())

    def step(self, assigned: dict[str, AssignedVersion]) -> None:
        for digest in [digest for digest in self.versions if digest not in assigned]:
            del self.versions[digest]
        for digest, version in sorted(assigned.items()):
            state, left = self.versions.get(digest, (VersionState.FAILED, 0))
            if version.retiring:
                if digest not in self.versions:
                    continue
                if state is VersionState.READY:
                    self.versions[digest] = VersionState.RETIRING, RETIRE_STEPS
                elif left:
                    self.versions[digest] = state, left - 1
                else:
                    del self.versions[digest]
            elif state is VersionState.FAILED:
                joins = self.engines.get(digest, digest) in {
                    self.engines.get(other, other) for other in self.leading()
                }
                fits = joins or self.granted_bytes() + self.size_bytes <= self.memory_bytes
                can = fits and digest not in self.unloadable
                self.versions[digest] = (VersionState.LOADING, LOAD_STEPS) if can else (state, 0)
            elif state in (VersionState.LOADING, VersionState.RESTARTING):
                self.versions[digest] = (state, left - 1) if left else (VersionState.READY, 0)
            elif state is VersionState.RETIRING:
                self.versions[digest] = VersionState.READY, 0

    def record(self, worker_id: str) -> Worker:
        loaded = [
            LoadedVersion(
                "d",
                "m",
                digest,
                state,
                reason=""
                if state is not VersionState.FAILED
                else "BAD_CHECKPOINT"
                if digest in self.unloadable
                else "DOES_NOT_FIT",
                weight_bytes=self.size_bytes if digest in self.leading() else 0,
                needed_bytes=self.size_bytes,
                least_route_revision=self.fences.get(digest, 0),
            )
            for digest, (state, _) in sorted(self.versions.items())
        ]
        return Worker(worker_id, "w:1", versions=tuple(loaded), memory_bytes=self.memory_bytes)


class Fleet:
    """Workers that hold one version each or two, with the assignments that the plans make."""

    def __init__(
        self,
        rooms: list[int],
        *,
        unloadable: frozenset[str] = frozenset(),
        engines: dict[str, str] | None = None,
    ) -> None:
        self.engines = engines or {}
        self.workers = {
            f"w{number}": FakeWorker(10 * room, 10, unloadable, engines=self.engines)
            for number, room in enumerate(rooms)
        }
        self.nodes: list[Node] = []
        self.assignments: dict[str, Assignment] = {}
        self.routes: list[RevisedRoute] = []
        self.wanted = deployment(OLD, len(rooms))
        self.kept: dict[str, KeptVersion] = {}
        self.beside: tuple[str, ...] = ()
        self.actions: tuple[Action, ...] = ()

    def ready(self, digest: str) -> int:
        """Return how many workers have the version READY."""
        states = [worker.versions.get(digest, (None, 0))[0] for worker in self.workers.values()]
        return states.count(VersionState.READY)

    def step(self, *, lag: int = 1) -> None:
        """Plan once, then let ``lag`` steps of the workers pass."""
        records = [worker.record(worker_id) for worker_id, worker in self.workers.items()]
        assignments = list(self.assignments.values())
        self.actions = plan(
            [self.wanted],
            records,
            self.nodes,
            assignments,
            self.routes,
            engines=self.engines,
            kept=self.kept,
            beside=self.beside,
        )
        for action in self.actions:
            if isinstance(action, PutAssignment):
                self.assignments[action.assignment.worker_id] = action.assignment
            elif isinstance(action, DropAssignment):
                del self.assignments[action.worker_id]
        for _ in range(lag):
            for worker_id, worker in self.workers.items():
                versions = self.assignments.get(worker_id, Assignment(worker_id)).versions
                worker.step({one.version_digest: one for one in versions})
                worker.fences = {one.version_digest: one.least_route_revision for one in versions}

    def run(self, steps: int, *, lag: int = 1) -> list[tuple[str, int]]:
        """Return, per step, the version that takes requests and how many replicas of it are READY."""
        served: list[tuple[str, int]] = []
        for _ in range(steps):
            self.step(lag=lag)
            served.append(self.serving())
        return served

    def serving(self) -> tuple[str, int]:
        ready: dict[str, int] = {}
        for worker in self.workers.values():
            for digest, (state, _) in worker.versions.items():
                ready[digest] = ready.get(digest, 0) + (state is VersionState.READY)
        restarting: dict[str, int] = {}
        for worker in self.workers.values():
            for digest, (state, _) in worker.versions.items():
                restarting[digest] = restarting.get(digest, 0) + (state is VersionState.RESTARTING)
        digest = self.wanted.serving_digest(ready, restarting)
        return digest, ready.get(digest, 0)

    def digests(self) -> set[str]:
        return {one.version_digest for held in self.assignments.values() for one in held.versions}


def test_the_new_version_is_ready_everywhere_before_the_one_before_retires() -> None:
    fleet = Fleet([2, 2])
    fleet.run(10)
    fleet.wanted = deployment(NEW, 2)
    served = fleet.run(30)
    assert [one for one in served if one[0] == OLD and one[1] != 2] == []
    assert [one for one in served if one[0] == NEW and one[1] != 2] == []
    assert fleet.digests() == {NEW}


def test_one_worker_with_room_for_both_serves_all_the_time() -> None:
    fleet = Fleet([2])
    fleet.run(10)
    fleet.wanted = deployment(NEW, 1)
    assert {count for _, count in fleet.run(30)} == {1}
    assert fleet.digests() == {NEW}


def test_without_room_for_both_one_worker_changes_after_the_other() -> None:
    fleet = Fleet([1, 1, 1])
    fleet.run(10)
    fleet.wanted = deployment(NEW, 3)
    served = fleet.run(80)
    assert min(count for _, count in served) >= 1
    assert served[-1] == (NEW, 3)
    assert fleet.digests() == {NEW}


def test_one_worker_without_room_for_both_keeps_what_it_serves() -> None:
    fleet = Fleet([1])
    fleet.run(10)
    fleet.wanted = deployment(NEW, 1)
    assert set(fleet.run(40)) == {(OLD, 1)}
    fleet.wanted = deployment(NEW, 0)
    fleet.run(10)
    assert fleet.workers["w0"].versions == {}
    fleet.wanted = deployment(NEW, 1)
    assert fleet.run(10)[-1] == (NEW, 1)


def test_a_version_that_never_loads_costs_no_replica() -> None:
    fleet = Fleet([2, 2], unloadable=frozenset({NEW}))
    fleet.run(10)
    fleet.wanted = deployment(NEW, 2)
    assert set(fleet.run(40)) == {(OLD, 2)}
    fleet.wanted = deployment(OLD, 2)
    assert set(fleet.run(10)) == {(OLD, 2)}
    assert fleet.digests() == {OLD}


def test_a_version_that_never_loads_costs_one_replica_where_there_is_no_room() -> None:
    fleet = Fleet([1, 1, 1], unloadable=frozenset({NEW}))
    fleet.run(10)
    fleet.wanted = deployment(NEW, 3)
    assert min(count for _, count in fleet.run(60)) >= 2


def test_back_to_a_version_that_still_retires_is_immediate() -> None:
    fleet = Fleet([2])
    fleet.run(10)
    fleet.wanted = deployment(NEW, 1)
    while fleet.serving()[0] == OLD:
        fleet.step()
    fleet.step()
    fleet.wanted = deployment(OLD, 1)
    served = fleet.run(20)
    assert min(count for _, count in served) == 1
    assert OLD in [digest for digest, _ in served[:3]]


def test_a_successor_that_breaks_has_the_version_before_serve_again() -> None:
    fleet = Fleet([2])
    fleet.run(10)
    fleet.wanted = deployment(NEW, 1)
    while fleet.serving() != (NEW, 1):
        fleet.step()
    fleet.step()
    assert fleet.workers["w0"].versions[OLD][0] is VersionState.RETIRING
    fleet.workers["w0"].unloadable = frozenset({NEW})
    fleet.workers["w0"].versions[NEW] = VersionState.FAILED, 0
    assert fleet.run(5)[-1] == (OLD, 1)


def test_a_node_that_drains_during_an_update_is_left_once_others_serve() -> None:
    fleet = Fleet([2, 2])
    fleet.run(10)
    fleet.nodes = [Node("w0", cordoned=True, draining=True)]
    fleet.wanted = deployment(NEW, 1)
    served = fleet.run(30)
    assert min(count for _, count in served) >= 1
    assert fleet.assignments["w0"].versions == ()


def test_the_last_one_before_has_its_time_to_retire_without_room_for_both() -> None:
    fleet = Fleet([1, 1])
    fleet.run(10)
    fleet.wanted = deployment(NEW, 2)
    retiring = 0
    for _ in range(40):
        fleet.step()
        states = [worker.versions.get(OLD, (None, 0))[0] for worker in fleet.workers.values()]
        retiring += VersionState.RETIRING in states
    assert retiring > RETIRE_STEPS
    assert fleet.serving() == (NEW, 2)


def test_a_priority_raised_with_the_version_makes_no_gap() -> None:
    fleet = Fleet([1])
    fleet.wanted = deployment(OLD, 1, priority=Priority.BATCH)
    fleet.run(10)
    fleet.wanted = deployment(NEW, 1, priority=Priority.INTERACTIVE)
    assert set(fleet.run(20)) == {(OLD, 1)}


def test_a_worker_that_cannot_take_the_version_holds_up_no_other() -> None:
    for replicas in (2, 3):
        fleet = Fleet([1, 1, 1])
        fleet.workers["w2"].memory_bytes = 5
        fleet.wanted = deployment(OLD, 2)
        fleet.run(10)
        fleet.wanted = deployment(NEW, replicas)
        served = fleet.run(100)
        assert served[-1] == (NEW, 2)
        assert min(count for _, count in served) == 1


def test_a_worker_that_restarts_during_a_failed_update_has_the_version_before_again() -> None:
    fleet = Fleet([2], unloadable=frozenset({NEW}))
    fleet.run(10)
    fleet.wanted = deployment(NEW, 1)
    fleet.run(5)
    fleet.workers["w0"].versions.clear()
    assert fleet.run(10)[-1] == (OLD, 1)


def test_a_crash_of_the_version_before_moves_no_traffic_and_ends_it_nowhere() -> None:
    fleet = Fleet([1, 2, 2])
    fleet.run(10)
    fleet.wanted = deployment(NEW, 3)
    fleet.step()
    for worker in fleet.workers.values():
        worker.versions[OLD] = VersionState.RESTARTING, 1
    fleet.step()
    assert fleet.serving()[0] == OLD
    assert {OLD} <= {one.version_digest for one in fleet.assignments["w0"].versions}
    assert fleet.run(40)[-1] == (NEW, 3)


def test_a_version_that_another_deployment_keeps_leaves_at_once_what_was_updated() -> None:
    other = replace(deployment(OLD, 1), meta=Meta("other"))
    versions = tuple(
        LoadedVersion(name, "m", digest, VersionState.READY)
        for name, digest in (("d", OLD), ("d", NEW), ("other", OLD))
    )
    assigned = tuple(AssignedVersion(v.deployment, "m", v.version_digest) for v in versions)
    (action,) = plan(
        [deployment(NEW, 1), other],
        [Worker("w0", "w:1", versions=versions)],
        [],
        [Assignment("w0", assigned)],
    )
    assert isinstance(action, PutAssignment)
    left = {(one.deployment, one.version_digest) for one in action.assignment.versions}
    assert left == {("d", NEW), ("other", OLD)}


@settings(max_examples=200, deadline=None)
@given(
    rooms=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    updates=st.lists(
        st.tuples(st.sampled_from([OLD, NEW, NEWER]), st.integers(1, 5), st.integers(0, 25)),
        min_size=1,
        max_size=5,
    ),
    lag=st.integers(1, 3),
)
def test_whatever_is_updated_when_something_serves(
    rooms: list[int], updates: list[tuple[str, int, int]], lag: int
) -> None:
    fleet = Fleet(rooms)
    fleet.run(10)
    for digest, replicas, steps in updates:
        fleet.wanted = replace(deployment(digest, replicas), priority=fleet.wanted.priority)
        served = fleet.run(steps, lag=lag)
        assert all(count for _, count in served), served
    served = fleet.run(120, lag=lag)
    assert all(count for _, count in served), served
    digest, count = fleet.serving()
    if max(rooms) > 1 or len(rooms) > 1:
        assert digest == fleet.wanted.version_digest
        assert count == min(fleet.wanted.replicas, len(rooms))
        assert fleet.digests() == {digest}
    before = {worker_id: one.versions for worker_id, one in fleet.assignments.items()}
    fleet.step()
    assert before == {worker_id: one.versions for worker_id, one in fleet.assignments.items()}, "it rests"
