"""The states of a deployment are kept with each change, bounded, and can be had again."""

from __future__ import annotations

from fairway.v1 import controlplane_pb2 as pb
from services.controlplane.resources.deployments import MAX_REVISIONS
from tests.integration.controlplane.plane import DIGEST, OTHER, Plane


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
