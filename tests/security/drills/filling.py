"""A tenant fills what all share: the disk of the stores by uploads, Redis's memory by keys and responses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.asyncio import Redis

from tests.security.drills.http import connected, head, post, status_of
from tests.security.drills.installation import RESERVE_BYTES, redis_of
from tests.security.drills.judge import Found
from tests.security.drills.stores import pid_of
from tests.security.drills.target import Attack, Gateway, Target
from tests.security.drills.tenants import COMPLETIONS, now_s

TENANT: Final = "hoarder"
FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
RESPONSES: Final = "/v1/responses"
FILE_BYTES: Final = 16 * 1024**2
# What is left to the uploads: the rest of the disk is in use.
UPLOADED_BYTES: Final = 96 * 1024**2
FILL_S: Final = 40.0
# What several processes may write between two measurements.
SLACK_BYTES: Final = 16 * 1024**2
LINES: Final = 6
HEAL_S: Final = 45.0
REDIS_ROOM_BYTES: Final = 6 * 1024**2
Answer = tuple[int, Any]
Body = dict[str, object]
_BOUNDARY: Final = b"drill"


async def answer_of(address: str, request: bytes) -> Answer:
    """Return a status and the JSON of the answer, if it has any."""
    received = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(60.0), connected(address) as (reader, writer):
            # A refusal comes while the body is still sent: it is read at once, or the reset would discard it.
            reading = asyncio.create_task(reader.read(1 << 20))
            with contextlib.suppress(OSError):
                for start in range(0, len(request), 1 << 16):
                    writer.write(request[start : start + (1 << 16)])
                    await writer.drain()
            received = await reading
            while piece := await reader.read(1 << 20):
                received += piece
    status = int(received.split(maxsplit=2)[1]) if received.startswith(b"HTTP/1.1 ") else 0
    with contextlib.suppress(ValueError):
        return status, json.loads(received.partition(b"\r\n\r\n")[2])
    return status, {}


def upload(key: str, content: bytes) -> bytes:
    """Return the upload of a file of a batch."""
    body = b"".join(
        b"--%s\r\ncontent-disposition: form-data; name=%s\r\n\r\n%s\r\n" % (_BOUNDARY, name, value)
        for name, value in ((b'"purpose"', b"batch"), (b'"file"; filename="f"', content))
    )
    body += b"--%s--\r\n" % _BOUNDARY
    kind = f"content-type: multipart/form-data; boundary={_BOUNDARY.decode()}"
    lines = (kind, f"content-length: {len(body)}", "connection: close")
    return head(FILES, key, *lines).replace(b"content-type: application/json\r\n", b"") + body


def get(path: str, key: str, method: str = "GET") -> bytes:
    return head(path, key, "connection: close", method=method)


async def in_time(condition: Callable[[], Awaitable[bool]], timeout_s: float = HEAL_S) -> bool:
    deadline_s = now_s() + timeout_s
    while not await condition():
        if now_s() > deadline_s:
            return False
        await asyncio.sleep(0.5)
    return True


async def _notices(target: Target, found: Found) -> None:
    """Check that each gateway is ready and reports what is full."""
    for name, address in target.metrics.items():
        if name.startswith("gateway"):
            status, received = await status_of(address, get("/readyz", ""))
            if status != 200 or b"storage: no room in " not in received:
                found.wrong.append(f"{name} is {status} and does not report it: {received[-200:]!r}")


async def _fill(target: Target, statuses: Counter[str], least: list[int]) -> None:
    """Upload on every gateway for a while, whatever is answered."""
    ends_s, key = now_s() + FILL_S, target.keys[TENANT]

    async def uploads(gateway: Gateway) -> None:
        while now_s() < ends_s:
            status, body = await answer_of(gateway.http, upload(key, os.urandom(FILE_BYTES)))
            statuses[f"{status} {body.get('error', {}).get('code', '')}".strip()] += 1
            least.append(_free_bytes(target))
            await asyncio.sleep(0.05 if status == 200 else 0.5)

    async with asyncio.TaskGroup() as group:
        for gateway in target.gateways:
            for _ in range(2):
                group.create_task(uploads(gateway))


def _free_bytes(target: Target) -> int:
    return shutil.disk_usage(target.state / "state").free


async def disk_full(target: Target) -> Found:
    if not (target.state / "state").is_mount():
        return Found(skipped="the stores are on no disk of their own: that takes root and mount")
    found, key, address = Found(), target.keys[TENANT], target.gateways[0].http
    line = {"model": target.model, "prompt": "def f", "max_tokens": 4}
    lines = [
        json.dumps({"custom_id": f"{number}", "method": "POST", "url": COMPLETIONS, "body": line})
        for number in range(LINES)
    ]
    status, kept = await answer_of(address, upload(key, "\n".join(lines).encode()))
    if status != 200:
        return Found(wrong=[f"the input of a batch was answered {status}: {kept}"])
    statuses: Counter[str] = Counter()
    least: list[int] = []
    filler = target.state / "state" / "filler"
    filler.write_bytes(bytes(max(0, _free_bytes(target) - RESERVE_BYTES - UPLOADED_BYTES)))
    await _fill(target, statuses, least)
    found.did.append(f"uploads {dict(statuses)}, at least {min(least) >> 20} MiB free")
    # The end of an answer is lost where the connection is reset under the rest of the body.
    if set(statuses) - {"507"} != {"200", "507 storage_full"}:
        found.wrong.append(f"uploads were answered {dict(statuses)}")
    if min(least) < RESERVE_BYTES - SLACK_BYTES:
        found.wrong.append(f"only {min(least)} bytes were left of the reserve")
    await _notices(target, found)
    order = {"input_file_id": kept["id"], "endpoint": COMPLETIONS, "completion_window": "1h"}
    status, batch = await answer_of(address, post(BATCHES, json.dumps(order).encode(), key))
    if status != 200:
        found.wrong.append(f"a batch on a full disk was answered {status}: {batch}")
        return found
    await asyncio.sleep(3.0)
    found.wrong += await _emptied(target, kept["id"])  # room is back by deletions alone
    batch_path = f"{BATCHES}/{batch['id']}"

    async def uploaded() -> bool:
        return (await answer_of(address, upload(key, os.urandom(FILE_BYTES))))[0] == 200

    async def completed() -> bool:
        counts = (await answer_of(address, get(batch_path, key)))[1].get("request_counts", {})
        return bool(counts.get("completed") == LINES)

    for what, check in (("an upload is refused", uploaded), ("the batch has not completed", completed)):
        if not await in_time(check):
            found.wrong.append(f"{what} {HEAL_S:g} s after there is room again")
    found.wrong += await _emptied(target, "")
    filler.unlink()
    return found


async def _emptied(target: Target, but: str) -> list[str]:
    """Delete the tenant's files; return what was refused."""
    key, address, wrong = target.keys[TENANT], target.gateways[-1].http, []
    _, listed = await answer_of(address, get(f"{FILES}?limit=1000", key))
    for file in listed.get("data", []):
        if file["id"] != but:
            status, answer = await answer_of(address, get(f"{FILES}/{file['id']}", key, "DELETE"))
            if status != 200:
                wrong.append(f"a deletion was answered {status}: {answer}")
    return wrong


