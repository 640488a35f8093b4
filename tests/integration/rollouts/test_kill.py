"""The control plane is killed with SIGKILL around every commit of a rollout, each in turn, on a real etcd.

After each kill the stored split is whole and follows from the stored state; the next control plane ends the
rollout as an undisturbed one would, and no replica of the stable version is lost before the rollout is final.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Any

import pytest

from services.adapters.etcd.store import EtcdStore
from services.controlplane.rollouts.policy.effects import deployment_of, route_of
from services.controlplane.rollouts.records import (
    GateSettings,
    Rollout,
    RolloutArm,
    RolloutPhase,
    RolloutStep,
    RolloutStrategy,
)
from services.controlplane.rollouts.resource import Rollouts
from services.core.records import DEPLOYMENTS, ROLLOUTS, Deployment, Meta, load
from services.core.rollouts.routes import ROUTES, ModelRoute
from services.ports.store import Delete, Store
from services.runtime.clock import SystemClock
from tests.integration.rollouts.fleet import NAME, NEW, OLD, RecordedFleet

CLOCK = SystemClock()
STEPS = tuple(RolloutStep(bp, hold_s=0.05) for bp in (100, 5000, 7500, 10_000))
MOST_COMMITS = 40


async def rollout_of(store: Store) -> Rollout:
    entry = await store.get(ROLLOUTS + "r")
    assert entry is not None
    return load(entry.value, Rollout)


async def check(store: Store) -> RolloutPhase:
    """Return the phase; state, route and deployment are of one transaction at every revision."""
    listing = {entry.key: entry.value for entry in (await store.list("/fairway/v1/")).entries}
    rollout = load(listing[ROLLOUTS + "r"], Rollout)
    deployment = load(listing[DEPLOYMENTS + NAME], Deployment)
    data = listing.get(ROUTES + NAME)
    route = None if data is None else load(data, ModelRoute)
    if route is not None:
        route.check_integrity()
    assert route == route_of(rollout, deployment.replicas)
    assert deployment == deployment_of(rollout, deployment)
    final = rollout.phase in (RolloutPhase.FINISHING, RolloutPhase.COMPLETED)
    assert deployment.version_digest == (NEW if final else OLD)
    return rollout.phase


async def plane(endpoint: str, number: int, when: str, verdict: str) -> asyncio.subprocess.Process:
    module = "tests.integration.rollouts.killed_plane"
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, endpoint, str(number), when, verdict
    )


async def run_to_the_end(endpoint: str, store: Store, verdict: str, when: str, number: int) -> bool:
    """Kill around the n-th commit, go on with another control plane. Returns whether there was an n-th."""
    fleet = RecordedFleet(store)
    await fleet.begin()
    workers = asyncio.create_task(fleet.run())
    process = await plane(endpoint, number, when, verdict)
    try:
        started = False
        async with asyncio.timeout(60):
            while not started:
                with suppress(Exception):  # until the stable version is READY
                    await Rollouts(store, CLOCK).create(
                        Rollout(
                            Meta("r"),
                            NAME,
                            RolloutStrategy.CANARY,
                            (RolloutArm("canary", NEW),),
                            STEPS,
                            gate=GateSettings(),
                            soak_s=0.05,
                        )
                    )
                    started = True
                await asyncio.sleep(0.05)
            killed = False
            while (phase := await check(store)) not in (RolloutPhase.COMPLETED, RolloutPhase.ABORTED):
                if process.returncode is not None and not killed:
                    killed = True
                    await check(store)
                    process = await plane(endpoint, 0, "before", verdict)
                await asyncio.sleep(0.05)
            killed = killed or process.returncode is not None
        assert phase is (RolloutPhase.COMPLETED if verdict == "pass" else RolloutPhase.ABORTED)
    finally:
        workers.cancel()
        await asyncio.gather(workers, return_exceptions=True)
        if process.returncode is None:
            process.kill()
        await process.wait()
        await store.commit([Delete(entry.key) for entry in (await store.list("/fairway/v1/")).entries][:100])
    return killed


# A kill before a commit finds the state after the commit before it, so only the first has both.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("verdict", ["pass", "fail"])
async def test_a_kill_at_every_commit_leaves_a_whole_split(own_etcd: Any, verdict: str) -> None:
    store = EtcdStore([own_etcd.address], CLOCK)
    try:
        kills = int(await run_to_the_end(own_etcd.address, store, verdict, "before", 1))
        for number in range(1, MOST_COMMITS):
            if not await run_to_the_end(own_etcd.address, store, verdict, "after", number):
                break
            kills += 1
        assert kills >= 5, "the commits were not enumerated"
    finally:
        await store.close()
