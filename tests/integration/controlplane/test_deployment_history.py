"""The states of a deployment are kept with each change, bounded, and can be had again."""

from __future__ import annotations

import pytest

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.resources.deployments import (
    DEPLOYMENT_HISTORY,
    MAX_REVISIONS,
    kept,
    revisions_of,
)
from services.controlplane.rollouts.records import RolloutPhase
from services.controlplane.rollouts.writes import context_in, effects
from services.core.errors import NotFound
from services.core.records import DEPLOYMENTS, Deployment, Meta
from services.ports.store import Put
from services.runtime.fleet_state.informer import Versioned
from tests.integration.controlplane.plane import DIGEST, OTHER, Plane
from tests.integration.controlplane.test_rollouts import final, ready
from tests.unit.controlplane.policy.test_update import OLD
from tests.unit.controlplane.rollouts.policy.driven import rollout


async def revisions(plane: Plane) -> list[pb.DeploymentRevision]:
    request = pb.ListDeploymentRevisionsRequest(name="chat")
    answer = await plane.call("ListDeploymentRevisions", request)
    assert isinstance(answer, pb.ListDeploymentRevisionsResponse)
    return list(answer.revisions)


async def update(plane: Plane, version: str, **fields: object) -> None:
    message = pb.Deployment(
        metadata=pb.Metadata(name="chat"),
        model="tiny",
        version=version,
        **{"replicas": 1, **fields},  # type: ignore[arg-type]
    )
    await plane.call("UpdateDeployment", pb.UpdateDeploymentRequest(deployment=message))


async def test_each_change_is_kept_newest_first(plane: Plane) -> None:
    await plane.deployment("chat", DIGEST)
    await update(plane, OTHER, price=pb.Price(output_micros=7))
    found = await revisions(plane)
    assert [(one.cause, one.deployment.version_digest) for one in found] == [
        ("update", OTHER),
        ("create", DIGEST),
    ]
    assert found[0].deployment.price.output_micros == 7
    assert found[0].name > found[1].name


async def test_the_history_is_bounded(plane: Plane) -> None:
    await plane.deployment("chat", DIGEST)
    for number in range(MAX_REVISIONS + 5):
        await update(plane, OTHER if number % 2 else DIGEST)
    assert len(await revisions(plane)) == MAX_REVISIONS


def earlier(count: int, name: str = "chat") -> list[Put]:
    """The states of a deployment since 1970."""
    old = Deployment(Meta(name), "tiny", "v0", OLD, 1)
    return [
        each
        for at_s in range(count)
        for each in kept(old, at_s, "update", states=())
        if isinstance(each, Put)
    ]


async def test_the_rollouts_of_operators_prune_the_history(plane: Plane) -> None:
    await plane.deployment("chat", DIGEST)
    await plane.store.commit(earlier(MAX_REVISIONS - 1))
    await ready(plane, DIGEST)
    await final(plane)
    await plane.call("RevertRollout", pb.RevertRolloutRequest(name="r"))
    found = await revisions_of(plane.store, "chat")
    assert (len(found), found[0][1].cause) == (MAX_REVISIONS, "revert of rollout r")


def test_the_rollouts_of_the_leader_prune_the_history() -> None:
    states = [one.key for one in earlier(MAX_REVISIONS, "d")]
    deployment = Deployment(Meta("d"), "tiny", "v1", OLD, 1)
    keys = {DEPLOYMENTS + "d": deployment, DEPLOYMENT_HISTORY + "d2/1": None, **dict.fromkeys(states)}
    context = context_in({key: Versioned(held, 1, 1) for key, held in keys.items()}, "d")
    assert context is not None
    writes = effects(rollout(phase=RolloutPhase.FINISHING, phase_unix_s=1e9), context)
    assert [one.key for one in writes.operations if one.key in keys] == [DEPLOYMENTS + "d", states[0]]


async def test_a_history_that_outgrew_a_commit_is_pruned_by_several(plane: Plane) -> None:
    """Rollouts of earlier versions kept every state."""
    await plane.deployment("chat", DIGEST)
    states = earlier(200)
    await plane.store.commit(states[:100])
    await plane.store.commit(states[100:])
    for _ in range(4):
        await update(plane, OTHER)
    assert len(await revisions_of(plane.store, "chat")) == MAX_REVISIONS


async def test_a_deployment_has_no_state_of_an_earlier_one_of_its_name(plane: Plane) -> None:
    await plane.deployment("chat", OTHER)
    await plane.call("DeleteDeployment", pb.DeleteDeploymentRequest(name="chat"))
    with pytest.raises(NotFound):
        await revisions(plane)
    await plane.deployment("chat", DIGEST)
    assert [one.deployment.version_digest for one in await revisions(plane)] == [DIGEST]
    prices = [one.deployment.version_digest for _, one in await revisions_of(plane.store, "chat")]
    assert prices == [DIGEST, OTHER], "the ledger still reads what the earlier one cost"
