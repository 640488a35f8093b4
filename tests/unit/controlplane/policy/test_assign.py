from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from services.controlplane.policy.assign import (
    Action,
    DropAssignment,
    PutAssignment,
    Unplaced,
    plan,
)
from services.controlplane.policy.host import MAX_VERSIONS_PER_WORKER, Host
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


def deployment(name: str, replicas: int = 1, **fields: object) -> Deployment:
    return Deployment(Meta(name), "m", "v", "sha256:1", replicas, **fields)  # type: ignore[arg-type]


def worker(worker_id: str, zone: str = "", **fields: object) -> Worker:
    return Worker(worker_id, "127.0.0.1:1", zone, **fields)  # type: ignore[arg-type]


def version(name: str, digest: str = "sha256:1") -> AssignedVersion:
    return AssignedVersion(name, "m", digest)


def apply(assignments: dict[str, Assignment], actions: tuple[Action, ...]) -> dict[str, Assignment]:
    after = dict(assignments)
    for action in actions:
        if isinstance(action, PutAssignment):
            after[action.assignment.worker_id] = action.assignment
        elif isinstance(action, DropAssignment):
            del after[action.worker_id]
    return after


def all_ready(workers: list[Worker], assignments: dict[str, Assignment]) -> list[Worker]:
    def loaded(one: Worker) -> tuple[LoadedVersion, ...]:
        assigned = assignments.get(one.worker_id, Assignment(one.worker_id)).versions
        return tuple(
            LoadedVersion(v.deployment, v.model, v.version_digest, VersionState.READY) for v in assigned
        )

    return [replace(one, versions=loaded(one)) for one in workers]


def placed(assignments: dict[str, Assignment], name: str) -> list[str]:
    return sorted(a.worker_id for a in assignments.values() if any(v.deployment == name for v in a.versions))


def put(action: Action) -> PutAssignment:
    assert isinstance(action, PutAssignment)
    return action


def test_places_on_the_least_loaded_and_says_why() -> None:
    busy = Assignment("w0", (version("other"),))
    actions = plan([deployment("other"), deployment("d")], [worker("w0"), worker("w1")], [], [busy])
    assert put(actions[0]).assignment == Assignment("w1", (version("d"),))
    assert put(actions[0]).reasons == ("d: placed",)
    assert len(actions) == 1


def test_spreads_zones_before_load() -> None:
    workers = [worker("a0", "a"), worker("a1", "a"), worker("b0", "b")]
    held = [Assignment("a0", (version("d"),)), Assignment("b0", (version("x"), version("y")))]
    actions = plan([deployment("d", 2), deployment("x"), deployment("y")], workers, [], held)
    assert put(actions[0]).assignment.worker_id == "b0"


def test_cordoned_keeps_what_it_has_and_gets_nothing() -> None:
    nodes = [Node("w0", cordoned=True)]
    held = [Assignment("w0", (version("d"),))]
    assert plan([deployment("d")], [worker("w0"), worker("w1")], nodes, held) == ()
    actions = plan([deployment("d"), deployment("e", 2)], [worker("w0"), worker("w1")], nodes, held)
    assert [put(a).assignment.worker_id for a in actions[:1]] == ["w1"]
    assert actions[1] == Unplaced("e", 1, (("w0", "cordoned"), ("w1", "has_a_replica")))


def test_drained_node_moves_its_replica_only_once_it_is_ready_elsewhere() -> None:
    nodes = [Node("w0", cordoned=True, draining=True)]
    workers = all_ready([worker("w0"), worker("w1")], {"w0": Assignment("w0", (version("d"),))})
    held = {"w0": Assignment("w0", (version("d"),))}
    held = apply(held, plan([deployment("d")], workers, nodes, list(held.values())))
    assert placed(held, "d") == ["w0", "w1"]
    assert plan([deployment("d")], workers, nodes, list(held.values())) == ()
    held = apply(held, plan([deployment("d")], all_ready(workers, held), nodes, list(held.values())))
    assert placed(held, "d") == ["w1"]
    assert held["w0"].versions == ()


def test_drain_with_nowhere_to_go_keeps_serving_and_says_why() -> None:
    nodes = [Node("w0", cordoned=True, draining=True)]
    held = [Assignment("w0", (version("d"),))]
    assert plan([deployment("d")], [worker("w0")], nodes, held) == (
        Unplaced("d", 1, (("w0", "has_a_replica"),)),
    )


def test_selector_is_honoured_and_a_changed_one_moves_the_replica() -> None:
    wanted = deployment("d", node_selector={"gpu": "h200"})
    workers = [worker("w0"), worker("w1", labels={"gpu": "h200"})]
    assert put(plan([wanted], workers, [], [])[0]).assignment.worker_id == "w1"
    held = {"w0": Assignment("w0", (version("d"),))}
    held = apply(held, plan([wanted], workers, [], list(held.values())))
    held = apply(held, plan([wanted], all_ready(workers, held), [], list(held.values())))
    assert placed(held, "d") == ["w1"]
    assert plan([wanted], [worker("w0")], [], []) == (Unplaced("d", 1, (("w0", "lacks_a_label"),)),)


