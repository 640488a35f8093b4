"""Which versions workers hold without running them, and where a replica of one goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.controlplane.policy.assign import MAX_PREFETCHED, PutAssignment, plan
from services.core.records import AssignedVersion, Assignment, Deployment, Meta, Node, Worker


def deployment(name: str, replicas: int = 0, **selector: str) -> Deployment:
    return Deployment(Meta(name), "m", "v", f"sha256:{name}", replicas, selector)


def worker(worker_id: str, *prefetched: str, **labels: str) -> Worker:
    return Worker(worker_id, "w:1", labels=labels, prefetched=tuple(f"sha256:{one}" for one in prefetched))


def planned(
    deployments: list[Deployment],
    workers: list[Worker],
    likely: Mapping[str, float],
    before: Mapping[str, Assignment] | None = None,
    nodes: tuple[Node, ...] = (),
) -> dict[str, Assignment]:
    found = dict(before or {})
    for action in plan(deployments, workers, nodes, list(found.values()), likely=likely):
        assert isinstance(action, PutAssignment)
        found[action.assignment.worker_id] = action.assignment
    assert not plan(deployments, workers, nodes, list(found.values()), likely=likely), "a second plan writes"
    return found


def prefetched(assignment: Assignment) -> list[str]:
    return [one.deployment for one in assignment.prefetch]


def test_workers_prefetch_the_likeliest_that_they_may_get_and_do_not_run() -> None:
    deployments = [deployment("a", 1), deployment("b"), deployment("c"), deployment("far", zone="z")]
    likely = {"a": 9.0, "b": 1.0, "c": 3.0, "far": 99.0}
    found = planned(deployments, [worker("w0"), worker("w1")], likely)
    assert [one.deployment for one in found["w0"].versions] == ["a"]
    assert prefetched(found["w0"]) == ["c", "b"]
    assert prefetched(found["w1"]) == ["a", "c"]
    assert all(len(one.prefetch) <= MAX_PREFETCHED for one in found.values())


def test_without_an_observation_nothing_is_prefetched() -> None:
    assert planned([deployment("a")], [worker("w0")], {}) == {}


def test_weights_that_move_a_little_change_nothing() -> None:
    deployments, workers = [deployment(name) for name in "abc"], [worker("w0")]
    before = planned(deployments, workers, {"a": 3.0, "b": 2.0, "c": 1.9})
    assert planned(deployments, workers, {"a": 3.0, "b": 2.0, "c": 3.9}, before) == before
    assert planned(deployments, workers, {"a": 1.0, "b": 3.0, "c": 1.0}, before) == before
    after = planned(deployments, workers, {"a": 3.0, "b": 2.0, "c": 4.1}, before)
    assert {*prefetched(after["w0"])} == {"a", "c"}


def test_a_worker_that_leaves_or_is_of_another_group_prefetches_nothing() -> None:
    deployments, likely = [deployment("a")], {"a": 1.0}
    assert planned(deployments, [worker("w0")], likely, nodes=(Node("w0", cordoned=True),)) == {}
    found = planned(deployments, [worker("w0")], likely, nodes=(Node("w0", tenant="acme"),))
    assert prefetched(found["w0"]) == []


def test_a_replica_goes_where_its_version_is() -> None:
    workers = [worker("w0"), worker("w1"), worker("w2", "a")]
    found = planned([deployment("a", 1)], workers, {})
    assert [name for name, one in found.items() if one.versions] == ["w2"]
    zones = [replace(one, zone=zone) for one, zone in zip(workers, "xyx", strict=True)]
    found = planned([deployment("a", 2)], zones, {})
    assert sorted(name for name, one in found.items() if one.versions) == ["w1", "w2"], "zones come first"


def test_what_is_prefetched_is_no_replica() -> None:
    warm = Assignment("w0", (), prefetch=(AssignedVersion("a", "m", "sha256:a"),))
    found = planned([deployment("a", 1)], [worker("w0", "a")], {"a": 1.0}, {"w0": warm})
    assert [one.deployment for one in found["w0"].versions] == ["a"]
    assert found["w0"].prefetch == ()
