"""Damage to disks, caches and stores, and what another user of the machine can reach."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
import psutil

from fairway.cli.fleet.ports import load_ports
from fairway.cli.fleet.record import FleetRecord
from fairway.client import FairwayError
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2_grpc
from services.runtime.clock import SystemClock
from tests.security.drills.canary import Canary, generation, grpc_stream
from tests.security.drills.http import head, status_of
from tests.security.drills.installation import admin_client, redis_of
from tests.security.drills.judge import Found
from tests.security.drills.target import Attack, Target
from tests.security.drills.tenants import CONCURRENCY, LONG_TOKENS, Running, channel, hold
from tests.support.tiny_disk import fill

NOBODY: Final = 65534
FULL_S: Final = 12.0
HEAL_S: Final = 45.0
ANSWERS: Final = 30
_LOG_POLL_S: Final = 8.0
now_s = SystemClock().monotonic_s


def pid_of(target: Target, name: str) -> int:
    record = FleetRecord.load(target.state / "fleet.json")
    assert record is not None, "the supervisor has no record"
    return record.children[name].pid


async def log_disk_full(target: Target) -> Found:
    logs = target.state / "logs"
    if not logs.is_mount():
        return Found(skipped="the logs are on no disk of their own: that takes root and mount")
    filler = fill(logs)
    free_bytes = os.statvfs(logs).f_bavail * os.statvfs(logs).f_bsize
    await asyncio.sleep(FULL_S)
    filler.unlink()
    log = logs / "gateway.log"
    size, found = log.stat().st_size, Found(did=[f"{free_bytes} bytes were free for {FULL_S:g} s"])
    deadline_s = now_s() + _LOG_POLL_S
    while log.stat().st_size <= size:
        if now_s() > deadline_s:
            found.wrong.append(f"the gateway logs nothing {_LOG_POLL_S:g} s after the disk has room again")
            break
        await asyncio.sleep(0.2)
    return found


async def _answers(target: Target) -> list[object]:
    """Return greedy answers to many prompts, spread over the workers."""
    async with channel(target.gateways[0].grpc) as opened:
        stub = inference_pb2_grpc.InferenceServiceStub(opened)
        works = [
            grpc_stream(
                stub,
                generation(target.model, f"class Stack{number}:\n    def pop(self):\n", 16),
                target.keys["drills"],
                Canary(""),
            )
            for number in range(ANSWERS)
        ]
        return list(await asyncio.gather(*works, return_exceptions=True))


async def _engine_lost(target: Target, worker: str, damage: Callable[[Path], object]) -> Found:
    """Damage the worker's cache, kill its engine, and compare all answers once both replicas are READY."""
    before = await _answers(target)
    cache = target.state / "state" / worker / "models"
    damage(cache)
    for engine in psutil.Process(pid_of(target, worker)).children(recursive=True):
        if "engine" in " ".join(engine.cmdline()):
            engine.kill()
    await asyncio.sleep(2.0)
    found, deadline_s = (
        Found(did=[f"{ANSWERS} answers, {sum(isinstance(each, tuple) for each in before)} good"]),
        now_s() + HEAL_S,
    )
    async with admin_client(target) as admin:
        ready = 0
        while ready < 2 and now_s() < deadline_s:
            with contextlib.suppress(FairwayError):
                ready = (await admin.deployments.get(target.model)).status.ready_replicas
            await asyncio.sleep(0.5)
        if ready < 2:
            found.wrong.append(f"{ready} of 2 replicas are READY {HEAL_S:g} s after the engine was killed")
    for _ in range(2):
        after = await _answers(target)
        differ = sum(was != now for was, now in zip(before, after, strict=True))
        if differ:
            found.wrong.append(f"{differ} of {ANSWERS} greedy answers differ")
    return found