def test_dead_workers_replica_is_placed_elsewhere_and_dropped_once_that_is_ready() -> None:
    held = {"gone": Assignment("gone", (version("d"),))}
    actions = plan([deployment("d")], [worker("w1")], [], list(held.values()))
    assert actions == (PutAssignment(Assignment("w1", (version("d"),)), ("d: placed",)),)
    held = apply(held, actions)
    assert plan([deployment("d")], [worker("w1")], [], list(held.values())) == ()
    ready = all_ready([worker("w1")], held)
    assert plan([deployment("d")], ready, [], list(held.values())) == (DropAssignment("gone"),)


def test_worker_that_comes_back_finds_its_assignment() -> None:
    held = [Assignment("w0", (version("d"),))]
    assert plan([deployment("d")], [], [], held) == (Unplaced("d", 1, ()),)
    assert plan([deployment("d")], [worker("w0")], [], held) == ()
    assert plan([], [], [], held) == (DropAssignment("w0"),)


def test_of_two_replicas_that_move_the_live_one_serves_on() -> None:
    held = [Assignment("a-gone", (version("d"),)), Assignment("w0", (version("d"),))]
    workers = [worker("w0", draining=True), worker("w1")]
    held.append(Assignment("w1", (version("d"),)))
    assert plan([deployment("d")], workers, [], held) == (DropAssignment("a-gone"),)


def test_a_new_version_takes_the_place_of_one_that_serves_nobody() -> None:
    held = [Assignment("w0", (version("d", "sha256:0"),))]
    actions = plan([deployment("d")], [worker("w0"), worker("w1")], [], held)
    assert actions == (PutAssignment(Assignment("w0", (version("d"),)), ("d: other version",)),)


def test_deleted_deployment_leaves_an_empty_assignment() -> None:
    actions = plan([], [worker("w0")], [], [Assignment("w0", (version("d"),))])
    assert actions == (PutAssignment(Assignment("w0"), ("d: deployment deleted",)),)


def test_surplus_gives_up_what_is_not_ready_first() -> None:
    held = {name: Assignment(name, (version("d"),)) for name in ("w0", "w1", "w2")}
    workers = all_ready([worker("w0"), worker("w1"), worker("w2")], held)
    workers[1] = replace(workers[1], versions=())
    actions = plan([deployment("d", 2)], workers, [], list(held.values()))
    assert actions == (PutAssignment(Assignment("w1"), ("d: surplus",)),)


def test_higher_priority_is_placed_first_when_room_is_short() -> None:
    full = tuple(version(f"f{n:02}") for n in range(MAX_VERSIONS_PER_WORKER - 1))
    fill = [deployment(f"f{n:02}") for n in range(MAX_VERSIONS_PER_WORKER - 1)]
    low, high = deployment("a", priority=Priority.BATCH), deployment("z", priority=Priority.INTERACTIVE)
    actions = plan([low, high, *fill], [worker("w0")], [], [Assignment("w0", full)])
    assert "z" in {one.deployment for one in put(actions[0]).assignment.versions}
    assert actions[1] == Unplaced("a", 1, (("w0", "full"),))


# --- whatever the fleet looks like -----------------------------------------------------------------

names = st.sampled_from(["d0", "d1", "d2", "d3"])
ids = st.sampled_from([f"w{n}" for n in range(6)])
labels = st.sampled_from([{}, {"gpu": "a"}, {"gpu": "b"}])


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Deployment], list[Worker], list[Node], dict[str, Assignment]]:
    deployments = [
        deployment(
            name,
            draw(st.integers(0, 6)),
            node_selector=draw(labels),
            priority=draw(st.sampled_from(list(Priority))),
        )
        for name in draw(st.sets(names))
    ]
    workers = [
        worker(one, draw(st.sampled_from("ab")), labels=draw(labels), draining=draw(st.booleans()))
        for one in draw(st.sets(ids))
    ]
    nodes = [Node(one, draw(st.booleans()), draw(st.booleans())) for one in draw(st.sets(ids))]
    assignments = {
        one: Assignment(
            one,
            tuple(
                version(name, draw(st.sampled_from(["sha256:0", "sha256:1"])))
                for name in sorted(draw(st.sets(names)))
            ),
        )
        for one in draw(st.sets(ids))
    }
    return deployments, workers, nodes, assignments


