"""Two control plane processes on one real etcd, killed, frozen and changed under by a seeded schedule.

The workers are records under this test's hands: they come, go, and report READY what is assigned to them.
TEST_SEEDS=20 runs twenty schedules instead of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from fairway.v1 import controlplane_pb2 as pb
from fairway.v1 import controlplane_pb2_grpc
from services.adapters.etcd.store import EtcdStore
from services.adapters.grpc.leader_calls import LIMITS_S
from services.controlplane.event_log import event_of
from services.controlplane.fleet import read_snapshot
from services.controlplane.policy.assign import Unplaced, plan
from services.core.manifest import sha256_of
from services.core.records import (
    ASSIGNMENTS,
    EVENTS,
    WORKERS,
    Assignment,
    LoadedVersion,
    VersionRecord,
    VersionState,
    Worker,
    dump,
    leader_key,
    load,
    version_key,
)
from services.ports.store import Delete, Put, Store
from services.rpc.channel import auth_metadata, open_channel
from services.runtime import secrets
from services.runtime.clock import SystemClock
from tests.support import local_servers

CLOCK = SystemClock()
DIGESTS = tuple(sha256_of(text) for text in (b"1", b"2"))
LEADER_TTL_S = 1
HANG_S = 60.0
FORWARDED = (
    pb.ListSlisRequest(),
    pb.ListFinishedRequestsRequest(),
    pb.GetTimelineRequest(request_name="req_1"),
    pb.DiagnoseLatencyRequest(),
    pb.SaveLatencyBaselineRequest(name="first"),
    pb.ListScalingRequest(),
    pb.ListUsageRequest(),
)


@dataclass
class Process:
    """A control plane of its own, on a port of its own."""

    environment: dict[str, str]
    log: Path
    address: str = ""
    running: subprocess.Popen[bytes] | None = None
    frozen: bool = False

    def start(self) -> None:
        self.address = f"127.0.0.1:{local_servers.free_port()}"
        with self.log.open("ab") as log:
            self.running = subprocess.Popen(
                [sys.executable, "-m", "services", "controlplane"],
                env={**self.environment, "FAIRWAY_LISTEN": self.address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=local_servers.die_with_parent,
            )

    def kill(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait(timeout=10)
        self.running, self.frozen = None, False

    def freeze(self) -> None:
        assert self.running is not None
        self.running.send_signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        assert self.running is not None
        self.running.send_signal(signal.SIGCONT)
        self.frozen = False


@dataclass
class World:
    store: EtcdStore
    planes: list[Process]
    admin: tuple[tuple[str, str], ...]
    rng: random.Random
    replicas: dict[str, int] = field(default_factory=dict)
    workers: set[str] = field(default_factory=set)
    created: Counter[str] = field(default_factory=Counter)

    async def call(self, method: str, request: Any, at: Process | None = None, timeout_s: float = 3) -> Any:
        """Ask any control plane that answers, or the given one, with the same request id until one did."""
        async with asyncio.timeout(HANG_S):
            while True:
                plane = at or self.rng.choice(self.planes)
                if plane.running is None or plane.frozen:
                    await asyncio.sleep(0.05)
                    continue
                try:
                    async with open_channel(plane.address) as channel:
                        stub = controlplane_pb2_grpc.ControlPlaneServiceStub(channel)
                        return await getattr(stub, method)(request, metadata=self.admin, timeout=timeout_s)
                except grpc.aio.AioRpcError as error:
                    again = (
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        grpc.StatusCode.UNAUTHENTICATED,  # it has not heard of the admin key yet
                    )
                    if error.code() not in again:
                        raise
                    await asyncio.sleep(0.1)

    async def deploy(self, name: str, replicas: int) -> None:
        deployment = pb.Deployment(
            metadata=pb.Metadata(name=name),
            model="m",
            version=self.rng.choice(DIGESTS),
            replicas=replicas,
        )
        request_id = f"r{self.rng.getrandbits(60):x}"
        if name in self.replicas:
            request: Any = pb.UpdateDeploymentRequest(deployment=deployment, request_id=request_id)
            await self.call("UpdateDeployment", request)
        else:
            request = pb.CreateDeploymentRequest(deployment=deployment, request_id=request_id)
            await self.call("CreateDeployment", request)
            self.created[name] += 1
        self.replicas[name] = replicas

    async def undeploy(self, name: str) -> None:
        request_id = f"r{self.rng.getrandbits(60):x}"
        await self.call("DeleteDeployment", pb.DeleteDeploymentRequest(name=name, request_id=request_id))
        del self.replicas[name]

    async def join(self, worker_id: str) -> None:
        self.workers.add(worker_id)
        await self.store.commit([Put(WORKERS + worker_id, dump(Worker(worker_id, "127.0.0.1:1")))])

    async def leave(self, worker_id: str) -> None:
        self.workers.discard(worker_id)
        await self.store.commit([Delete(WORKERS + worker_id)])

    async def report(self) -> None:
        """Every worker says that it has what is assigned to it; what retires has left."""
        for worker_id in sorted(self.workers):
            held, assigned = (
                await self.store.get(WORKERS + worker_id),
                await self.store.get(ASSIGNMENTS + worker_id),
            )
            if held is None or assigned is None:
                continue
            versions = tuple(
                LoadedVersion(v.deployment, v.model, v.version_digest, VersionState.READY)
                for v in load(assigned.value, Assignment).versions
                if not v.retiring
            )
            worker = load(held.value, Worker)
            if worker.versions != versions:
                await self.store.commit([Put(held.key, dump(replace(worker, versions=versions)))])

    async def leader(self) -> str:
        entry = await self.store.get(leader_key("controlplane"))
        return "" if entry is None else entry.value.decode()

    async def act(self) -> None:
        """Do one of the things that happen."""
        names, spare = sorted(self.replicas), [f"w{n}" for n in range(4) if f"w{n}" not in self.workers]
        match self.rng.randrange(8):
            case 0 | 1:
                await self.deploy(f"d{self.rng.randrange(4)}", self.rng.randrange(4))
            case 2 if names:
                await self.undeploy(self.rng.choice(names))
            case 3 if spare:
                await self.join(self.rng.choice(spare))
            case 4 if len(self.workers) > 1:
                await self.leave(self.rng.choice(sorted(self.workers)))
            case 5 | 6:
                self.disturb()
            case _:
                await self.report()

    def disturb(self) -> None:
        """Kill, freeze or wake one control plane; the other one goes on."""
        first = self.rng.choice(self.planes)
        if any(plane.running is None or plane.frozen for plane in self.planes):
            self.mend()
        elif self.rng.random() < 0.5:
            first.kill()
        else:
            first.freeze()

    def mend(self) -> None:
        for plane in self.planes:
            if plane.running is None:
                plane.start()
            elif plane.frozen:
                plane.thaw()


@contextlib.contextmanager
def processes(tmp_path: Path, etcd: str) -> Iterator[tuple[list[Process], str]]:
    admin, _ = secrets.new_key("admin", secrets.new_secret())
    for name, text in (("internal", "i" * 40), ("ticket", "t" * 40), ("admin", admin)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FAIRWAY_")} | {
        "FAIRWAY_ETCD_ENDPOINTS": etcd,
        "FAIRWAY_STATE_DIR": str(tmp_path / "state"),
        "FAIRWAY_INTERNAL_TOKEN_FILE": str(tmp_path / "internal"),
        "FAIRWAY_TICKET_KEY_FILE": str(tmp_path / "ticket"),
        "FAIRWAY_ADMIN_KEY_FILE": str(tmp_path / "admin"),
        "FAIRWAY_LEADER_TTL_S": str(LEADER_TTL_S),
    }
    planes = [Process(environment, tmp_path / f"plane{n}.log") for n in range(2)]
    for plane in planes:
        plane.start()
    try:
        yield planes, admin
    finally:
        for plane in planes:
            plane.kill()


@contextlib.asynccontextmanager
async def world(tmp_path: Path, etcd: str, seed: int) -> AsyncIterator[World]:
    with processes(tmp_path, etcd) as (planes, admin):
        store = EtcdStore([etcd], CLOCK)
        try:
            for digest in DIGESTS:
                record = VersionRecord("m", digest, 1, 0.0)
                await store.commit([Put(version_key("m", digest), dump(record))])
            yield World(store, planes, auth_metadata(admin), random.Random(seed))
        finally:
            await store.close()


async def eventually(check: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(HANG_S):
            while not await check():  # the store is not ours to signal
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what} within {HANG_S:g} s") from None


async def at_rest(store: Store) -> bool:
    """Whether the plan of what is stored writes nothing."""
    fleet = (await read_snapshot(store)).fleet
    actions = plan(fleet.deployments, fleet.workers, fleet.nodes, fleet.assignments)
    return all(isinstance(action, Unplaced) for action in actions)


@pytest.mark.parametrize("seed", range(1, 1 + int(os.environ.get("TEST_SEEDS", "1"))))
async def test_a_schedule_of_kills_and_freezes_ends_at_the_plan(
    own_etcd: Any, tmp_path: Path, seed: int
) -> None:
    async with world(tmp_path, own_etcd.address, seed) as here:
        await here.join("w0")
        await here.deploy("d0", 1)
        for _ in range(30):
            await here.act()
            await asyncio.sleep(here.rng.uniform(0, 0.1))  # the schedule's own pace
        here.mend()

        async def settled() -> bool:
            await here.report()
            return await at_rest(here.store)

        await eventually(settled, "it does not come to rest")
        fleet = (await read_snapshot(here.store)).fleet
        # A worker that is gone keeps its assignment until its replicas are READY elsewhere.
        live = [assignment for assignment in fleet.assignments if assignment.worker_id in here.workers]
        placed = Counter(version.deployment for assignment in live for version in assignment.versions)
        assert {d.meta.name: d.replicas for d in fleet.deployments} == here.replicas
        assert placed == Counter(
            {name: n for name, want in here.replicas.items() if (n := min(want, len(here.workers)))}
        ), "replicas are doubled or missing"
        for assignment in fleet.assignments:
            names = [version.deployment for version in assignment.versions]
            assert len(set(names)) == len(names), "a worker has two replicas of one deployment"
        await _check_events(here)


async def _check_events(here: World) -> None:
    """Each change is recorded once, however many control planes observed it."""
    found = [event_of(entry) for entry in (await here.store.list(EVENTS)).entries]
    made = Counter(
        event.record.resource
        for event in found
        if event is not None and event.record.reason == "DEPLOYMENT_CREATED"
    )
    assert all(made[name] <= count for name, count in here.created.items()), f"recorded twice: {made}"
    # One revision may change several workers; the messages name them.
    revisions = Counter(
        (name.partition("-")[0], record.kind, record.resource, record.reason, record.message)
        for name, record in ((event.name, event.record) for event in found if event is not None)
    )
    assert not [key for key, count in revisions.items() if count > 1], "one revision is recorded twice"


async def test_a_leader_frozen_beyond_its_lease_changes_nothing_when_it_wakes(
    own_etcd: Any, tmp_path: Path
) -> None:
    async with world(tmp_path, own_etcd.address, 0) as here:
        await here.join("w0")
        await here.deploy("d0", 1)
        await eventually(lambda: at_rest(here.store), "nothing is placed")
        first = await here.leader()
        led = [plane for plane in here.planes if plane.address in first]
        assert len(led) == 1, first
        led[0].freeze()

        async def another_leads() -> bool:
            return await here.leader() not in ("", first)

        await eventually(another_leads, "nobody takes over")
        for number in range(1, 4):
            await here.deploy(f"d{number}", 1)
        await here.join("w1")
        await here.deploy("d0", 2)
        await eventually(lambda: at_rest(here.store), "the new leader does not place")
        before = (await here.store.list(ASSIGNMENTS)).entries
        leads = await here.leader()
        led[0].thaw()
        await here.call("CordonNode", pb.CordonNodeRequest(name="w1"))  # wakes both reconcilers
        for _ in range(10):
            await asyncio.sleep(LEADER_TTL_S / 5)
            assert (await here.store.list(ASSIGNMENTS)).entries == before, "the deposed leader wrote"
        assert await here.leader() == leads, "the leader was deposed by one that had lost its lease"
        await _check_told_by_the_next(here)


async def _check_told_by_the_next(here: World) -> None:
    """What happened before both were killed is told by the one that comes after, and what happens then."""

    async def told(resource: str, reason: str) -> bool:
        answer = await here.call("ListEvents", pb.ListEventsRequest(resource=resource))
        return any(event.reason == reason for event in answer.events)

    for plane in here.planes:
        plane.kill()
    here.planes[0].start()
    assert await told("d0", "DEPLOYMENT_CREATED")
    await here.leave("w0")
    await eventually(lambda: told("w0", "NODE_LOST"), "the next one tells nothing new")
    await _check_events(here)


async def test_a_standby_answers_what_the_leader_does(own_etcd: Any, tmp_path: Path) -> None:
    assert {type(request) for request in FORWARDED} == set(LIMITS_S)
    async with world(tmp_path, own_etcd.address, 0) as here:
        for request in FORWARDED:
            method, answers = request.DESCRIPTOR.name.removesuffix("Request"), list[str]()
            for plane in here.planes:
                try:
                    answers.append(type(await here.call(method, request, plane, 10.0)).__name__)
                except grpc.aio.AioRpcError as error:
                    answers.append(f"{error.code().name}: {error.details()}")
            assert answers[0] == answers[1]
            assert answers[0].startswith((f"{method}Response", "NOT_FOUND", "INVALID_ARGUMENT: 0 sampled"))
