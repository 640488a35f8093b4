"""The arms of a split are loaded beside the stable version, never in its place, and retire once closed."""

from __future__ import annotations

from dataclasses import replace

from services.controlplane.policy.assign import Unplaced
from services.core.records import VersionState
from services.core.rollouts.routes import WHOLE_BP, ModelRoute, RevisedRoute, RouteArm, split
from tests.unit.controlplane.policy.test_update import NEW, OLD, Fleet, deployment


def routed(replicas: int = 1, weight_bp: int = 0, revision: int = 7) -> RevisedRoute:
    arms = (RouteArm("stable", OLD, WHOLE_BP - weight_bp, 2), RouteArm("canary", NEW, weight_bp, replicas))
    return RevisedRoute(ModelRoute("d", "s", arms), revision)


def closed(revision: int = 9) -> RevisedRoute:
    route = routed().route
    return RevisedRoute(replace(route, arms=split(route, {}, closed=("canary",))), revision)


def stable_throughout(fleet: Fleet, steps: int = 20) -> None:
    for _ in range(steps):
        fleet.step()
        assert fleet.ready(OLD) == 2
    assert not [one for one in fleet.actions if not isinstance(one, Unplaced)], "the plan does not settle"


def test_an_arm_is_loaded_beside_the_stable_version_at_its_replicas() -> None:
    fleet = Fleet([2, 2])
    fleet.run(10)
    for replicas in (1, 2, 1):
        fleet.routes = [routed(replicas)]
        stable_throughout(fleet)
        assert fleet.ready(NEW) == replicas


def test_an_arm_without_room_takes_nobody_s_place() -> None:
    fleet = Fleet([1, 1])
    fleet.run(10)
    fleet.routes = [routed(1)]
    stable_throughout(fleet)
    assert fleet.ready(NEW) == 0
    missing = [one for one in fleet.actions if isinstance(one, Unplaced)]
    assert [one.deployment for one in missing] in ([], [f"d@{NEW}"])


def test_an_arm_of_the_same_computation_needs_no_room() -> None:
    fleet = Fleet([1, 1], engines={OLD: "same", NEW: "same"})
    fleet.run(10)
    fleet.routes = [routed(2, 5000)]
    stable_throughout(fleet)
    assert fleet.ready(NEW) == 2
    fleet.wanted = replace(fleet.wanted, version_digest=NEW)
    fleet.routes = []
    fleet.run(20)
    assert all(list(worker.versions) == [NEW] for worker in fleet.workers.values())


def test_an_arm_goes_where_its_engine_is() -> None:
    fleet = Fleet([3, 3, 3], engines={OLD: "same", NEW: "same"})
    fleet.wanted = replace(fleet.wanted, replicas=1)
    fleet.run(10)
    (stable,) = [name for name, worker in fleet.workers.items() if OLD in worker.versions]
    fleet.routes = [routed(1)]
    fleet.run(10)
    assert [name for name, worker in fleet.workers.items() if NEW in worker.versions] == [stable]


def test_the_arms_of_a_worker_divide_its_kv_by_the_traffic_that_each_has_there() -> None:
    fleet = Fleet([2, 2])
    fleet.run(10)
    route = routed(1, 1000).route
    arms = (replace(route.arms[0], kv_bp=9000), replace(route.arms[1], kv_bp=1000))
    fleet.routes = [RevisedRoute(replace(route, arms=arms), 7)]
    stable_throughout(fleet)
    shares = {
        worker_id: {version.version_digest: version.kv_share for version in assignment.versions}
        for worker_id, assignment in fleet.assignments.items()
    }
    assert sorted(shares.values(), key=len) == [{OLD: 4500}, {OLD: 4500, NEW: 1000}], "two replicas to one"
    fleet.routes = [closed()]
    fleet.step()
    shares_after = [v.kv_share for a in fleet.assignments.values() for v in a.versions if v.retiring]
    assert shares_after == [0]


def test_a_closed_arm_refuses_older_requests_and_retires() -> None:
    fleet = Fleet([2, 2])
    fleet.run(10)
    fleet.routes = [routed(2, 5000)]
    stable_throughout(fleet)
    fleet.routes = [closed(revision=9)]
    fleet.step()
    arms = [one for held in fleet.assignments.values() for one in held.versions if one.version_digest == NEW]
    assert [(one.retiring, one.least_route_revision) for one in arms] == [(True, 9)] * 2
    stable_throughout(fleet)
    assert fleet.digests() == {OLD}


def test_a_closed_arm_never_serves_again_where_stable_replicas_are_lost() -> None:
    """With the rule of an update alone, the version with the most replicas would serve."""
    fleet = Fleet([2, 2, 2])
    fleet.run(10)
    fleet.routes = [routed(3, 5000)]
    fleet.run(10)
    fleet.workers["w0"].versions[OLD] = VersionState.RESTARTING, 30
    fleet.routes = [closed()]
    fleet.run(4)
    arms = [one for held in fleet.assignments.values() for one in held.versions if one.version_digest == NEW]
    assert arms
    assert all(one.retiring for one in arms)
    fleet.run(40)
    assert fleet.digests() == {OLD}


def test_a_promoted_arm_keeps_its_replicas_and_the_version_before_retires() -> None:
    fleet = Fleet([2, 2])
    fleet.run(10)
    fleet.routes = [routed(2, WHOLE_BP)]
    stable_throughout(fleet)
    fleet.wanted = deployment(NEW, 2)
    fleet.routes = [RevisedRoute(ModelRoute("d", "s", (RouteArm("canary", NEW, WHOLE_BP, 2),)), 11)]
    for _ in range(20):
        fleet.step()
        assert fleet.ready(NEW) == 2
    assert fleet.digests() == {NEW}
    fleet.routes = []
    fleet.run(5)
    assert (fleet.ready(NEW), fleet.digests()) == (2, {NEW})


def test_the_arms_of_a_stopped_or_deleted_deployment_leave() -> None:
    fleet = Fleet([2, 2])
    fleet.run(10)
    fleet.routes = [routed(2)]
    fleet.run(10)
    fleet.wanted = deployment(OLD, 0)
    fleet.run(10)
    assert fleet.digests() == set()
