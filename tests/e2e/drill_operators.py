"""`make drill-operators`: what an operator does in a day, on two workers with the null executor, under load.

Each trap is tried live: a rollout that is final is reverted; a promotion is paused while its replicas load;
an A/B test has the --min-requests that was given; a shadow of an equal version goes on; the text of a refusal
states the wait of its Retry-After; a drain without room names what it waits for; workers come and go; Redis
stands still; a worker and the supervisor are killed; a restart remembers; the gateways listen beyond
loopback.

Measured: ``revert_p95_s``, from a revert of a final rollout until the last new request of the reverted
version began. ``failed``: requests of the clients that failed, of all that ran meanwhile. The last line is
``RESULT {json}``. The drill fails where a trap is open, a request failed, or a revert took more than 60 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.overhead import quantile
from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2 as cp
from tests.e2e.drill_rollouts import NAME, SETTINGS, Load
from tests.support.faulty_versions import VersionFault, write_version
from tests.support.stack import ROOT, Stack, fairway, processes
from tests.support.updating import admin_of, publish

CLIENTS: Final = 6
STEP_S: Final = "0.02"
LARGEST_REVERT_S: Final = 60.0
LONGEST_S: Final = 120.0
REFUSED_AT_ONCE_S: Final = 20.0  # beside other work on the machine; the trap took 120 s
ZONE: Final = "drill"
PRICE_MICROS: Final = 1_500_000
FINAL: Final = (cp.ROLLOUT_PHASE_FINISHING, cp.ROLLOUT_PHASE_COMPLETED)
_WAIT: Final = re.compile(r"(\d+(?:\.\d+)?) ?s(?:econds)?\b")


@dataclass(slots=True)
class Day:
    """The installation, its load, and what was found."""

    stack: Stack
    admin: AdminClient
    folder: Path
    load: Load
    closed: dict[str, bool] = field(default_factory=dict)
    reverts_s: list[float] = field(default_factory=list)

    async def command(self, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run `fairway` on the installation and return what it wrote, also where it failed."""
        return await asyncio.to_thread(command, self.stack.state, *arguments, timeout_s=timeout_s)

    async def version(self, tag: str, number: int) -> str:
        written = write_version(self.folder / tag, VersionFault.GOOD, number)
        await asyncio.to_thread(publish, self.stack, written, NAME, tag)
        return tag

    async def phase(self, name: str, *phases: cp.RolloutPhase.ValueType) -> cp.Rollout:
        """Return the rollout once it is in one of the phases."""
        found = await self.admin.rollouts.get(name)
        async with asyncio.timeout(LONGEST_S):
            while (found := await self.admin.rollouts.get(name)).phase not in phases:
                await asyncio.sleep(0.1)
        return found

    async def ended(self, name: str) -> None:
        await self.admin.rollouts.abort(name, reason="seen enough")
        await self.phase(name, cp.ROLLOUT_PHASE_ABORTED)


