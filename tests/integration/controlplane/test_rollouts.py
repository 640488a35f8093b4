"""Rollouts over the wire: refused where they cannot work, planned without a write, aborted by any control
plane.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.resources.deployments import revisions_of
from services.controlplane.rollouts.controller import gate_plan
from services.controlplane.rollouts.records import Rollout, RolloutPhase
from services.core.errors import (
    AlreadyExists,
    Conflict,
    DoesNotFit,
    EtagMismatch,
    FailedPrecondition,
    FairwayError,
    InvalidInput,
    NotFound,
)
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    ROLLOUTS,
    WORKERS,
    AssignedVersion,
    Assignment,
    Deployment,
    LoadedVersion,
    VersionState,
    Worker,
    dump,
    load,
)
from services.core.rollouts.routes import ROUTES, ModelRoute, RouteArm
from services.ports.store import Delete, Listing, Put
from tests.integration.controlplane.plane import DIGEST, OTHER, Plane

MIB = 2**20
AT_ONCE = (pb.ROLLOUT_STRATEGY_BLUE_GREEN, pb.ROLLOUT_STRATEGY_INSTANT)


def message(name: str = "r", **fields: Any) -> pb.Rollout:
    values: dict[str, Any] = {
        "deployment": "chat",
        "arms": [pb.RolloutArm(name="canary", version=OTHER)],
        **fields,
    }
    return pb.Rollout(metadata=pb.Metadata(name=name), **values)


async def create(plane: Plane, rollout: pb.Rollout, **fields: Any) -> pb.Rollout:
    request = pb.CreateRolloutRequest(rollout=rollout, **fields)
    answer = await plane.call("CreateRollout", request)
    assert isinstance(answer, pb.CreateRolloutResponse)
    return answer.rollout


async def ready(plane: Plane, *digests: str, memory_bytes: int = 0) -> None:
    """One worker with these versions READY, 64 MiB each."""
    versions = tuple(
        LoadedVersion(
            "chat", "tiny", digest, VersionState.READY, weight_bytes=64 * MIB, needed_bytes=64 * MIB
        )
        for digest in digests
    )
    await plane.put(WORKERS + "w0", Worker("w0", "w0:1", versions=versions, memory_bytes=memory_bytes))


async def route(plane: Plane) -> ModelRoute | None:
    entry = await plane.store.get(ROUTES + "chat")
    return None if entry is None else load(entry.value, ModelRoute)


@pytest.fixture
async def serving(plane: Plane) -> Plane:
    await plane.deployment("chat", DIGEST)
    await ready(plane, DIGEST)
    return plane


async def test_a_rollout_starts_with_its_versions_beside_and_no_traffic(serving: Plane) -> None:
    found = await create(serving, message(), request_id="once")
    assert found.phase == pb.ROLLOUT_PHASE_LOADING
    assert (found.stable_digest, found.arms[0].version_digest) == (DIGEST, OTHER)
    assert [round(step.weight_ratio * 100) for step in found.steps] == [1, 5, 25, 50, 100]
    assert [(arm.name, arm.weight_ratio, arm.ready_replicas) for arm in found.arm_status] == [
        ("stable", 1.0, 1),
        ("canary", 0.0, 0),
    ]
    stored = await route(serving)
    assert stored is not None
    assert [arm.weight_bp for arm in stored.arms] == [10_000, 0]
    again = await create(serving, message(), request_id="once")
    assert again.metadata.etag == found.metadata.etag
    with pytest.raises(Conflict):
        await create(serving, message("other"), request_id="once")
    listed = await serving.call("ListRollouts", pb.ListRolloutsRequest())
    assert isinstance(listed, pb.ListRolloutsResponse)
    assert [one.metadata.name for one in listed.rollouts] == ["r"]


async def test_one_rollout_of_a_deployment_at_a_time_and_its_version_does_not_change(serving: Plane) -> None:
    await create(serving, message())
    with pytest.raises(FailedPrecondition, match="open"):
        await create(serving, message("second"))
    with pytest.raises(FailedPrecondition, match="rollout of chat is open"):
        await serving.call("DeleteDeployment", pb.DeleteDeploymentRequest(name="chat"))
    changed = pb.Deployment(metadata=pb.Metadata(name="chat"), model="tiny", version=OTHER, replicas=1)
    with pytest.raises(FailedPrecondition, match="rollout of chat is open"):
        await serving.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=changed))
    changed.version, changed.replicas = DIGEST, 2
    await serving.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=changed))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"deployment": "none"}, FailedPrecondition),
        ({"arms": [pb.RolloutArm(name="canary", version=DIGEST)]}, FailedPrecondition),
        ({"arms": [pb.RolloutArm(name="canary", version="no-tag")]}, NotFound),
        ({"arms": []}, InvalidInput),
        ({"arms": [pb.RolloutArm(name="stable", version=OTHER)]}, InvalidInput),
        ({"steps": [pb.RolloutStep(weight_ratio=0.5), pb.RolloutStep(weight_ratio=0.1)]}, InvalidInput),
        ({"strategy": pb.ROLLOUT_STRATEGY_AB}, InvalidInput),
        *(({"strategy": one, "steps": [pb.RolloutStep(weight_ratio=0.5)]}, InvalidInput) for one in AT_ONCE),
        ({"strategy": pb.ROLLOUT_STRATEGY_SHADOW}, InvalidInput),
        ({"gate": pb.RolloutGate(metrics=["speed"])}, InvalidInput),
        ({"gate": pb.RolloutGate(accepted={"cost": " "})}, InvalidInput),
        ({"rules": pb.RolloutRules(overrides={"acme": "gone"})}, InvalidInput),
    ],
)
async def test_what_cannot_work_is_refused_before_it_starts(
    serving: Plane, fields: dict[str, Any], error: type[FairwayError]
) -> None:
    with pytest.raises(error):
        await create(serving, message(**fields))
    assert await route(serving) is None


async def test_without_a_stable_replica_or_during_an_update_nothing_starts(plane: Plane) -> None:
    await plane.deployment("chat", DIGEST)
    with pytest.raises(FailedPrecondition, match="no replica of chat is READY"):
        await create(plane, message())
    await ready(plane, DIGEST, "sha256:" + "00" * 32)
    with pytest.raises(FailedPrecondition, match="update of chat is under way"):
        await create(plane, message())


async def test_a_plan_shows_the_memory_and_writes_nothing(serving: Plane) -> None:
    await ready(serving, DIGEST, memory_bytes=200 * MIB)
    plan = await create(serving, message(), dry_run=True)
    (fit,) = plan.fits
    assert (fit.name, fit.replicas, list(fit.workers), fit.measured) == ("canary", 1, ["w0"], False)
    assert fit.needed_bytes == 1, "the size of its files"
    assert await route(serving) is None
    with pytest.raises(NotFound):
        await serving.call("GetRollout", pb.GetRolloutRequest(name="r"))


async def test_what_does_not_fit_says_so_before_it_starts(serving: Plane) -> None:
    other = LoadedVersion("x", "tiny", OTHER, VersionState.FAILED, needed_bytes=90 * MIB)
    held = LoadedVersion("chat", "tiny", DIGEST, VersionState.READY, weight_bytes=64 * MIB)
    worker = Worker("w0", "w0:1", versions=(held, other), memory_bytes=100 * MIB)
    await serving.put(WORKERS + "w0", worker)
    plan = await create(serving, message(), dry_run=True)
    assert plan.fits[0].missing_replicas == 1
    assert "needs 90 MiB" in plan.fits[0].rejected[0]
    with pytest.raises(DoesNotFit, match=r"do not fit beside the stable version.*needs two replicas"):
        await create(serving, message())
    with pytest.raises(FailedPrecondition, match="needs two replicas"):
        await create(serving, message(by_worker=True))
    assert await route(serving) is None


async def two_workers(plane: Plane, *, needed_mib: int) -> None:
    """Two replicas, and workers of 100 MiB on which the candidate needs so much."""
    await plane.deployment("chat", DIGEST, replicas=2)
    other = LoadedVersion("x", "tiny", OTHER, VersionState.FAILED, needed_bytes=needed_mib * MIB)
    held = LoadedVersion("chat", "tiny", DIGEST, VersionState.READY, weight_bytes=64 * MIB)
    assigned = AssignedVersion("chat", "tiny", DIGEST)
    for name in ("w0", "w1"):
        worker = Worker(name, f"{name}:1", versions=(held, other), memory_bytes=100 * MIB)
        await plane.put(WORKERS + name, worker)
        await plane.put(ASSIGNMENTS + name, Assignment(name, (assigned,)))


async def test_what_fits_in_the_place_of_the_stable_version_goes_worker_by_worker(plane: Plane) -> None:
    await two_workers(plane, needed_mib=90)
    plan = await create(plane, message(), dry_run=True)
    assert (plan.by_worker, plan.message) == (True, "worker by worker: 1 of 2 replicas serve meanwhile")
    assert [(list(fit.workers), fit.missing_replicas) for fit in plan.fits] == [(["w0", "w1"], 0)]
    found = await create(plane, message())
    assert found.by_worker
    stored = await route(plane)
    assert stored is not None
    assert (stored.by_worker, [arm.replicas for arm in stored.arms]) == (True, [1, 1])


async def test_where_nothing_fits_the_plan_and_the_start_give_the_bytes(plane: Plane) -> None:
    await two_workers(plane, needed_mib=110)
    plan = await create(plane, message(), dry_run=True)
    assert not plan.by_worker
    assert "in the place of the stable version either" in plan.message
    assert "needs 110 MiB, 36 of 100 MiB are free" in plan.fits[0].rejected[0]
    with pytest.raises(DoesNotFit, match=r"needs 110 MiB, 36 of 100 MiB are free.*either"):
        await create(plane, message())
    with pytest.raises(DoesNotFit, match=r"in the place of.*needs 110 MiB, 100 of 100 MiB are free"):
        await create(plane, message(by_worker=True))
    assert await route(plane) is None


@pytest.mark.parametrize("strategy", AT_ONCE)
async def test_all_traffic_at_once_has_one_step_with_the_requests_of_its_gate(
    serving: Plane, strategy: pb.RolloutStrategy.ValueType
) -> None:
    steps = [pb.RolloutStep(weight_ratio=1.0, min_requests=7)]
    found = await create(serving, message(strategy=strategy, steps=steps))
    assert [(step.weight_ratio, step.min_requests) for step in found.steps] == [(1.0, 7)]
    assert found.soak.seconds == 300, "also of an instant one, at most"
    stored = await route(serving)
    assert stored is not None
    assert stored.step.endswith("/loading"), "what the soak is compared with"


@pytest.mark.parametrize("strategy", AT_ONCE)
async def test_only_a_canary_goes_worker_by_worker(
    plane: Plane, strategy: pb.RolloutStrategy.ValueType
) -> None:
    await two_workers(plane, needed_mib=90)
    with pytest.raises(DoesNotFit, match="only a canary"):
        await create(plane, message(strategy=strategy))
    with pytest.raises(FailedPrecondition, match="only a canary"):
        await create(plane, message(strategy=strategy, by_worker=True))


async def test_more_workers_than_a_rollout_has_steps_are_refused(plane: Plane) -> None:
    """The few steps of the request become one for each worker."""
    await plane.deployment("chat", DIGEST, replicas=40)
    await ready(plane, DIGEST)
    with pytest.raises(FailedPrecondition, match="40 replicas need more than 32 steps"):
        await create(plane, message(by_worker=True))
    assert await route(plane) is None


async def test_an_abort_needs_no_leader(serving: Plane) -> None:
    """No controller runs in this test: the call itself moves the traffic."""
    found = await create(serving, message())
    with pytest.raises(EtagMismatch):
        await serving.call("AbortRollout", pb.AbortRolloutRequest(name="r", etag="1"))
    request = pb.AbortRolloutRequest(name="r", etag=found.metadata.etag, request_id="a", reason="too slow")
    answer = await serving.call("AbortRollout", request)
    assert isinstance(answer, pb.AbortRolloutResponse)
    assert answer.rollout.phase == pb.ROLLOUT_PHASE_ROLLING_BACK
    stored = await route(serving)
    assert stored is not None
    assert stored.arms[1].closed
    replayed = await serving.call("AbortRollout", request)
    assert isinstance(replayed, pb.AbortRolloutResponse)
    assert replayed.rollout.metadata.etag == answer.rollout.metadata.etag
    assert "too slow" in answer.rollout.history[-1].message
    deployment = await serving.store.get(DEPLOYMENTS + "chat")
    assert deployment is not None


async def final(plane: Plane) -> None:
    """The rollout r is final: the deployment has its candidate, and no route is left."""
    await create(plane, message())
    key, names = ROLLOUTS + "r", (DEPLOYMENTS + "chat", ROUTES + "chat")
    held, deployment = [await plane.store.get(name) for name in (key, names[0])]
    assert held is not None
    assert deployment is not None
    await plane.put(key, replace(load(held.value, Rollout), phase=RolloutPhase.COMPLETED))
    changed = replace(load(deployment.value, Deployment), version="v2", version_digest=OTHER)
    await plane.put(names[0], changed)
    await plane.store.commit([Delete(names[1])])


async def test_a_final_rollout_is_reverted_by_any_control_plane(serving: Plane) -> None:
    await final(serving)
    with pytest.raises(FailedPrecondition, match="fairway rollouts revert r"):
        await serving.call("AbortRollout", pb.AbortRolloutRequest(name="r"))
    request = pb.RevertRolloutRequest(name="r", request_id="once", reason="odd answers")
    for _ in range(2):
        answer = await serving.call("RevertRollout", request)
        assert isinstance(answer, pb.RevertRolloutResponse)
        assert answer.rollout.phase == pb.ROLLOUT_PHASE_RESTORING
        assert [entry.what for entry in answer.rollout.history] == ["REVERTED_BY_OPERATOR"]
    stored = await serving.store.get(DEPLOYMENTS + "chat")
    assert stored is not None
    assert load(stored.value, Deployment).version_digest == DIGEST
    newest = (await revisions_of(serving.store, "chat"))[0][1]
    assert (newest.cause, newest.deployment.version_digest) == ("revert of rollout r", DIGEST)


async def test_what_came_after_a_rollout_is_not_undone_by_its_revert(serving: Plane) -> None:
    await final(serving)
    await ready(serving, OTHER)
    await create(serving, message("next", arms=[pb.RolloutArm(name="canary", version=DIGEST)]))
    with pytest.raises(FailedPrecondition, match="another rollout of chat is open: revert that one"):
        await serving.call("RevertRollout", pb.RevertRolloutRequest(name="r"))
    await serving.store.commit([Delete(ROUTES + "chat")])
    stored = await serving.store.get(DEPLOYMENTS + "chat")
    assert stored is not None
    await serving.put(stored.key, replace(load(stored.value, Deployment), version_digest=DIGEST))
    with pytest.raises(FailedPrecondition, match="deployments rollback"):
        await serving.call("RevertRollout", pb.RevertRolloutRequest(name="r"))


async def test_an_ab_test_and_a_shadow_have_the_requests_of_their_one_step(serving: Plane) -> None:
    steps = [pb.RolloutStep(weight_ratio=1.0, min_requests=7)]
    arms = [pb.RolloutArm(name="terse", version=OTHER, weight_ratio=0.3)]
    found = await create(serving, message(strategy=pb.ROLLOUT_STRATEGY_AB, arms=arms, steps=steps))
    assert [step.min_requests for step in found.steps] == [7]
    held = await serving.store.get(ROLLOUTS + "r")
    assert held is not None
    assert gate_plan(load(held.value, Rollout), 1.0).min_requests == 7
    with pytest.raises(InvalidInput, match="one step, of 100 %"):
        await create(serving, message("s", strategy=pb.ROLLOUT_STRATEGY_AB, arms=arms, steps=2 * steps))


async def test_pause_resume_and_promote_are_kept(serving: Plane) -> None:
    await create(serving, message())
    paused = await serving.call("PauseRollout", pb.PauseRolloutRequest(name="r"))
    assert isinstance(paused, pb.PauseRolloutResponse)
    assert paused.rollout.paused
    resumed = await serving.call("ResumeRollout", pb.ResumeRolloutRequest(name="r"))
    assert isinstance(resumed, pb.ResumeRolloutResponse)
    assert not resumed.rollout.paused
    with pytest.raises(FailedPrecondition):
        await serving.call("PromoteRollout", pb.PromoteRolloutRequest(name="r"))
    accepted = pb.PromoteRolloutRequest(name="r", accepted={"cost": "better answers"})
    answer = await serving.call("PromoteRollout", accepted)
    assert isinstance(answer, pb.PromoteRolloutResponse)
    assert answer.rollout.gate.accepted == {"cost": "better answers"}
    assert [entry.what for entry in answer.rollout.history] == ["PAUSED", "RESUMED", "ACCEPTED"]


async def test_a_name_is_used_once(serving: Plane) -> None:
    await create(serving, message())
    await serving.call("AbortRollout", pb.AbortRolloutRequest(name="r"))
    await serving.store.commit([])
    with pytest.raises((AlreadyExists, FailedPrecondition)):
        await create(serving, message())


async def test_a_route_that_was_spoiled_by_hand_is_written_again_by_what_operators_do(serving: Plane) -> None:
    found = await create(serving, message())
    await serving.store.commit([Put(ROUTES + "chat", b"{")])
    read = await serving.call("GetRollout", pb.GetRolloutRequest(name="r"))
    assert isinstance(read, pb.GetRolloutResponse)
    request = pb.AbortRolloutRequest(name="r", etag=found.metadata.etag)
    await serving.call("AbortRollout", request)
    stored = await route(serving)
    assert stored is not None
    assert ([arm.weight_bp for arm in stored.arms], stored.fault) == ([10_000, 0], "")


SPLIT = ModelRoute("chat", "by hand", (RouteArm("stable", DIGEST, 5_000), RouteArm("canary", OTHER, 5_000)))
BY_HAND = {
    "unreadable": b"{",
    "no split": dump(ModelRoute("chat", "by hand", ())),
    "a split": dump(SPLIT),
}


@pytest.mark.parametrize("stray", BY_HAND)
@pytest.mark.parametrize("verb", ["start", "revert", "update", "delete"])
async def test_a_route_without_an_open_rollout_goes_with_the_next_write(
    plane: Plane, stray: str, verb: str
) -> None:
    await plane.deployment("chat", DIGEST)
    await ready(plane, DIGEST)
    if verb == "revert":
        await final(plane)
    elif stray == "a split":
        await ready(plane, DIGEST, OTHER)  # The planner follows it.
    await plane.store.commit([Put(ROUTES + "chat", BY_HAND[stray])])
    match verb:
        case "start":
            await create(plane, message())
        case "revert":
            await plane.call("RevertRollout", pb.RevertRolloutRequest(name="r"))
        case "update":
            changed = pb.Deployment(metadata=pb.Metadata(name="chat"), model="tiny", version=OTHER)
            await plane.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=changed))
        case "delete":
            await plane.call("DeleteDeployment", pb.DeleteDeploymentRequest(name="chat"))
    stored = await route(plane)
    assert (stored is not None and stored.salt.startswith("r/")) == (verb == "start")


async def test_a_spoiled_route_of_an_open_rollout_frees_nothing(serving: Plane) -> None:
    await create(serving, message())
    await serving.store.commit([Put(ROUTES + "chat", b"{")])
    changed = pb.Deployment(metadata=pb.Metadata(name="chat"), model="tiny", version=OTHER, replicas=1)
    with pytest.raises(FailedPrecondition, match="rollout of chat is open"):
        await serving.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=changed))
    with pytest.raises(FailedPrecondition, match="rollout of chat is open"):
        await serving.call("DeleteDeployment", pb.DeleteDeploymentRequest(name="chat"))
    with pytest.raises(FailedPrecondition, match="open"):
        await create(serving, message("second"))


@pytest.mark.parametrize("method", ["UpdateDeployment", "DeleteDeployment"])
async def test_a_rollout_that_opens_beside_a_stray_route_keeps_its_own(
    serving: Plane, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    await serving.store.commit([Put(ROUTES + "chat", b"{")])
    listed = serving.store.list

    async def opens_after(prefix: str) -> Listing:
        found = await listed(prefix)
        if prefix == ROLLOUTS:
            monkeypatch.undo()
            await create(serving, message())
        return found

    monkeypatch.setattr(serving.store, "list", opens_after)
    changed = pb.Deployment(metadata=pb.Metadata(name="chat"), model="tiny", version=OTHER, replicas=1)
    request = (
        pb.UpdateDeploymentRequest(deployment=changed)
        if method == "UpdateDeployment"
        else pb.DeleteDeploymentRequest(name="chat")
    )
    with pytest.raises(Conflict):
        await serving.call(method, request)
    stored = await route(serving)
    assert stored is not None
    assert stored.salt.startswith("r/")


@pytest.mark.parametrize(
    ("fields", "mend"),
    [
        ({"arms": [pb.RolloutArm(name="canary", version="no-tag")]}, "fairway models versions tiny"),
        ({"rules": pb.RolloutRules(overrides={"acme": "gone"})}, "name one of stable, canary"),
        ({"arms": []}, "1 to 4 arms"),
        ({"steps": [pb.RolloutStep(weight_ratio=0.0)]}, "weights above 0"),
    ],
)
async def test_a_route_to_nothing_is_refused_with_what_mends_it(
    serving: Plane, fields: dict[str, Any], mend: str
) -> None:
    with pytest.raises(FairwayError, match=mend):
        await create(serving, message(**fields))
    assert await route(serving) is None
