"""Another number of workers for a running installation, without a failed request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from fairway.cli.calls import admin_client, checked
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.fleet.control import request_workers
from fairway.cli.fleet.progress import StartProgress
from fairway.cli.fleet.roles import worker_names
from fairway.cli.state import Endpoints, StateDir
from fairway.cli.waiting import until_drained
from fairway.client import AdminClient, FairwayError, NotFound
from fairway.v1 import controlplane_pb2 as cp

DRAIN_S: Final = 600.0
_LEASE_S: Final = 15.0  # a killed worker keeps its lease for some seconds
_POLL_S: Final = 0.5


def resize(state: StateDir, running: Endpoints, count: int, progress: StartProgress) -> Endpoints:
    """Return the endpoints once ``count`` workers run: those with the highest numbers come and go.

    A worker that goes is drained first. If it cannot be, nothing has changed when CliError is raised.
    """
    return asyncio.run(_resized(state, running, count, progress))


async def _resized(state: StateDir, running: Endpoints, count: int, progress: StartProgress) -> Endpoints:
    leaving = worker_names(len(running.workers))[count:]
    joining = worker_names(count)[len(running.workers) :]
    client = admin_client(",".join(running.controlplanes), admin_key=running.admin_key)
    async with client as admin:
        await _drain(admin, leaving, progress)
        await _forget(admin, joining)  # what an operator set for an earlier worker of that name
        found = await asyncio.to_thread(request_workers, state.control, count, progress)
        await _forget(admin, leaving)
    return found


async def _drain(admin: AdminClient, leaving: Sequence[str], progress: StartProgress) -> None:
    if not leaving:
        return
    await _require_room(admin, leaving)
    try:
        for name in leaving:
            await checked(admin.nodes.drain(name), what=f"cannot drain the node {name}")
        for name in leaving:
            await until_drained(
                admin,
                name,
                lambda name, _, detail: progress.event(name, "stopping", detail),
                timeout_s=DRAIN_S,
            )
    except BaseException:
        for name in leaving:
            await checked(admin.nodes.uncordon(name), what=f"cannot uncordon the node {name}")
        raise


async def _require_room(admin: AdminClient, leaving: Sequence[str]) -> None:
    nodes = await checked(admin.nodes.list(), what="cannot list the nodes")
    left = sum(
        node.state != cp.NODE_STATE_LOST and not node.cordoned and node.metadata.name not in leaving
        for node in nodes
    )
    deployments = await checked(admin.deployments.list(), what="cannot list the deployments")
    if large := [one for one in deployments if one.replicas > left]:
        needs = "; ".join(f"{one.metadata.name} has {one.replicas} replicas" for one in large)
        scale = " && ".join(f"fairway deployments scale {one.metadata.name} {left}" for one in large)
        raise CliError(
            "TOO_FEW_WORKERS",
            f"{left} workers would be left for replicas, each of which needs a worker of its own: {needs}",
            next_step=f"`{scale}`, then the same command",
            exit_code=ExitCode.REFUSED,
        )


async def _forget(admin: AdminClient, names: Sequence[str]) -> None:
    """Delete the settings of workers that do not run."""
    deadline_s = time.monotonic() + _LEASE_S
    for name in names:
        while True:
            try:
                await admin.nodes.delete(name)
                break
            except NotFound:
                break
            except FairwayError:
                if time.monotonic() > deadline_s:
                    return  # it stays listed as lost; `fairway nodes delete` removes it
            await asyncio.sleep(_POLL_S)
