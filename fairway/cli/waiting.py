"""Waits for a requested state of the fleet, with progress reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fairway.cli.calls import admin_error
from fairway.cli.errors import CliError, ExitCode
from fairway.client import AdminClient, DeadlineExceeded, FairwayError, WaitFailed
from fairway.client.admin.wait import remaining_versions, state_name
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import worker_pb2

# Name, progress (0..1, None: unknown), current work.
Show = Callable[[str, float | None, str], None]

_STEPS: Final = {
    "NOT_READY_IN_TIME": (
        "it continues to load; see `fairway nodes list -o wide`, or wait with a longer --timeout"
    ),
    "NOT_DRAINED_IN_TIME": (
        "it continues; add a worker, uncordon one, lower the replicas with `fairway deployments scale`, or "
        "wait with a longer --timeout; `fairway nodes uncordon {name}` ends it"
    ),
    "DRAIN_ENDED": "`fairway nodes drain {name}` starts it again",
}
_FAILED: Final = (
    "`fairway deployments show {name}` shows the details; change it with `update`, or `delete` it"
)


async def until_deployed(
    admin: AdminClient, name: str, report: Callable[[cp.Deployment], None], *, timeout_s: float
) -> cp.Deployment:
    """Return the deployment once it has exactly its replicas, all READY. Raises CliError.

    MODEL_FAILED, or the replica's own reason, as soon as one fails permanently; NOT_READY_IN_TIME.
    """
    try:
        return await admin.deployments.wait_ready(name, timeout_s=timeout_s, report=report)
    except FairwayError as error:
        raise _wait_error(error, name, what=f"cannot show the deployment {name}") from error


async def until_drained(admin: AdminClient, name: str, show: Show, *, timeout_s: float) -> cp.Node:
    """Return the node once it has no assignment and no running sequence. Raises CliError."""
    try:
        return await admin.nodes.wait_drained(name, timeout_s=timeout_s, report=show_drain(show))
    except FairwayError as error:
        raise _wait_error(error, name, what=f"cannot show the node {name}") from error


def show_replicas(show: Show) -> Callable[[cp.Deployment], None]:
    """Return a function that passes each replica, and the reason for missing ones, to ``show``."""

    def report(deployment: cp.Deployment) -> None:
        status = deployment.status
        for replica in status.replicas:
            detail = ", ".join(filter(None, (state_name(replica.state), replica.message)))
            is_ready = replica.state == worker_pb2.VERSION_STATE_READY
            show(replica.worker_id, 1.0 if is_ready else replica.progress_ratio or None, detail)
        if len(status.replicas) < deployment.replicas:
            show(deployment.metadata.name, None, status.message or "waiting for a worker")

    return report


def show_drain(show: Show) -> Callable[[cp.Node], None]:
    """Return a function that passes the progress of a drain to ``show``."""

    def report(node: cp.Node) -> None:
        if node.drain.done:
            show(node.metadata.name, 1.0, "drained")
        elif node.draining:
            show(node.metadata.name, None, "; ".join((remaining_versions(node), *node.drain.waiting_for)))

    return report


def _wait_error(error: FairwayError, name: str, *, what: str) -> CliError:
    is_over = isinstance(error, WaitFailed) or (
        isinstance(error, DeadlineExceeded) and error.reason in _STEPS
    )
    if not is_over:
        return admin_error(error, what=what)
    step = _STEPS.get(error.reason, _FAILED).format(name=name)
    return CliError(error.reason, error.message, next_step=step, exit_code=ExitCode.FAILED)
