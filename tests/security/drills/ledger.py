"""What refused, impossible and damaged usage does to the ledger and to those who report to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from pathlib import Path
from typing import Final

import grpc
import psutil

from fairway.client import AdminClient, FairwayError
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc, usage_pb2, usage_pb2_grpc
from services.runtime.clock import SystemClock
from services.runtime.config import load, read_password
from tests.security.drills.canary import generation
from tests.security.drills.http import head, status_of
from tests.security.drills.installation import admin_client
from tests.security.drills.judge import Found
from tests.security.drills.stores import pid_of
from tests.security.drills.target import Attack, Target
from tests.security.drills.tenants import channel
from tests.support.stack import metadata

LABELS: Final = {f"{number:02d}-" + "n" * 125: "v" * 128 for number in range(32)}
USER: Final = "u" * 128  # the longest that is kept as it is
FILE_BYTES: Final = 16 * 1024**2  # what the receiver takes in a message
AT_ONCE: Final = 48
DRAWS: Final = 200
FLIPPED: Final = 12
ROUNDS: Final = 20  # segments with requests of the tenant whose bits are flipped
EACH: Final = 8
LEAD_S: Final = 45.0
NUMBERS: Final = (2**63 - 1, 2**63, 2**64 - 1, 2**62, 10**15, 10**18)
REALS: Final = (float("nan"), float("inf"), -float("inf"), -1.0, 1e300, 1e9)
now_s = SystemClock().monotonic_s


async def metric(target: Target, role: str, name: str) -> float:
    """Return the sum of a metric of a process; 0 where it has none."""
    request = head("/metrics", "", "connection: close", method="GET")
    _, answer = await status_of(target.metrics[role], request, answer_bytes=2**22)
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", answer.decode(), re.MULTILINE)
    return sum(map(float, found))


async def requests_of(admin: AdminClient, tenant: str) -> int:
    """Return how many requests of a tenant are booked, as soon as a control plane leads."""
    deadline_s = now_s() + LEAD_S
    while True:
        try:
            records = await admin.usage.list(tenant=tenant, timeout_s=10)
            return sum(record.requests for record in records)
        except FairwayError:
            if now_s() > deadline_s:
                raise
            await asyncio.sleep(0.5)


async def _tenant(admin: AdminClient, name: str, labels: dict[str, str]) -> str:
    """Return the key of a new tenant with a budget."""
    await admin.tenants.create(cp.Tenant(metadata=cp.Metadata(name=name)))
    budget = cp.Budget(metadata=cp.Metadata(name=name), tenant=name, limit_micros=10**12)
    await admin.budgets.create(budget)
    meta = cp.Metadata(name=f"key-{name}", labels=labels)
    created = await admin.keys.create(cp.Key(metadata=meta, role=cp.KEY_ROLE_TENANT, tenant=name))
    await asyncio.sleep(1.5)  # gateways receive a key a moment after it was made
    return created.secret


async def _generate(stub: inference_pb2_grpc.InferenceServiceAsyncStub, target: Target, key: str) -> bool:
    """Return whether a request of one token was served."""
    wanted = generation(target.model, "def f", 1)
    wanted.user = USER
    try:
        async for event in stub.Generate(
            pb.GenerateRequest(generation=wanted), metadata=metadata(key), timeout=30
        ):
            if event.HasField("finished"):
                return True
    except grpc.aio.AioRpcError:
        pass
    return False


async def labels_above_a_message(target: Target) -> Found:
    """Let a gateway's outbox grow above a message while no control plane leads; count what is booked then."""
    found, served = Found(), 0
    gateway = target.gateways[0]
    outbox = target.state / "state" / gateway.name / "usage"
    async with admin_client(target) as admin:
        key = await _tenant(admin, "labelled", LABELS)

    def waiting() -> int:
        return max((path.stat().st_size for path in outbox.glob("*.events")), default=0)

    stopped = asyncio.ensure_future(_keep_down(target, "controlplane"))
    try:
        async with channel(gateway.grpc) as opened:
            stub = inference_pb2_grpc.InferenceServiceStub(opened)
            deadline_s = now_s() + 180.0
            while waiting() <= FILE_BYTES and now_s() < deadline_s:
                served += sum(await asyncio.gather(*(_generate(stub, target, key) for _ in range(AT_ONCE))))
        largest = waiting()
    finally:
        stopped.cancel()
        await asyncio.wait((stopped,))
    found.did.append(f"{served} requests, a file of {largest} bytes in the outbox")
    if largest <= FILE_BYTES:
        found.wrong.append(f"the outbox has no file above a message: {largest} bytes")
    async with admin_client(target) as admin:
        await requests_of(admin, "labelled")
        deadline_s = now_s() + LEAD_S
        while (booked := await requests_of(admin, "labelled")) < served and now_s() < deadline_s:
            await asyncio.sleep(1.0)
    found.did.append(f"{booked} requests booked")
    if booked < served:
        found.wrong.append(f"{served - booked} of {served} requests are not booked")
    async with channel(gateway.grpc) as opened:
        if not await _generate(inference_pb2_grpc.InferenceServiceStub(opened), target, key):
            found.wrong.append("a tenant with a budget is not served")
    for name in ("fairway_usage_outbox_lost_total", "fairway_usage_outbox_refused"):
        if amount := await metric(target, gateway.name, name):
            found.wrong.append(f"{name} is {amount:g}")
    found.accept("labelled", served + 1, served + 1)
    return found