def _flip(cache: Path) -> None:
    """Put copies with flipped bits in the places of the weights: what is mapped stays as it was."""
    for path in (cache / "ready").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        first = 8 + int.from_bytes(data[:8], "little")
        for at in range(first + 1, len(data), max(2, (len(data) - first) // 4000 & ~1)):
            data[at] ^= 0x04
        copy, was = path.with_name("flipped"), path.stat()
        copy.write_bytes(data)
        copy.chmod(stat.S_IMODE(was.st_mode))
        os.utime(copy, ns=(was.st_atime_ns, was.st_mtime_ns))
        folder_mode = path.parent.stat().st_mode
        path.parent.chmod(0o700)
        copy.replace(path)
        path.parent.chmod(stat.S_IMODE(folder_mode))


async def flipped_weights(target: Target) -> Found:
    return await _engine_lost(target, "worker-0", _flip)


async def ready_deleted(target: Target) -> Found:
    return await _engine_lost(target, "worker-1", lambda cache: shutil.rmtree(cache / "ready"))


async def redis_flushed(target: Target) -> Found:
    client = redis_of(pid_of(target, "gateway"))
    try:
        await client.flushall()
        await client.script_flush()
    finally:
        await client.aclose()
    found, running = Found(did=["all keys and scripts are gone"]), Running("storm", CONCURRENCY)
    wanted = generation(target.model, "class A:", LONG_TOKENS)
    async with contextlib.AsyncExitStack() as stack:
        stubs = [
            inference_pb2_grpc.InferenceServiceStub(await stack.enter_async_context(channel(gateway.grpc)))
            for gateway in target.gateways
        ]
        works = [
            hold(stub, wanted, target.keys["storm"], running, hold_s=1.5) for stub in stubs for _ in range(20)
        ]
        await asyncio.gather(*works)
    running.report(found)
    return found


def _as_nobody(look: Callable[[], list[str]]) -> list[str]:
    """Return what another user finds: ``look`` runs in a child of this process under that user's id."""
    receive, send = os.pipe()
    if not (child := os.fork()):
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(send, json.dumps(look()).encode()[:60_000])
            status = 0
        finally:
            os._exit(status)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError("the other user's process failed")
    return [str(each) for each in json.loads(text)]


def _readable(state: Path) -> list[str]:
    """Return the files below the state folder that this user can open."""
    found = []
    for here, _, names in os.walk(state):
        for name in names:
            with contextlib.suppress(OSError), open(os.path.join(here, name), "rb") as file:
                file.read(1)
                found.append(os.path.relpath(file.name, state))
    return found


def _talks(
    family: socket.AddressFamily, address: tuple[str, int] | str, request: bytes, answer: bytes
) -> bool:
    """Whether whoever listens there answers so."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(3.0)
        client.connect(address)
        client.sendall(request)
        return answer in client.recv(4096)
    return False


async def other_user(target: Target) -> Found:
    if os.geteuid():
        return Found(skipped="only root can act as another user")
    ports = load_ports(target.state / "ports.json")
    sockets = [
        os.path.join(here, name)
        for here, _, names in os.walk(target.state)
        for name in names
        if stat.S_ISSOCK(os.lstat(os.path.join(here, name)).st_mode)
    ]
    ping, pong = b"PING\r\n", b"+PONG"
    body = b'{"key":"AA==","range_end":"AA=="}'
    keys = b"POST /v3/kv/range HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def look() -> list[str]:
        found = [f"reads {name}" for name in _readable(target.state)[:5]]
        for name, request, answer in (("redis", ping, pong), ("etcd_client", keys, b"200 OK")):
            if name in ports and _talks(socket.AF_INET, ("127.0.0.1", ports[name]), request, answer):
                found.append(f"reaches {name} on its port")
        for path in sockets:
            if any(_talks(socket.AF_UNIX, path, *each) for each in ((ping, pong), (keys, b"HTTP/1.1"))):
                found.append(f"reaches {path}")
        return found

    wrong = await asyncio.to_thread(_as_nobody, look)
    return Found(
        did=[f"{len(sockets)} sockets and {len(ports)} ports"],
        wrong=[f"another user {each}" for each in wrong],
    )


async def etcd_gone(target: Target) -> Found:
    """Kill etcd and take its data: what its supervisor starts is a store without the fleet's state."""
    data, found = target.state / "state" / "etcd", Found()
    os.kill(pid_of(target, "etcd"), signal.SIGKILL)
    for entry in data.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    await asyncio.sleep(20.0)
    request = head("/readyz", "", "connection: close", method="GET")
    status, answer = await status_of(target.metrics["controlplane"], request)
    found.did.append(f"/readyz of the control plane: {status} {answer[-100:]!r}")
    if status == 200:
        found.wrong.append("the control plane is ready without the fleet's state")
    async with admin_client(target) as admin:
        try:
            await admin.tenants.create(cp.Tenant(metadata=cp.Metadata(name="made-meanwhile")), timeout_s=10)
            found.wrong.append("a change was accepted")
        except FairwayError as error:
            found.did.append(f"a change: {error.reason}")
    for gateway in target.gateways:
        async with channel(gateway.grpc) as opened:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            try:
                await grpc_stream(
                    stub, generation(target.model, "def f", 4), target.keys["drills"], Canary("")
                )
            except grpc.aio.AioRpcError as error:
                found.wrong.append(f"{gateway.name} does not serve on: {error.code().name} {error.details()}")
    return found


STORES: Final = (
    Attack("log-disk-full", "the disk of the logs full, then free again", "no role ends", log_disk_full),
    Attack("flipped-weights", "flipped bits cached, the engine killed", "same answers", flipped_weights, 120),
    Attack("ready-deleted", "a cache's `ready/` gone, the engine killed", "READY again", ready_deleted, 120),
    Attack("other-user", "another user reads files and connects to stores", "nothing", other_user),
    Attack("redis-flushed", "Redis flushed, scripts as well", "limits exact", redis_flushed, stores=True),
)
ETCD: Final = Attack(
    "etcd-gone",
    "etcd killed, its data gone",
    "not ready, changes refused, serving goes on",
    etcd_gone,
    limit_s=90,
    kills=("etcd",),
    stores=True,
    ends=True,
    max_gap_s=4.0,  # nobody leads: gateways wait for a leader before they place by themselves
)