async def _oom(client: Redis) -> int:
    stats = await client.info("errorstats")
    return int(stats.get("errorstat_OOM", {"count": 0})["count"])


async def redis_filled(target: Target) -> Found:
    """One tenant's keys and stored responses against little memory; another tenant uses keys meanwhile."""
    client, found = redis_of(pid_of(target, "gateway")), Found()
    info = await client.info("memory")
    used = int(info["used_memory"])
    # What earlier attacks left is a third at most, so that this tenant alone could reach the reserve.
    before, most = info["maxmemory"], max(used + REDIS_ROOM_BYTES, 3 * used)
    refused = await _oom(client)
    await client.config_set("maxmemory", most)
    try:
        await _hoard(target, found)
        used = int((await client.info("memory"))["used_memory"])
        refused = await _oom(client) - refused
        found.did.append(f"{used >> 20} of {most >> 20} MiB used, {refused} writes refused by Redis")
        if refused:
            found.wrong.append(f"Redis refused {refused} writes: its memory was full")
    finally:
        await client.config_set("maxmemory", before)
        await client.aclose()
    return found


async def _hoard(target: Target, found: Found) -> None:
    ends_s, numbers = now_s() + FILL_S, itertools.count()
    hoarder: Counter[str] = Counter()
    others: Counter[str] = Counter()
    metadata = {f"m{number}": "x" * 512 for number in range(16)}

    async def one(tenant: str, gateway: Gateway, path: str, body: Body, counts: Counter[str]) -> None:
        keyed = f"idempotency-key: {tenant}-{next(numbers)}-{now_s()}"
        data = json.dumps({"model": target.model, **body}).encode()
        lines = (keyed, f"content-length: {len(data)}", "connection: close")
        status, answer = await answer_of(gateway.http, head(path, target.keys[tenant], *lines) + data)
        error = answer.get("error") or {}
        full = str(error.get("message", "")).split(":")[0] if status == 507 else ""
        counts[f"{status} {error.get('code', '')} {full}".strip()] += 1

    async def hoard(gateway: Gateway) -> None:
        while now_s() < ends_s:
            await one(TENANT, gateway, COMPLETIONS, {"prompt": "a", "max_tokens": 1}, hoarder)
            kept = {"input": "a", "max_output_tokens": 1, "metadata": metadata, "store": True}
            await one(TENANT, gateway, RESPONSES, kept, hoarder)

    async def go_on(gateway: Gateway) -> None:
        while now_s() < ends_s:
            await one("drills", gateway, COMPLETIONS, {"prompt": "b", "max_tokens": 2}, others)
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        for gateway in target.gateways:
            group.create_task(go_on(gateway))
            for _ in range(4):
                group.create_task(hoard(gateway))
    found.did.append(f"the hoarder {dict(hoarder)}, the other {dict(others)}")
    if set(others) != {"200"}:
        found.wrong.append(f"another tenant's requests with keys: {dict(others)}")


FILLING: Final = (
    Attack("disk-full", "uploads fill the stores' disk, a batch waits", "507, others go on", disk_full, 240),
    Attack("redis-filled", "keys and responses fill Redis", "others go on, with keys", redis_filled, 120),
)