async def _flipped_tenant(target: Target, admin: AdminClient) -> tuple[int, list[Path]]:
    """Let requests of a tenant of its own be booked over many segments; return how many, and the segments.

    No checkpoint covers these segments.
    """
    root, served = target.state / "state" / "usage", 0
    first = max((path.name for path in (root / "segments").iterdir()), default="")
    key = await _tenant(admin, "flipped", {})
    async with channel(target.gateways[0].grpc) as opened:
        stub = inference_pb2_grpc.InferenceServiceStub(opened)
        for _ in range(ROUNDS):
            served += sum(await asyncio.gather(*(_generate(stub, target, key) for _ in range(EACH))))
            await asyncio.sleep(1.0)
    deadline_s = now_s() + LEAD_S
    while await requests_of(admin, "flipped") < served and now_s() < deadline_s:
        await asyncio.sleep(0.5)
    covered = max((path.name for path in (root / "checkpoints").glob("*")), default="")
    segments = sorted(path for path in (root / "segments").iterdir() if path.name > max(first, covered))
    return await requests_of(admin, "flipped"), segments


async def _keep_down(target: Target, role: str) -> None:
    """Kill a role as often as its supervisor starts it, until cancelled."""
    while True:
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(pid_of(target, role), signal.SIGKILL)
        await asyncio.sleep(0.3)


def _drawn(rng: random.Random) -> usage_pb2.UsageEvent:
    """Return an event with one impossible amount."""
    tokens = usage_pb2.TokenCounts(prompt=10, cached=0, output=5)
    common = {"request_id": f"r{rng.random()}", "tenant": "canary", "model": "m", "ended_unix_ms": 10**12}
    request = usage_pb2.SettledRequest(**common, tokens=tokens, list_micros=10)  # type: ignore[arg-type]
    sequence = usage_pb2.SequenceUse(**common, tokens=tokens, device_s=1.0)  # type: ignore[arg-type]
    device = usage_pb2.DeviceTime(began_unix_ms=10**12, ended_unix_ms=10**12 + 1000, busy_s=1.0)
    match rng.randrange(6):
        case 0:
            setattr(request.tokens, rng.choice(("prompt", "cached", "output")), rng.choice(NUMBERS))
        case 1:
            request.list_micros = rng.choice(NUMBERS)
        case 2:
            setattr(sequence.tokens, rng.choice(("prompt", "cached", "output")), rng.choice(NUMBERS))
            return usage_pb2.UsageEvent(sequence=sequence)
        case 3:
            setattr(sequence, rng.choice(("device_s", "cost_per_hour")), rng.choice(REALS))
            return usage_pb2.UsageEvent(sequence=sequence)
        case 4:
            setattr(device, rng.choice(("busy_s", "attributed_s", "cost_per_hour")), rng.choice(REALS))
            return usage_pb2.UsageEvent(device=device)
        case _:
            device.began_unix_ms = rng.choice((0, 1))
            return usage_pb2.UsageEvent(device=device)
    return usage_pb2.UsageEvent(request=request)


