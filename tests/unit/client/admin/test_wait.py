"""Waiting for deployments and drains, told what a control plane would answer; and changes in a race."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.client import Conflict, DeadlineExceeded, WaitFailed
from fairway.client.admin.resources import read_change_write
from fairway.client.admin.watch import describe, until_drained, until_ready
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import worker_pb2

T = TypeVar("T")
READY, LOADING, FAILED, RETIRING = (
    worker_pb2.VERSION_STATE_READY,
    worker_pb2.VERSION_STATE_LOADING,
    worker_pb2.VERSION_STATE_FAILED,
    worker_pb2.VERSION_STATE_RETIRING,
)


def answers(*states: T) -> Callable[[], Awaitable[T]]:
    """The states one after the other; the last one stays."""
    left = list(states)

    async def read() -> T:
        return left.pop(0) if len(left) > 1 else left[0]

    return read


def deployment(*replicas: cp.ReplicaStatus, wanted: int = 2, message: str = "") -> cp.Deployment:
    ready = sum(replica.state == READY for replica in replicas)
    return cp.Deployment(
        metadata=cp.Metadata(name="chat"),
        replicas=wanted,
        version_digest="new",
        status=cp.DeploymentStatus(ready_replicas=ready, replicas=replicas, message=message),
    )


def replica(
    worker: str, state: worker_pb2.VersionState.ValueType, digest: str = "new", **values: object
) -> cp.ReplicaStatus:
    return cp.ReplicaStatus(worker_id=worker, state=state, version_digest=digest, **values)  # type: ignore[arg-type]


async def test_deployment_is_ready_once_all_run_the_wanted_version() -> None:
    told: list[str] = []
    read = answers(
        deployment(replica("a", READY, "old"), replica("b", READY, "old")),
        deployment(replica("a", READY), message="no worker for 1 replicas"),
        deployment(
            replica("a", READY), replica("b", LOADING, progress_ratio=0.5), replica("c", READY, "old")
        ),
        deployment(replica("a", READY), replica("b", READY), replica("c", RETIRING, "old")),
    )
    found = await until_ready(read, lambda found: told.append(describe(found)), timeout_s=60)
    assert {each.version_digest for each in found.status.replicas} == {"new", "old"}
    assert told[2] == "a: ready; b: loading 50 %; c (old version): ready"
    assert (describe(deployment()), describe(deployment(message="m"))) == ("waiting for a worker", "m")


async def test_deployment_without_replicas_is_reached_once_none_is_left() -> None:
    read = answers(deployment(replica("a", READY), wanted=0), deployment(wanted=0))
    assert not (await until_ready(read, lambda _: None, timeout_s=60)).status.replicas


async def test_replica_that_fails_for_good_ends_the_wait() -> None:
    gone = replica("a", FAILED, message="it needs 9 GiB, 2 GiB are free", reason="DOES_NOT_FIT")
    with pytest.raises(WaitFailed, match="9 GiB") as caught:
        await until_ready(answers(deployment(gone)), lambda _: None, timeout_s=60)
    assert caught.value.reason == "DOES_NOT_FIT"


async def test_replica_that_gets_memory_once_the_version_before_leaves_is_waited_for() -> None:
    short = replica("a", FAILED, message="it needs 9 GiB, 2 GiB are free", reason="DOES_NOT_FIT")
    first = deployment(replica("a", READY, "old"), short, replica("b", READY, "old"))
    await until_ready(
        answers(first, deployment(replica("a", READY), replica("b", READY))), lambda _: None, timeout_s=60
    )
    alone = deployment(replica("a", READY, "old"), short, wanted=1, message="no worker has memory for both")
    with pytest.raises(WaitFailed, match="memory for both"):
        await until_ready(answers(alone), lambda _: None, timeout_s=60)


async def test_replica_that_is_tried_again_is_waited_for_a_few_times() -> None:
    again = replica("a", FAILED, failed_attempts=1, retry_time=Timestamp(seconds=1))
    last = replica("a", FAILED, failed_attempts=3, retry_time=Timestamp(seconds=9), message="exit code 1")
    read = answers(deployment(again), deployment(again), deployment(last))
    with pytest.raises(WaitFailed, match="exit code 1"):
        await until_ready(read, lambda _: None, timeout_s=60)


async def test_failure_of_the_version_before_ends_nothing() -> None:
    read = answers(
        deployment(replica("a", FAILED, "old"), wanted=1), deployment(replica("a", READY), wanted=1)
    )
    await until_ready(read, lambda _: None, timeout_s=60)


async def test_wait_that_is_over_says_what_is_missing() -> None:
    read = answers(deployment(message="no worker for 2 replicas: 1 cordoned"))
    with pytest.raises(DeadlineExceeded, match=r"0 of 2 replicas.*1 cordoned") as caught:
        await until_ready(read, lambda _: None, timeout_s=0)
    assert caught.value.reason == "NOT_READY_IN_TIME"


def node(*, draining: bool = True, **values: object) -> cp.Node:
    found = cp.Node(metadata=cp.Metadata(name="w"), draining=draining)
    if draining:
        found.drain.CopyFrom(cp.DrainProgress(**values))  # type: ignore[arg-type]
    return found


async def test_drain_is_done_when_the_node_says_so() -> None:
    read = answers(node(assigned_versions=1), node(ending_versions=1), node(done=True))
    assert (await until_drained(read, lambda _: None, timeout_s=60)).drain.done


async def test_drain_that_somebody_ends_or_that_takes_too_long() -> None:
    with pytest.raises(WaitFailed, match="uncordoned") as caught:
        await until_drained(
            answers(node(assigned_versions=1), node(draining=False)), lambda _: None, timeout_s=60
        )
    assert caught.value.reason == "DRAIN_ENDED"
    stuck = node(assigned_versions=1, waiting_for=["chat: no worker for 1 replicas"])
    with pytest.raises(DeadlineExceeded, match="chat: no worker") as late:
        await until_drained(answers(stuck), lambda _: None, timeout_s=0)
    assert late.value.reason == "NOT_DRAINED_IN_TIME"


async def test_change_by_someone_else_is_read_and_the_own_one_made_again() -> None:
    stored = {"etag": "1", "value": 0}
    races = [2, 3]

    async def read() -> dict[str, object]:
        return dict(stored)

    async def write(found: dict[str, object], etag: str) -> dict[str, object]:
        if races:  # somebody is faster
            stored["etag"] = str(races.pop(0))
        if etag != stored["etag"]:
            raise Conflict("it has another etag", reason="ETAG_MISMATCH")
        stored["value"] = 7
        return dict(stored)

    done = await read_change_write("", read, write, lambda found: str(found["etag"]))
    assert done["value"] == 7
    with pytest.raises(Conflict, match="etag"):
        await read_change_write("2", read, write, lambda found: str(found["etag"]))
    races += [5, 6, 7, 8]
    with pytest.raises(Conflict, match="etag"):
        await read_change_write("", read, write, lambda found: str(found["etag"]))
    assert races == []
