"""What the usage ledger of a real installation shows: device time that has an owner, and how fresh it is.

The bundled model is served by the engine. Four connections send requests for 64 tokens one after another,
while short requests, each of an end user of its own, are timed from the end of the answer until ``ListUsage``
shows them. ``device_seconds_ratio``: of the time of all engine steps, as the worker counts it, the part that
the ledger charged to requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.admissions.http_load import HttpConnection, HttpTarget
from bench.overhead import quantile
from bench.stack import free_port, metric_sum
from fairway.client import AdminClient, tls_credentials
from fairway.client.admin.admin import UsageRecords
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import usage_pb2

CONNECTIONS: Final = 4
TOKENS: Final = 64
TIMED: Final = 40
POLL_S: Final = 0.05
PATIENCE_S: Final = 60.0
# The longest time until a worker reports how its device spent its time, and the ledger books it.
REPORTED_S: Final = 15.0
_OF_NOBODY: Final = (usage_pb2.USAGE_SOURCE_IDLE, usage_pb2.USAGE_SOURCE_UNATTRIBUTED)


@dataclass(frozen=True, slots=True)
class Installation:
    """Where it answers, and its control planes."""

    target: HttpTarget
    controlplanes: tuple[str, ...]
    admin_key: str
    registry: str
    state: Path


@contextlib.contextmanager
def installation(state: Path) -> Iterator[Installation]:
    """Bring up an installation with the bundled model, and down again."""

    def fairway(*arguments: str) -> None:
        command = [sys.executable, "-m", "fairway.cli.main", *arguments, "--state-dir", str(state)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")

    ports = ("--http-port", str(free_port()), "--grpc-port", str(free_port()))
    try:
        fairway("up", "--detach", "--model", "tiny", *ports)
        found = json.loads((state / "endpoints.json").read_text())
        yield Installation(
            HttpTarget("fairway", found["http"], found["api_key"], found["model"]),
            tuple(found["controlplanes"] or [found["controlplane"]]),
            found["admin_key"],
            found["registry"],
            state,
        )
    finally:
        fairway("down")


async def metering(found: Installation) -> dict[str, float]:
    """Return ``device_seconds_ratio`` and ``usage_fresh_s``."""
    timed = asyncio.Event()
    credentials = tls_credentials(found.state / "certs" / "operator")
    async with AdminClient(
        found.controlplanes, admin_key=found.admin_key, registry=found.registry, credentials=credentials
    ) as admin:
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(_load(found.target, until=timed))
            users = [f"timed-{number}" for number in range(TIMED)]
            fresh_s = [await _fresh_s(found.target, admin.usage, user) for user in users]
            timed.set()
        await asyncio.sleep(REPORTED_S)
        charged_s = await _charged_s(admin.usage)
    step_s = metric_sum(found.state, "worker-0", "fairway_worker_device_seconds_total")
    p50_s, p95_s = quantile(fresh_s, 0.5), quantile(fresh_s, 0.95)
    print(
        f"ledger: of {step_s:.2f} s of engine steps {charged_s:.2f} s charged; usage fresh after "
        f"{p50_s:.2f} s (p50), {p95_s:.2f} s (p95), {max(fresh_s):.2f} s (most of {TIMED})",
        flush=True,
    )
    return {"device_seconds_ratio": round(charged_s / step_s, 4), "usage_fresh_s": round(p95_s, 2)}


async def _load(target: HttpTarget, *, until: asyncio.Event) -> None:
    connection = await HttpConnection.open(target)
    while not until.is_set():
        await connection.exchange(target.request(TOKENS))
    connection.close()


async def _fresh_s(target: HttpTarget, usage: UsageRecords, user: str) -> float:
    """Return the time from the end of a request until its usage is listed."""
    connection = await HttpConnection.open(target)
    await connection.exchange(target.request(4, user=user))
    connection.close()
    ended_s = time.perf_counter()
    while not any(record.requests for record in await usage.list(user=user)):
        if time.perf_counter() - ended_s > PATIENCE_S:
            raise SystemExit(f"the usage of a request is not listed after {PATIENCE_S:g} s")
        await asyncio.sleep(POLL_S)
    return time.perf_counter() - ended_s


async def _charged_s(usage: UsageRecords) -> float:
    """Return the device time that requests were charged."""
    records = await usage.list(group_by=[cp.USAGE_DIMENSION_TENANT])
    return sum(record.device_us for record in records if record.source not in _OF_NOBODY) / 1e6
