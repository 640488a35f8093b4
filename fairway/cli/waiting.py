"""Waiting until the fleet is as it was asked to be, with what it is at meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.words import version_state
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import worker_pb2

POLL_S: Final = 0.25
_MAX_FAILED_ATTEMPTS: Final = 3
# Name, how far (0..1, None: unknown), what it does.
Show = Callable[[str, float | None, str], None]


async def until_deployed(
    read: Callable[[], Awaitable[cp.Deployment]],
    report: Callable[[cp.Deployment], None],
    *,
    timeout_s: float,
) -> cp.Deployment:
    """Return the deployment once it has exactly its replicas, all READY.

    Raises CliError: MODEL_FAILED as soon as a replica fails for good, NOT_READY_IN_TIME after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        deployment = await read()
        report(deployment)
        if _is_deployed(deployment):
            return deployment
        for replica in deployment.status.replicas:
            if _is_lost(deployment, replica):
                raise _failed(deployment, replica)
        if time.monotonic() >= deadline:
            raise _late(deployment, timeout_s)
        await asyncio.sleep(POLL_S)


def show_replicas(show: Show) -> Callable[[cp.Deployment], None]:
    """Return what tells each replica of a deployment to ``show``, and what the missing ones wait for."""

    def report(deployment: cp.Deployment) -> None:
        status = deployment.status
        for replica in status.replicas:
            detail = ", ".join(filter(None, (version_state(replica.state), replica.message)))
            is_ready = replica.state == worker_pb2.VERSION_STATE_READY
            show(replica.worker_id, 1.0 if is_ready else replica.progress_ratio or None, detail)
        if len(status.replicas) < deployment.replicas:
            show(deployment.metadata.name, None, status.message or "waiting for a worker")

    return report


async def until_drained(read: Callable[[], Awaitable[cp.Node]], show: Show, *, timeout_s: float) -> cp.Node:
    """Return the node once nothing is assigned to it and nothing runs on it. Raises CliError."""
    deadline = time.monotonic() + timeout_s
    while True:
        node = await read()
        name, drain = node.metadata.name, node.drain
        if not node.draining:
            raise CliError(
                "DRAIN_ENDED",
                f"{name} is not draining any more: somebody uncordoned it",
                next_step=f"`fairway nodes drain {name}` starts it again",
            )
        if drain.done:
            show(name, 1.0, "drained")
            return node
        why = "; ".join(drain.waiting_for)
        left = drain.assigned_versions + drain.ending_versions
        show(name, None, f"versions left: {left}" + (f"; {why}" if why else ""))
        if time.monotonic() >= deadline:
            raise CliError(
                "NOT_DRAINED_IN_TIME",
                f"{name} is not drained after {timeout_s:g} s: {why or f'versions left: {left}'}",
                next_step="it goes on; add a worker or uncordon one, or wait with a longer --timeout",
            )
        await asyncio.sleep(POLL_S)


def _is_deployed(deployment: cp.Deployment) -> bool:
    """As many replicas as wanted, all READY and all of the wanted version: those before it are gone."""
    replicas = deployment.status.replicas
    return len(replicas) == deployment.replicas and all(
        replica.state == worker_pb2.VERSION_STATE_READY and _is_wanted(deployment, replica)
        for replica in replicas
    )


def _is_lost(deployment: cp.Deployment, replica: cp.ReplicaStatus) -> bool:
    """A replica of the wanted version that failed, and for which another attempt is no reason to hope."""
    is_tried_again = replica.HasField("retry_time") and replica.failed_attempts < _MAX_FAILED_ATTEMPTS
    is_failed = replica.state == worker_pb2.VERSION_STATE_FAILED
    return is_failed and _is_wanted(deployment, replica) and not is_tried_again


def _is_wanted(deployment: cp.Deployment, replica: cp.ReplicaStatus) -> bool:
    """A control plane that does not tell which version is assigned is believed to mean the wanted one."""
    return replica.version_digest in ("", deployment.version_digest)


def describe(deployment: cp.Deployment) -> str:
    """Return where a deployment stands, in words."""
    status = deployment.status
    parts = [
        f"{replica.worker_id}: {version_state(replica.state) or 'assigned'}"
        + (f" {100 * replica.progress_ratio:.0f} %" if 0 < replica.progress_ratio < 1 else "")
        + (f", {replica.message}" if replica.message else "")
        for replica in status.replicas
    ]
    return "; ".join(parts) or status.message or "waiting for a worker"


def _failed(deployment: cp.Deployment, replica: cp.ReplicaStatus) -> CliError:
    name = deployment.metadata.name
    return CliError(
        replica.reason or "MODEL_FAILED",
        f"{replica.worker_id} cannot serve {name}: {replica.message or 'no reason given'}",
        next_step=f"`fairway deployments show {name}` has the rest; change it with `update`, or `delete` it",
    )


def _late(deployment: cp.Deployment, timeout_s: float) -> CliError:
    name, status = deployment.metadata.name, deployment.status
    why = status.message or describe(deployment)
    return CliError(
        "NOT_READY_IN_TIME",
        f"{name} has {status.ready_replicas} of {deployment.replicas} replicas after {timeout_s:g} s: {why}",
        next_step="it goes on loading; see `fairway nodes list -o wide`, or wait with a longer --timeout",
        exit_code=ExitCode.FAILED,
    )