async def impossible_usage(target: Target) -> Found:
    """Report impossible amounts by the internal token, then put them into the log as an older version had."""
    settings = load(psutil.Process(pid_of(target, "gateway")).environ())
    token = read_password(settings.internal_token_file)
    rng, found, refused = random.Random(11), Found(), 0
    async with channel(target.controlplane) as opened:
        stub = usage_pb2_grpc.UsageServiceStub(opened)
        for number in range(DRAWS):
            event = _drawn(rng)
            request = usage_pb2.ReportUsageRequest(source=f"src-drill-{number}", first=1, events=[event])
            if number % 10 == 9:
                request.first = rng.choice(NUMBERS)
                request.lost_until = rng.choice(NUMBERS)
            try:
                await stub.ReportUsage(request, metadata=metadata(token), timeout=20)
                found.wrong.append(f"accepted: {' '.join(str(event).split())}"[:200])
            except grpc.aio.AioRpcError as error:
                refused += error.code() is grpc.StatusCode.INVALID_ARGUMENT
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                    found.wrong.append(f"{error.code().name} {error.details()}"[:200])
    found.did.append(f"{refused} of {DRAWS} reports refused")
    async with admin_client(target) as admin:
        before = await requests_of(admin, "canary")
        segment = await _put_into_log(target, [_drawn(rng) for _ in range(40)])
        deadline_s = now_s() + LEAD_S
        while not await metric(target, "controlplane", "fairway_usage_damaged_objects"):
            if now_s() > deadline_s:
                found.wrong.append("the segment with impossible events is not set apart")
                break
            await asyncio.sleep(0.5)
        after = await requests_of(admin, "canary")
    found.did.append(f"segment {segment} of 40 impossible events is set apart; {before}, then {after} booked")
    if after < before:
        found.wrong.append(f"{before} requests were booked, now {after}")
    return found


async def _put_into_log(target: Target, events: list[usage_pb2.UsageEvent]) -> int:
    """Store a segment under the next number, without checksums, and return its number."""
    folder = target.state / "state" / "usage" / "segments"
    while True:
        number = max(int(path.name) for path in folder.iterdir()) + 1
        batch = usage_pb2.UsageBatch(source="src-poison", last=len(events), events=events)
        segment = usage_pb2.UsageSegment(number=number, writer="old", booked_unix_ms=10**12, batches=[batch])
        try:
            with (folder / f"{number:016d}").open("xb") as file:
                file.write(segment.SerializeToString())
            return number
        except FileExistsError:
            await asyncio.sleep(0.05)


async def flipped_objects(target: Target) -> Found:
    """Flip bits in stored objects and end the control plane, which has to read them."""
    rng, found = random.Random(13), Found()
    root = target.state / "state" / "usage"
    async with admin_client(target) as admin:
        before, segments = await _flipped_tenant(target, admin)
        damaged = await metric(target, "controlplane", "fairway_usage_damaged_objects")
        chosen = rng.sample(segments, min(FLIPPED, len(segments) // 2))
        snapshots = sorted((root / "slis").iterdir())[-1:] if (root / "slis").is_dir() else []
        for path in (*chosen, *snapshots):
            _flip(path, rng)
        pid = pid_of(target, "controlplane")
        os.kill(pid, signal.SIGKILL)
        deadline_s = now_s() + LEAD_S
        while pid_of(target, "controlplane") == pid and now_s() < deadline_s:
            await asyncio.sleep(0.2)
        after = await requests_of(admin, "flipped")
        named = await metric(target, "controlplane", "fairway_usage_damaged_objects") - damaged
        lost = await metric(target, "controlplane", "fairway_usage_events_lost_total")
        _, answer = await status_of(
            target.metrics["controlplane"], head("/readyz", "", "connection: close", method="GET")
        )
    found.did.append(f"{len(chosen)} segments flipped, {named:g} named, {lost:g} events counted as lost")
    found.did.append(f"requests of a tenant at rest: {before} booked before, {after} after")
    found.did.append(f"/readyz: {answer[-120:]!r}")
    if named != len(chosen):
        found.wrong.append(f"{len(chosen)} segments have damage, {named:g} are named")
    if before - after > lost:
        found.wrong.append(f"{before - after} requests are missing, {lost:g} events are counted as lost")
    if b"set apart" not in answer:
        found.wrong.append("/readyz names no damage")
    return found


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


LEDGER: Final = (
    Attack(
        "usage-labels",
        "labels that make an outbox file above a message, no leader meanwhile",
        "all is booked, tenants with budgets are served",
        labels_above_a_message,
        limit_s=300,
        kills=("controlplane",),
        max_gap_s=4.0,
    ),
    Attack(
        "usage-impossible",
        "amounts near 2^63 by the internal token, and in the log",
        "refused by name; the log's are set apart",
        impossible_usage,
        limit_s=150,
    ),
    Attack(
        "usage-flipped",
        "flipped bits in the ledger's objects, the control plane killed",
        "named and counted, the rest is read",
        flipped_objects,
        limit_s=150,
        kills=("controlplane",),
        stores=True,
        max_gap_s=4.0,
    ),
)