@settings(max_examples=300, deadline=None)
@given(fleets(), st.randoms(use_true_random=False))
def test_converges_and_then_rests(
    fleet: tuple[list[Deployment], list[Worker], list[Node], dict[str, Assignment]], rng: random.Random
) -> None:
    deployments, workers, nodes, assignments = fleet
    first = plan(deployments, workers, nodes, list(assignments.values()))
    mixed = plan(
        rng.sample(deployments, len(deployments)),
        rng.sample(workers, len(workers)),
        rng.sample(nodes, len(nodes)),
        rng.sample(list(assignments.values()), len(assignments)),
    )
    assert mixed == first, "the order of its inputs matters"

    for _ in range(4):
        actions = plan(deployments, workers, nodes, list(assignments.values()))
        by_id = {one.worker_id: one for one in workers}
        by_node = {one.worker_id: one for one in nodes}
        for action in actions:
            if isinstance(action, PutAssignment):
                _check_additions(action, assignments, deployments, by_id, by_node)
        assignments = apply(assignments, actions)
        again = plan(deployments, workers, nodes, list(assignments.values()))
        assert not [a for a in again if not isinstance(a, Unplaced)], "a second pass writes"
        workers = all_ready(workers, assignments)
    _check_rest(deployments, workers, nodes, assignments)


def _check_additions(
    action: PutAssignment,
    assignments: dict[str, Assignment],
    deployments: list[Deployment],
    workers: dict[str, Worker],
    nodes: dict[str, Node],
) -> None:
    worker_id = action.assignment.worker_id
    before = {v.deployment for v in assignments.get(worker_id, Assignment(worker_id)).versions}
    wanted = {one.meta.name: one for one in deployments}
    assert len(action.assignment.versions) <= max(MAX_VERSIONS_PER_WORKER, len(before))
    for name in {v.deployment for v in action.assignment.versions} - before:
        node = nodes.get(worker_id, Node(worker_id))
        assert Host(workers[worker_id], True, node, None, {}).rejection(wanted[name]) == ""


def _check_rest(
    deployments: list[Deployment],
    workers: list[Worker],
    nodes: list[Node],
    assignments: dict[str, Assignment],
) -> None:
    live = {one.worker_id for one in workers}
    served = {one.meta.name for one in deployments}
    unplaced = {
        a.deployment: a
        for a in plan(deployments, workers, nodes, list(assignments.values()))
        if isinstance(a, Unplaced)
    }
    for held in assignments.values():
        names = {version.deployment for version in held.versions}
        assert names <= served
        assert held.worker_id in live or names <= set(unplaced), "a dead worker is still assigned to"
        new = [v for v in held.versions if v.version_digest == "sha256:1"]
        assert max(Counter(v.deployment for v in new).values(), default=1) == 1
        before = {v.deployment for v in held.versions} - {v.deployment for v in new}
        assert before <= set(unplaced), "an old version is left"
    for one in deployments:
        where = [w for w in placed(assignments, one.meta.name) if w in live]
        missing = unplaced[one.meta.name].missing if one.meta.name in unplaced else 0
        staying = [w for w in where if _stays(one, w, workers, nodes)]
        assert len(staying) == one.replicas - missing
        assert len(where) <= one.replicas, "a replica that moves stayed though it is served elsewhere"
        if missing:
            free = [w for w in live - set(where) if _eligible(one, w, workers, nodes)]
            assert free == [], "a worker could take it"


def _stays(wanted: Deployment, worker_id: str, workers: list[Worker], nodes: list[Node]) -> bool:
    one = next(w for w in workers if w.worker_id == worker_id)
    node = next((n for n in nodes if n.worker_id == worker_id), Node(worker_id))
    matches = all(one.labels.get(k) == v for k, v in wanted.node_selector.items())
    return matches and not node.draining and not one.draining


def _eligible(wanted: Deployment, worker_id: str, workers: list[Worker], nodes: list[Node]) -> bool:
    node = next((n for n in nodes if n.worker_id == worker_id), Node(worker_id))
    return _stays(wanted, worker_id, workers, nodes) and not node.cordoned


def test_a_group_of_devices_is_placed_where_there_are_as_many() -> None:
    wide = deployment("wide", executor="vllm", tensor_parallel=2, pipeline_parallel=2)
    (unplaced,) = plan([wide], [worker("w0", devices=2)], [], [])
    assert unplaced == Unplaced("wide", 1, (("w0", "too_few_devices: has 2 of 4"),))
    (action,) = plan([wide], [worker("w0", devices=2), worker("w1", devices=4)], [], [])
    assert put(action).assignment.worker_id == "w1"
    (held,) = put(action).assignment.versions
    assert held.engine == ("vllm", 2, 2)


def test_a_replica_moves_to_a_worker_with_the_devices_that_are_wanted_now() -> None:
    narrow = Assignment("w0", (version("d"),))
    wide = deployment("d", executor="vllm", tensor_parallel=2)
    workers = [worker("w0"), worker("w1", devices=2)]
    after = apply({"w0": narrow}, plan([wide], workers, [], [narrow]))
    assert "w1" in placed(after, "d")
