"""Deployments: the version that they pin, and the status that their workers make."""

from __future__ import annotations

import time

import pytest
from google.protobuf.duration_pb2 import Duration

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import worker_pb2
from services.adapters.memory.store import MemoryStore
from services.controlplane.service import ControlPlaneService
from services.core.errors import Conflict, InvalidInput, NotFound
from services.core.manifest import sha256_of
from services.core.records import (
    ASSIGNMENTS,
    DEPLOYMENTS,
    WORKERS,
    AssignedVersion,
    Assignment,
    Deployment,
    LoadedVersion,
    Meta,
    Tag,
    VersionRecord,
    VersionState,
    Worker,
    dump,
    tag_key,
    version_key,
)
from services.ports.store import Delete, Put
from tests.integration.controlplane.plane import DIGEST, OTHER, SEALER, Interleaving, Plane


async def test_deployment_pins_a_tag_to_its_digest(plane: Plane) -> None:
    made = await plane.deployment("chat", executor="null")
    assert (made.version, made.version_digest, made.executor) == ("prod", DIGEST, "null")
    await plane.put(tag_key("tiny", "prod"), Tag("tiny", "prod", OTHER))
    got = await plane.call("GetDeployment", pb.GetDeploymentRequest(name="chat"))
    assert got.deployment.version_digest == DIGEST  # type: ignore[attr-defined]
    got.deployment.replicas = 3  # type: ignore[attr-defined]
    updated = await plane.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=got.deployment))  # type: ignore[attr-defined]
    assert updated.deployment.version_digest == OTHER  # type: ignore[attr-defined]
    assert (await plane.deployment("pinned", OTHER)).version_digest == OTHER
    for version in ("absent", sha256_of(b"absent")):
        with pytest.raises(NotFound):
            await plane.deployment("d", version)
    with pytest.raises(InvalidInput):
        await plane.deployment("d", "../prod")


async def test_what_a_client_claims_of_server_fields_is_ignored(plane: Plane) -> None:
    made = await plane.deployment(
        "chat", version_digest=OTHER, status=pb.DeploymentStatus(ready_replicas=9, message="all is well")
    )
    assert made.version_digest == DIGEST
    assert made.status.ready_replicas == 0
    assert made.status.message == "no worker for 1 replicas: there is none"


async def test_a_version_that_is_deleted_meanwhile_is_not_deployed(plane: Plane) -> None:
    store: MemoryStore = (interleaving := Interleaving(plane.clock))
    await store.commit([Put(version_key("tiny", DIGEST), dump(VersionRecord("tiny", DIGEST, 1, 0.0)))])
    service = ControlPlaneService(store, plane.clock, SEALER, plane.limiter)

    async def forget() -> None:
        await store.commit([Delete(version_key("tiny", DIGEST))])

    interleaving.between = forget  # type: ignore[assignment]
    with pytest.raises(Conflict):
        await service.deployments.create(Deployment(Meta("d"), "tiny", DIGEST, "", 1))
    assert (await store.list(DEPLOYMENTS)).entries == ()


async def test_status_joins_workers_and_says_what_is_missing(plane: Plane) -> None:
    await plane.deployment("chat", replicas=3)
    states = {"w0": VersionState.READY, "w1": VersionState.FAILED}
    for worker_id, state in states.items():
        loaded = LoadedVersion("chat", "tiny", DIGEST, state, "no room" if worker_id == "w1" else "")
        await plane.put(WORKERS + worker_id, Worker(worker_id, "127.0.0.1:1", versions=(loaded,)))
        held = Assignment(worker_id, (AssignedVersion("chat", "tiny", DIGEST),))
        await plane.put(ASSIGNMENTS + worker_id, held)
    held = Assignment("dead", (AssignedVersion("chat", "tiny", DIGEST),))
    await plane.put(ASSIGNMENTS + "dead", held)
    got = await plane.call("GetDeployment", pb.GetDeploymentRequest(name="chat"))
    status = got.deployment.status  # type: ignore[attr-defined]
    assert (status.assigned_replicas, status.ready_replicas) == (2, 1)
    assert status.message == "no worker for 1 replicas: 2 has_a_replica; w1: no room"
    assert [replica.state for replica in status.replicas] == [
        worker_pb2.VERSION_STATE_READY,
        worker_pb2.VERSION_STATE_FAILED,
    ]
    listed = await plane.call("ListDeployments", pb.ListDeploymentsRequest())
    assert listed.deployments[0].status == status  # type: ignore[attr-defined]


async def test_weights_that_no_engine_replaces_are_refused_by_their_kind(plane: Plane) -> None:
    key, in_place = version_key("tiny", OTHER), Duration(seconds=20)
    for record, why in (
        (VersionRecord("tiny", OTHER, 1, 0.0, kind="fixed-cost"), "a fixed-cost model"),
        (VersionRecord("tiny", OTHER, 1, 0.0, base_model="tiny", base_digest=DIGEST), "an adapter"),
    ):
        await plane.put(key, record)
        with pytest.raises(InvalidInput, match=f"{why} has no weights to replace"):
            await plane.deployment("chat", OTHER, in_place=in_place)
    with pytest.raises(InvalidInput, match="executor null has no weights"):
        await plane.deployment("chat", DIGEST, executor="null", in_place=in_place)
    assert (await plane.deployment("chat", DIGEST, in_place=in_place)).in_place == in_place


async def test_a_page_of_deployments_plans_the_fleet_once(plane: Plane) -> None:
    for number in range(60):
        await plane.put(WORKERS + f"w{number}", Worker(f"w{number}", "127.0.0.1:1"))
    for number in range(240):
        deployment = Deployment(Meta(f"d{number}"), "tiny", "prod", DIGEST, replicas=4)
        await plane.put(DEPLOYMENTS + f"d{number}", deployment)
    began_s = time.process_time()
    listed = await plane.call("ListDeployments", pb.ListDeploymentsRequest(page_size=1000))
    elapsed_s = time.process_time() - began_s
    assert len(listed.deployments) == 240  # type: ignore[attr-defined]
    assert elapsed_s < 3, "a plan per deployment keeps the control plane from renewing its lease"


async def test_an_executor_that_does_not_serve_the_version_is_refused_with_the_one_that_does(
    plane: Plane,
) -> None:
    key = version_key("tiny", OTHER)
    problems = {"torch": "architectures: ['Gemma2ForCausalLM'] is not supported by the engine", "vllm": ""}
    await plane.put(key, VersionRecord("tiny", OTHER, 1, 0.0, engine_problems=problems))
    assert (await plane.deployment("picked", OTHER)).executor == "vllm"
    assert (await plane.deployment("named", OTHER, executor="vllm")).executor == "vllm"
    with pytest.raises(InvalidInput, match=r"Gemma2ForCausalLM.*; use executor: vllm"):
        await plane.deployment("own", OTHER, executor="torch")
    fixed = {
        "torch": "",
        "vllm": "vLLM serves text encoders alone, not images and tensors",
    }
    await plane.put(key, VersionRecord("tiny", OTHER, 1, 0.0, engine_problems=fixed))
    with pytest.raises(InvalidInput, match=r"text encoders alone.*; use executor: torch"):
        await plane.deployment("rows", OTHER, executor="vllm")
    assert (await plane.deployment("rows", OTHER)).executor == "torch"
    assert (await plane.deployment("unchecked", DIGEST, executor="vllm")).executor == "vllm"
