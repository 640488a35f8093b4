"""Attacks over gRPC without a credential."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from fairway.v1 import controlplane_pb2, inference_pb2, registry_pb2, scheduler_pb2, worker_pb2
from services.runtime.clock import SystemClock
from tests.security.drills.frames import CONTINUATION, HEADERS, PING, Http2, frame, header_block, message
from tests.security.drills.judge import CROWD_GAP_S, Found
from tests.security.drills.target import SOURCES, Attack, Target
from tests.support.stack import metadata

CHECK: Final = "/grpc.health.v1.Health/Check"
WATCH: Final = "/grpc.health.v1.Health/Watch"
LIST: Final = "/grpc.health.v1.Health/List"
REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
COMPLETE: Final = "/fairway.v1.InferenceService/Complete"
MODULES: Final = {
    "gateway": inference_pb2,
    "scheduler": scheduler_pb2,
    "worker": worker_pb2,
    "registry": registry_pb2,
    "controlplane": controlplane_pb2,
}
_OPEN_S: Final = 30.0
MESSAGE_BYTES: Final = 16 * 1024**2 - 64
now_s = SystemClock().monotonic_s


async def together(works: Iterable[Awaitable[str]]) -> Found:
    """Run all; what each returns is what it did. One that the server cuts off has done its part."""
    done = await asyncio.gather(*works, return_exceptions=True)
    did = {f"{each}" if isinstance(each, str) else f"{type(each).__name__}: {each}"[:120] for each in done}
    return Found(did=sorted(did - {""})[:8])


async def _streams(address: str, source: str, path: str, count: int, hold_s: float, *, send: bool) -> str:
    async with Http2.connected(address, source) as connection:
        for _ in range(count):
            stream = await connection.open(path)
            if send:
                await connection.send(stream, message(b""), end=False)
        await asyncio.sleep(hold_s)
        state = (
            "closed" if connection.closed.is_set() else f"{len(connection.answered)} of {count} were ended"
        )
        return f"{path.rpartition('/')[2]} streams on one connection: {state}"


async def health_watch(target: Target) -> Found:
    return await together(
        _streams(address, SOURCES[0], WATCH, 300, 70.0, send=True) for address in target.roles.values()
    )


async def reflection(target: Target) -> Found:
    return await together(
        _streams(address, SOURCES[1], REFLECTION, 300, 15.0, send=False) for address in target.roles.values()
    )


async def half_open(target: Target) -> Found:
    names = ("gateway", "worker-0", "scheduler")
    return await together(
        _streams(target.roles[name], source, CHECK, 4096, 18.0, send=False)
        for name in names
        for source in SOURCES[:5]
    )


def repeated_message(descriptor: Descriptor, depth: int = 4) -> list[FieldDescriptor] | None:
    """Return the fields that lead to a list of messages, None when there is no such list."""
    fields = [(field, field.message_type) for field in descriptor.fields if field.message_type is not None]
    for field, kind in fields:
        if field.is_repeated and not kind.GetOptions().map_entry:
            return [field]
    for field, kind in fields if depth else ():
        inner = None if field.is_repeated else repeated_message(kind, depth - 1)
        if inner is not None:
            return [field, *inner]
    return None


def empty_submessages(role: str, size_bytes: int = MESSAGE_BYTES) -> tuple[str, bytes]:
    """Return a method of the role and a request of it: a list of empty messages."""
    module: Any = MODULES[role]
    services = module.DESCRIPTOR.services_by_name.values()
    methods = [method for service in services for method in service.methods]
    for method in sorted(methods, key=lambda method: method.client_streaming):
        if (fields := repeated_message(method.input_type)) is not None:
            entry = _tag(fields[-1]) + b"\x00"
            payload = entry * (size_bytes // len(entry))
            for field in reversed(fields[:-1]):
                payload = _tag(field) + _varint(len(payload)) + payload
            return f"/{method.containing_service.full_name}/{method.name}", payload
    raise AssertionError(f"no request of {role} has a list of messages")


def _tag(field: FieldDescriptor) -> bytes:
    return _varint(field.number << 3 | 2)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


async def _submessages(name: str, address: str, *, compressed: bool) -> str:
    path, payload = empty_submessages(name.partition("-")[0])
    fields = (("grpc-encoding", "gzip"),) if compressed else ()
    data = message(gzip.compress(payload) if compressed else payload, compressed=compressed)
    count = 6 if compressed else 2
    async with Http2.connected(address, SOURCES[2]) as connection, asyncio.timeout(40):
        await asyncio.gather(*(connection.call(path, data, *fields) for _ in range(count)))
        await connection.answers(count, 30.0)
        return f"{path}: {len(connection.answered)} of {count} answered"


async def submessages(target: Target) -> Found:
    return await together(_submessages(*each, compressed=False) for each in target.roles.items())


async def submessages_gzip(target: Target) -> Found:
    return await together(_submessages(*each, compressed=True) for each in target.roles.items())


async def idle(addresses: Iterable[str], each: int, hold_s: float) -> Found:
    """Open so many connections to each address and hold them."""
    gate, sockets, refused = asyncio.Semaphore(100), [], 0
    loop = asyncio.get_running_loop()

    async def one(host: str, port: int, source: str) -> None:
        nonlocal refused
        opened = socket.socket()
        opened.setblocking(False)
        try:
            async with gate, asyncio.timeout(3.0):
                opened.bind((source, 0))
                await loop.sock_connect(opened, (host, port))
            sockets.append(opened)
        except (OSError, TimeoutError, asyncio.CancelledError):
            refused += 1
            opened.close()

    ports = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)]
    sources = [SOURCES[number % len(SOURCES)] for number in range(each)]
    works = [asyncio.create_task(one(*port, source)) for source in sources for port in ports]
    _, late = await asyncio.wait(works, timeout=_OPEN_S)
    for task in late:
        task.cancel()
    await asyncio.sleep(hold_s)
    closed = sum(_is_closed(each) for each in sockets)
    for opened in sockets:
        opened.close()
    return Found(did=[f"{len(sockets)} connections, {refused} refused, {closed} closed by the server"])


def _is_closed(opened: socket.socket) -> bool:
    try:
        return not opened.recv(65536) and True
    except BlockingIOError:
        return False
    except OSError:
        return True


async def idle_gateway(target: Target) -> Found:
    gateway = target.gateways[0]
    return await idle([(gateway.grpc, gateway.http)[target.share[0]]], 10_300, 12.0)


async def idle_metrics(target: Target) -> Found:
    """The server ends what sends no head: more come in their places."""
    found, ends_s = Found(), now_s() + 20.0
    while now_s() < ends_s:
        found = await idle(target.metrics.values(), 300, 1.0)
    return found


async def _lists(address: str) -> str:
    async with Http2.connected(address, SOURCES[3]) as connection:
        for _ in range(10):
            await asyncio.gather(*(connection.call(LIST, message(b"")) for _ in range(100)))
            await asyncio.sleep(0.5)
        return f"Health/List: {len(connection.answered)} of 1000 answered"


async def health_list(target: Target) -> Found:
    return await together(_lists(address) for address in target.roles.values())


_UNREAD_S: Final = 1.0  # a server that reads nothing for so long leaves the rest unread


async def _flood(
    target: Target, flood: Callable[[Http2], Awaitable[int]], what: str, *, hold_s: float = 10.0
) -> Found:
    """Repeat on connections to gateways and a worker, anew whenever the server closes or ignores one."""

    async def one(address: str, source: str) -> str:
        done, connections, ends_s = 0, 0, now_s() + hold_s
        while now_s() < ends_s:
            with contextlib.suppress(OSError, TimeoutError):
                async with Http2.connected(address, source) as connection:
                    connections += 1
                    while now_s() < ends_s and not connection.closed.is_set():
                        async with asyncio.timeout(_UNREAD_S):
                            done += await flood(connection)
                        await asyncio.sleep(0)
            await asyncio.sleep(0.01)
        return f"{done} {what} on {connections} connections"

    addresses = [*(gateway.grpc for gateway in target.gateways), target.roles["worker-0"]]
    return await together(one(address, source) for address in addresses for source in SOURCES[4:6])


# Headers are bytes: ``frames`` encodes a path as latin-1, so these are no UTF-8.
_NO_NAMES: Final = ("/\xff\xfe/x", "/fairway.v1.InferenceService/\xc3\x28", "\x80")


async def _no_names(name: str, address: str) -> str:
    async with Http2.connected(address, SOURCES[3]) as connection, asyncio.timeout(20):
        for number in range(60):
            await connection.open(_NO_NAMES[number % len(_NO_NAMES)], end=True)
        await connection.answers(60, 10.0)
        return f"{name}: {len(connection.answered)} of 60 answered"


async def no_names(target: Target) -> Found:
    """Each role takes calls afterwards: a name that ended its loop of calls would leave them unanswered."""
    found = await together(_no_names(*each) for each in target.roles.items())
    for name, address in target.roles.items():
        async with grpc.aio.insecure_channel(address) as channel:
            check: Any = channel.unary_unary(CHECK)
            try:
                await check(b"", timeout=10)
            except grpc.aio.AioRpcError as error:
                found.wrong.append(f"{name} answers no probe: {error.code().name}")
    return found


async def malformed(target: Target) -> Found:
    logs = {gateway.name: target.state / "logs" / f"{gateway.name}.log" for gateway in target.gateways}
    before = {name: path.stat().st_size for name, path in logs.items()}

    async def flood(connection: Http2) -> int:
        await asyncio.gather(*(connection.call(COMPLETE, message(b"\xff" * 9)) for _ in range(50)))
        await asyncio.sleep(0.1)
        return 50

    found = await _flood(target, flood, "malformed messages")
    for gateway in target.gateways:
        async with grpc.aio.insecure_channel(gateway.grpc) as channel:
            complete: Any = channel.unary_unary(COMPLETE)
            for key, due in (("", "UNAUTHENTICATED"), (target.keys["drills"], "INVALID_ARGUMENT")):
                try:
                    await complete(b"\xff" * 9, metadata=metadata(key), timeout=10)
                except grpc.aio.AioRpcError as error:
                    if error.code().name != due or "Error" in str(error.details()):
                        got = f"{error.code().name} {error.details()}"
                        found.wrong.append(f"a malformed message got {got} instead of {due}"[:250])
    for name, path in logs.items():
        if traces := _since(path, before[name]).count(b"Traceback"):
            found.wrong.append(f"{traces} tracebacks in the log of {name}")
    return found


def _since(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset if offset <= path.stat().st_size else 0)
        return file.read()


async def rapid_reset(target: Target) -> Found:
    async def flood(connection: Http2) -> int:
        for _ in range(100):
            await connection.reset(await connection.open(COMPLETE))
        return 100

    return await _flood(target, flood, "resets")


async def ping_flood(target: Target) -> Found:
    async def flood(connection: Http2) -> int:
        await connection.write(frame(PING, 0, 0, bytes(8)) * 100)
        return 100

    return await _flood(target, flood, "pings")


async def giant_metadata(target: Target) -> Found:
    async def flood(connection: Http2) -> int:
        await connection.open(COMPLETE, ("x-long", "a" * 1_000_000))
        for _ in range(20):
            await connection.open(COMPLETE, *((f"x-{number}", "a" * 200) for number in range(100)))
        block = header_block([("x-endless", "a" * 16_000)])
        await connection.write(frame(HEADERS, 0, 9001, block))
        for _ in range(200):
            await connection.write(frame(CONTINUATION, 0, 9001, block))
        return 22

    return await _flood(target, flood, "giant heads", hold_s=8.0)


STRANGERS: Final = (
    Attack(
        "health-watch",
        "300 Health/Watch streams to each role for 70 s",
        "no role is killed",
        health_watch,
        90,
    ),
    Attack(
        "reflection", "300 reflection streams on one connection to each role", "probes answered", reflection
    ),
    Attack(
        "half-open-calls",
        "20,000 calls without a message on three roles",
        "probes answered",
        half_open,
        max_gap_s=CROWD_GAP_S,
    ),
    Attack(
        "empty-submessages", "16 MiB of empty submessages to each role", "nothing is decoded", submessages
    ),
    Attack("gzip-submessages", "the same in 16 kB, six at once", "nothing is inflated", submessages_gzip),
    Attack(
        "method-names", "60 calls to each role, of names that are no UTF-8", "each role takes calls", no_names
    ),
    Attack("malformed-messages", "1,000 a second", "a status of its own, no traceback logged", malformed),
    Attack(
        "idle-connections", "10,300 on each port of a gateway", "new users are served", idle_gateway, 90, 2
    ),
    Attack("idle-metrics", "300 on each metrics port, again and again", "/readyz is answered", idle_metrics),
    Attack("health-list", "1,000 calls of Health/List on each role", "probes answered", health_list),
    Attack("rapid-reset", "streams that are opened and reset at once", "canaries go on", rapid_reset),
    Attack("ping-flood", "pings as fast as they can be sent", "canaries go on", ping_flood),
    Attack("giant-metadata", "heads of 20 kB, of 1 MB, and without an end", "canaries go on", giant_metadata),
)
