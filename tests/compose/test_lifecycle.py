"""Scaling, a rolling replacement under load, backup and restore, stop and start: as the pages say."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import grpc

from tests.compose.fleet import ROLES, ROOT, SCALED, Fleet, command, wait
from tests.compose.load import served, stream

WORKERS = ("worker-0", "worker-1", "worker-2", "worker-3")


def replicas(fleet: Fleet, count: int) -> None:
    """Scale the bundled model, and wait until all replicas are READY."""
    fleet.cli("deployments", "update", "fairway-tiny", "--replicas", str(count), "--wait")


async def test_the_profile_scale_adds_gateways_and_workers(fleet: Fleet) -> None:
    fleet.up(profile="scale")
    replicas(fleet, 4)
    wait("four workers are ready", lambda: fleet.at_rest(*WORKERS))
    assert (await served(fleet, gateway=0)).ids == (await served(fleet, gateway=1)).ids
    fleet.do("kill", "gateway")
    assert (await served(fleet, gateway=1)).complete
    fleet.do("start", "gateway")
    fleet.wait_healthy("gateway")


class Client:
    """Streams without end, as a client with two endpoints: UNAVAILABLE before any token tries the other."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.counts: Counter[str] = Counter()
        self._stop = asyncio.Event()

    async def run(self, first: int) -> None:
        number = first
        while not self._stop.is_set():
            self.counts[await self._one(number)] += 1
            number += 1

    async def _one(self, number: int) -> str:
        for attempt in range(20):
            outcome = await stream(self._fleet, number % 16, tokens=32, gateway=(number + attempt) % 2)
            if outcome.complete:
                return "complete"
            if outcome.ids or outcome.error is not grpc.StatusCode.UNAVAILABLE:
                return f"lost: {outcome.error}"
            await asyncio.sleep(0.2)
        return "lost: nobody answers"

    def stop(self) -> None:
        self._stop.set()


async def test_every_container_is_replaced_and_no_request_is_lost(fleet: Fleet) -> None:
    client = Client(fleet)
    tasks = [asyncio.create_task(client.run(number)) for number in range(2)]
    before = {service: fleet.container(service) for service in (*ROLES, *SCALED)}
    for service in before:
        await asyncio.to_thread(_replace, fleet, service)
        async with asyncio.timeout(120):
            seen = client.counts["complete"]
            while client.counts["complete"] <= seen:
                await asyncio.sleep(0.1)
    client.stop()
    await asyncio.gather(*tasks)
    assert all(fleet.container(service) != old for service, old in before.items())
    assert set(client.counts) == {"complete"}, client.counts
    wait("the workers are at rest", lambda: fleet.at_rest(*WORKERS))


def _replace(fleet: Fleet, service: str) -> None:
    fleet.run("up", "--detach", "--no-build", "--no-deps", "--force-recreate", service, profile="scale")
    fleet.wait_healthy(service)
    if service in WORKERS:
        wait(f"{service} has the model", lambda: ready(fleet, service))


def ready(fleet: Fleet, worker: str) -> bool:
    versions = fleet.holds(worker).get("versions", [])
    return bool(versions) and all(each["state"] == "VERSION_STATE_READY" for each in versions)


async def test_scaling_down_drains(fleet: Fleet) -> None:
    replicas(fleet, 2)
    fleet.run("stop", *SCALED, profile="scale")
    for service in SCALED:
        assert fleet.inspect(service)["State"]["ExitCode"] == 0, fleet.logs(service)
    fleet.run("rm", "--force", *SCALED, profile="scale")
    await served(fleet)


async def test_a_backup_brings_back_what_was(fleet: Fleet, tmp_path: Path) -> None:
    fleet.cli("tenants", "create", "backed-up")
    usage = fleet.redis("hgetall", "fw:{default}:usage")
    script = ROOT / "deploy" / "compose"
    command(str(script / "backup.sh"), str(tmp_path / "backup"), env=fleet.environment)
    fleet.cli("tenants", "create", "too-late")
    fleet.remove()
    command(str(script / "restore.sh"), str(tmp_path / "backup"), env=fleet.environment)
    fleet.run("up", "--detach", "--no-build", "redis")
    fleet.wait_healthy("redis")
    assert fleet.redis("hgetall", "fw:{default}:usage") == usage
    fleet.up()
    tenants = fleet.cli("tenants", "list")
    assert "backed-up" in tenants
    assert "too-late" not in tenants
    assert (await served(fleet)).complete


async def test_down_leaves_nothing_and_up_knows_everything(fleet: Fleet) -> None:
    key = fleet.secret("api_key")
    fleet.cli("tenants", "create", "kept")
    fleet.run("down")
    label = f"label=com.docker.compose.project={fleet.project}"
    assert command("docker", "ps", "-aq", "--filter", label) == ""
    assert command("docker", "network", "ls", "-q", "--filter", label) == ""
    fleet.up()
    assert "kept" in fleet.cli("tenants", "list")
    assert fleet.secret("api_key") == key
    assert (await served(fleet)).complete