def command(state: Path, *arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FAIRWAY_")}
    return subprocess.run(
        [sys.executable, "-m", "fairway.cli.main", *arguments, "--state-dir", str(state)],
        capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip


def rollout(version: str, strategy: cp.RolloutStrategy.ValueType, *ratios: float) -> cp.Rollout:
    """Return a rollout whose gate never fails and whose steps are held for an hour."""
    found = cp.Rollout(
        metadata=cp.Metadata(name=f"to-{version}"),
        deployment=NAME,
        strategy=strategy,
        arms=[cp.RolloutArm(name="candidate", version=version)],
    )
    for ratio in ratios:
        found.steps.add(weight_ratio=ratio, min_requests=1).hold.FromSeconds(3600)
    return found


async def reverted(day: Day) -> bool:
    """A rollout that is final is reverted at once, and new requests get the version before."""
    right = []
    for number in (2, 3):
        tag = await day.version(f"v{number}", number)
        one = rollout(tag, cp.ROLLOUT_STRATEGY_INSTANT)
        one.soak.FromSeconds(1)
        created = await day.admin.rollouts.create(one)
        name, digest = created.metadata.name, created.arms[0].version_digest
        await day.phase(name, cp.ROLLOUT_PHASE_SOAKING, *FINAL)
        if (await day.admin.rollouts.get(name)).phase == cp.ROLLOUT_PHASE_SOAKING:
            await day.admin.rollouts.promote(name, to_end=True)
        await day.phase(name, *(FINAL if number == 2 else FINAL[1:]))
        await asyncio.sleep(2.0)
        began_s = time.monotonic()
        done = await day.command("rollouts", "revert", name, "--reason", "drill", "--yes")
        await asyncio.sleep(20.0)
        late = [
            s.began_s - began_s for s in day.load.sent if s.version_digest == digest and s.began_s > began_s
        ]
        day.reverts_s.append(max(late, default=0.0))
        served = {s.version_digest for s in day.load.sent if s.began_s > time.monotonic() - 5}
        right.append(done.returncode == 0 and bool(served) and digest not in served)
        await day.admin.deployments.wait_ready(NAME)
    return all(right)


async def pause_withdraws(day: Day) -> bool:
    tag = await day.version("v4", 4)
    name = (await day.admin.rollouts.create(rollout(tag, cp.ROLLOUT_STRATEGY_CANARY, 0.1, 1.0))).metadata.name
    await day.phase(name, cp.ROLLOUT_PHASE_RUNNING)
    await day.admin.rollouts.promote(name)
    await day.admin.rollouts.pause(name)
    await asyncio.sleep(15.0)
    found = await day.admin.rollouts.get(name)
    weights = [arm.weight_ratio for arm in found.arm_status if arm.name == "candidate"]
    await day.ended(name)
    return found.paused and bool(weights) and max(weights) <= 0.11


async def min_requests_count(day: Day) -> bool:
    tag = await day.version("v5", 5)
    done = await day.command(
        *("rollouts", "start", NAME, "--strategy", "ab", "--arm", f"b={tag}:50", "--min-requests", "777"),
        *("-o", "json"),
    )
    if done.returncode:
        print(done.stderr, flush=True)
        return False
    name = json.loads(done.stdout)["metadata"]["name"]
    found = await day.admin.rollouts.get(name)
    await day.ended(name)
    return [step.min_requests for step in found.steps] == [777]


async def equal_shadow_goes_on(day: Day) -> bool:
    tag = await day.version("v6", 6)
    one = rollout(tag, cp.ROLLOUT_STRATEGY_SHADOW)
    one.shadow.arm, one.shadow.fraction_ratio = "candidate", 1.0
    name = (await day.admin.rollouts.create(one)).metadata.name
    await day.phase(name, cp.ROLLOUT_PHASE_RUNNING)
    await asyncio.sleep(40.0)
    found = await day.admin.rollouts.get(name)
    if found.phase == cp.ROLLOUT_PHASE_RUNNING:
        await day.ended(name)
        return True
    print(found.history, flush=True)
    return False


async def refusals_state_their_wait(day: Day) -> bool:
    tenant = cp.Tenant(metadata=cp.Metadata(name="slow"), requests_per_minute=2)
    await day.admin.tenants.create(tenant)
    key = cp.Key(metadata=cp.Metadata(name="slow"), role=cp.KEY_ROLE_TENANT, tenant="slow")
    secret = (await day.admin.keys.create(key)).secret
    await asyncio.sleep(1.0)
    refusals = [await asyncio.to_thread(complete, day.stack, secret) for _ in range(4)]
    found = [one for one in refusals if one[0] == 429]
    for status, header, text in found:
        print(f"  {status} Retry-After {header}: {text}", flush=True)
    return bool(found) and all(states_wait(header, text) for _, header, text in found)


def complete(stack: Stack, secret: str) -> tuple[int, str, str]:
    """Return status, Retry-After and text of a completion over HTTP."""
    body = json.dumps({"model": NAME, "prompt": [5, 6, 7], "max_tokens": 2}).encode()
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{stack.http}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, "", ""
    except urllib.error.HTTPError as error:
        message = json.loads(error.read())["error"]["message"]
        return error.code, error.headers.get("Retry-After", ""), message


def states_wait(header: str, text: str) -> bool:
    """Whether a text names the wait of its header, which is in whole seconds."""
    named = [math.ceil(float(one)) for one in _WAIT.findall(text)]
    return header.isdigit() and int(header) in named


async def drain_names_what_it_waits_for(day: Day) -> bool:
    began_s = time.monotonic()
    done = await day.command("nodes", "drain", "worker-1", "--wait", "--timeout", "3s")
    await day.admin.nodes.uncordon("worker-1")
    in_time = time.monotonic() - began_s < REFUSED_AT_ONCE_S
    return done.returncode != 0 and f"fairway deployments scale {NAME} 1" in done.stderr and in_time


async def workers_come_and_go(day: Day) -> bool:
    """The third worker serves before it goes."""
    grown = await day.command("up", "--workers", "3")
    await day.admin.nodes.drain("worker-0")
    await day.admin.nodes.wait_drained("worker-0", timeout_s=LONGEST_S)
    await day.admin.nodes.uncordon("worker-0")
    refused = await day.command("up", "--workers", "1")
    shrunk = await day.command("up", "--workers", "2")
    nodes = [node.metadata.name for node in await day.admin.nodes.list()]
    for one in (grown, refused, shrunk):
        print("  " + one.stderr.strip().splitlines()[-1], flush=True)
    right = (grown.returncode, refused.returncode, shrunk.returncode) == (0, 4, 0)
    return right and nodes == ["worker-0", "worker-1"]


async def killed_worker_is_shown(day: Day) -> bool:
    os.kill(day.stack.worker_pid("worker-1"), signal.SIGKILL)
    found: dict[str, Any] = {}
    async with asyncio.timeout(LONGEST_S):
        while True:
            done = await day.command("status", "-o", "json")
            found = json.loads(done.stdout)["processes"]
            if found["worker-1"]["restarts"] and done.returncode == 0:
                break
            await asyncio.sleep(0.5)
    await day.admin.deployments.wait_ready(NAME)
    events = await day.command("events", "--kind", "node")
    younger = found["worker-1"]["uptime_s"] < found["worker-0"]["uptime_s"]
    return found["worker-1"]["restarts"] == 1 and younger and "NODE_LOST" in events.stdout


async def lost_store_is_an_event(day: Day) -> bool:
    (redis,) = day.stack.pids("redis-server")
    os.kill(redis, signal.SIGSTOP)
    try:
        await asyncio.sleep(10.0)
        gateway = day.stack.endpoints["metrics"]["gateway"]
        ready = await asyncio.to_thread(read, f"http://{gateway}/readyz")
    finally:
        os.kill(redis, signal.SIGCONT)
    async with asyncio.timeout(LONGEST_S):
        while "STORE_RETURNED" not in (text := (await day.command("events", "--kind", "process")).stdout):
            await asyncio.sleep(0.5)
    print(f"  /readyz while Redis stood: {ready.strip()}", flush=True)
    return "STORE_LOST" in text and "redis" in ready.lower()


def read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def restart_remembers(state: Path, stack: Stack) -> bool:
    before = json.loads((state / "endpoints.json").read_text())
    fairway("down", "--state-dir", str(state))
    fairway("up", "--detach", "--state-dir", str(state))
    after = json.loads((state / "endpoints.json").read_text())
    same = ("workers", "gateways", "gateways_http", "http", "grpc")
    with open(f"/proc/{after['pids']['worker-0']}/environ") as file:
        is_set = f"FAIRWAY_ZONE={ZONE}" in file.read().split("\0")
    shown = json.loads(command(state, "deployments", "show", NAME, "-o", "json").stdout)
    priced = int(shown["price"]["output_micros"]) == PRICE_MICROS
    return all(before[name] == after[name] for name in same) and is_set and priced


def host_is_an_option(state: Path, stack: Stack) -> bool:
    """127.0.0.2 is another address of this machine."""
    fairway("down", "--state-dir", str(state))
    began_s = time.monotonic()
    refused = command(state, "up", "--detach", "--set", "gateway:FAIRWAY_HTTP_LISTEN=0.0.0.0:8088")
    at_once = time.monotonic() - began_s < REFUSED_AT_ONCE_S
    up = command(state, "up", "--detach", "--host", "0.0.0.0")
    with socket.socket() as client:
        port = int(stack.http.rpartition(":")[2])
        reached = client.connect_ex(("127.0.0.2", port)) == 0
    hinted = refused.returncode == 2 and at_once and "--host" in refused.stderr
    return hinted and reached and "TLS" in up.stderr


def kill_leaves_nothing(state: Path, stack: Stack) -> bool:
    """Nothing temporary of the killed installation is left once the next one has stopped."""
    supervisor = json.loads((state / "endpoints.json").read_text())["supervisor_pid"]
    commands = " ".join(" ".join(each.info["cmdline"] or ()) for each in processes(state))
    engines = {path for path in Path(tempfile.gettempdir()).glob("fw-e-*") if str(path) in commands}
    os.kill(supervisor, signal.SIGKILL)
    deadline_s = time.monotonic() + LONGEST_S
    while processes(state) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    fairway("up", "--detach", "--state-dir", str(state))
    fairway("down", "--state-dir", str(state))
    left = [path for path in engines if path.exists()]
    left += [*(state / "sockets").iterdir(), *state.glob(".*.tmp")]
    return bool(engines) and not left


UNDER_LOAD: Final[Mapping[str, Callable[[Day], Awaitable[bool]]]] = {
    "drain": drain_names_what_it_waits_for,
    "workers": workers_come_and_go,
    "killed": killed_worker_is_shown,
    "store": lost_store_is_an_event,
    "retry-after": refusals_state_their_wait,
    "min-requests": min_requests_count,
    "shadow": equal_shadow_goes_on,
    "pause": pause_withdraws,
    "revert": reverted,
}
BETWEEN: Final[Mapping[str, Callable[[Path, Stack], bool]]] = {
    "restart": restart_remembers,
    "host": host_is_an_option,
    "kill-9": kill_leaves_nothing,
}


async def drill(stack: Stack, folder: Path, names: list[str]) -> Day:
    publish(stack, write_version(folder / "stable", VersionFault.GOOD, 0), NAME, "stable")
    async with admin_of(stack) as admin:
        deployment = cp.Deployment(
            metadata=cp.Metadata(name=NAME), model=NAME, version="stable", replicas=2, executor="null"
        )
        deployment.price.output_micros = PRICE_MICROS
        await admin.deployments.create(deployment)
        await admin.deployments.wait_ready(NAME)
        day = Day(stack, admin, folder, Load())
        async with day.load.running(stack, CLIENTS, long_streams=False):
            await asyncio.sleep(3.0)
            for name in names:
                if name in UNDER_LOAD:
                    note(day, name, await tried(UNDER_LOAD[name](day)))
    return day


async def tried(trap: Awaitable[bool]) -> bool:
    try:
        return await trap
    except Exception as error:
        print(f"  {error!r}", flush=True)
        return False


def note(day: Day, name: str, closed: bool) -> None:
    day.closed[name] = closed
    print(f"{name}: {'closed' if closed else 'OPEN'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="drill_operators")
    parser.add_argument("--traps", default=",".join([*UNDER_LOAD, *BETWEEN]))
    names = parser.parse_args().traps.split(",")
    if unknown := set(names) - {*UNDER_LOAD, *BETWEEN}:
        parser.error(f"there is no trap {', '.join(sorted(unknown))}: {', '.join([*UNDER_LOAD, *BETWEEN])}")
    settings = {**SETTINGS, "FAIRWAY_NULL_STEP_S": STEP_S}
    options = ["--no-model", "--set", f"worker:FAIRWAY_ZONE={ZONE}"]
    with tempfile.TemporaryDirectory(prefix="fairway-operators-") as folder:
        state = Path(folder) / "state"
        with Stack.started(
            state, workers=2, replicas=2, gateways=2, settings=settings, options=options
        ) as stack:
            day = asyncio.run(drill(stack, Path(folder), names))
            for name in names:
                if name in BETWEEN:
                    note(day, name, BETWEEN[name](state, stack))
    failures = Counter(one.failure[:160] for one in day.load.sent if one.failure)
    print(f"requests: {len(day.load.sent)}; failures: {dict(failures.most_common(5))}", flush=True)
    result = {
        "traps": len(day.closed),
        "closed_ratio": round(sum(day.closed.values()) / len(day.closed), 3),
        "revert_p95_s": round(quantile(day.reverts_s, 0.95), 3) if day.reverts_s else None,
        "failed": failures.total(),
    }
    print("RESULT", json.dumps(result))
    return 1 if misses(result) else 0


def misses(result: Mapping[str, float | None]) -> list[str]:
    """Return the figures that miss what is demanded. What was not measured misses nothing."""
    late = result["revert_p95_s"]
    return [
        *(["closed_ratio"] if (result["closed_ratio"] or 0) < 1 else []),
        *(["failed"] if result["failed"] else []),
        *(["revert_p95_s"] if late is not None and late > LARGEST_REVERT_S else []),
    ]


if __name__ == "__main__":
    sys.exit(main())
