"""What is shown while the command line waits, and what it says when the wait fails."""

from __future__ import annotations

import pytest

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.watch import show_drain, show_replicas, until_deployed, until_drained
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import controlplane_pb2_grpc, worker_pb2
from tests.unit.cli.serving import admin_of

READY, LOADING, FAILED = (
    worker_pb2.VERSION_STATE_READY,
    worker_pb2.VERSION_STATE_LOADING,
    worker_pb2.VERSION_STATE_FAILED,
)
Told = list[tuple[str, float | None, str]]


class ControlPlane(controlplane_pb2_grpc.ControlPlaneServiceServicer):
    """Has one deployment and one node."""

    def __init__(self, deployment: cp.Deployment, node: cp.Node) -> None:
        self.deployment, self.node = deployment, node

    async def GetDeployment(self, request: object, context: object) -> cp.GetDeploymentResponse:
        return cp.GetDeploymentResponse(deployment=self.deployment)

    async def GetNode(self, request: object, context: object) -> cp.GetNodeResponse:
        return cp.GetNodeResponse(node=self.node)


def deployment(*replicas: cp.ReplicaStatus, message: str = "") -> cp.Deployment:
    status = cp.DeploymentStatus(replicas=replicas, message=message)
    return cp.Deployment(metadata=cp.Metadata(name="chat"), replicas=2, status=status)


def test_replicas_are_shown_one_by_one_and_what_the_missing_ones_wait_for() -> None:
    told: Told = []
    report = show_replicas(lambda name, ratio, detail: told.append((name, ratio, detail)))
    ready = cp.ReplicaStatus(worker_id="a", state=READY)
    loading = cp.ReplicaStatus(worker_id="b", state=LOADING, progress_ratio=0.5)
    report(deployment(ready, message="no worker for 1 replicas"))
    report(deployment(ready, loading))
    assert told == [
        ("a", 1.0, "ready"),
        ("chat", None, "no worker for 1 replicas"),
        ("a", 1.0, "ready"),
        ("b", 0.5, "loading"),
    ]


def test_a_drain_is_shown_until_it_is_done() -> None:
    told: Told = []
    report = show_drain(lambda name, ratio, detail: told.append((name, ratio, detail)))
    node = cp.Node(metadata=cp.Metadata(name="w"), draining=True)
    node.drain.CopyFrom(cp.DrainProgress(assigned_versions=1, ending_versions=1, waiting_for=["chat: none"]))
    report(node)
    node.drain.CopyFrom(cp.DrainProgress(done=True))
    report(node)
    assert told == [("w", None, "versions left: 2; chat: none"), ("w", 1.0, "drained")]


async def test_what_ends_a_wait_comes_with_the_next_step() -> None:
    gone = cp.ReplicaStatus(worker_id="a", state=FAILED, reason="DOES_NOT_FIT", message="it needs 9 GiB")
    node = cp.Node(metadata=cp.Metadata(name="w"), draining=True)
    service = ControlPlane(deployment(gone), node)  # type: ignore[abstract]
    async with admin_of(service) as admin:
        with pytest.raises(CliError, match="9 GiB") as failed:
            await until_deployed(admin, "chat", lambda _: None, timeout_s=60)
        service.deployment = deployment(message="1 cordoned")
        with pytest.raises(CliError, match="1 cordoned") as late:
            await until_deployed(admin, "chat", lambda _: None, timeout_s=0.1)
        with pytest.raises(CliError, match="versions left: 0") as stuck:
            await until_drained(admin, "w", lambda *_: None, timeout_s=0.1)
        service.node = cp.Node(metadata=cp.Metadata(name="w"))
        with pytest.raises(CliError, match="uncordoned") as ended:
            await until_drained(admin, "w", lambda *_: None, timeout_s=60)
    errors = [caught.value for caught in (failed, late, stuck, ended)]
    assert [error.reason for error in errors] == [
        "DOES_NOT_FIT",
        "NOT_READY_IN_TIME",
        "NOT_DRAINED_IN_TIME",
        "DRAIN_ENDED",
    ]
    assert {error.exit_code for error in errors} == {ExitCode.FAILED}
    assert "fairway deployments show chat" in errors[0].next_step
    assert "fairway nodes drain w" in errors[3].next_step
