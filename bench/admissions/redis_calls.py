"""Reserve and settle in Redis, against bare round trips of the same payload.

A request is three calls: admit (requests, slots), reserve (tokens, a budget), settle. The bare side sends the
same three calls, captured on the way to Redis, to a script that does nothing with their keys and arguments
and therefore writes and syncs nothing. Its client is redis-py with hiredis, with a connection per caller;
ours queues the calls of all callers for four connections. Both sides have 64 callers in a closed loop, in
short turns on one Redis that syncs each write: the ratio is of requests per second, the median over the
rounds. A request's p99 is printed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import hiredis
import redis.asyncio

from bench.overhead import quantile
from services.adapters.redis.limiter import RedisLimiter
from services.core.generation import Usage
from services.core.limits import Claim, Limit, LimitKind, Price, Scope
from services.runtime.clock import SystemClock

ROUNDS: Final = 15
CALLERS: Final = 64
ROUND_S: Final = 1.0
TENANT: Final = "bench"
ADMITTED: Final = (
    Limit(LimitKind.REQUESTS, 100_000_000),
    Limit(LimitKind.CONCURRENCY, 100_000),
    Limit(LimitKind.REQUESTS, 100_000_000, Scope.KEY, "key"),
)
RESERVED: Final = (
    Claim(Limit(LimitKind.TOKENS, 10_000_000_000), 500),
    Claim(Limit(LimitKind.MONTH_MICROS, 10**14), 1200),
)
PRICE: Final = Price(1_000_000, 500_000, 2_000_000)
USED: Final = Usage(300, 150, 100)
# About the reply of a reservation.
NOTHING: Final = "return {'ok', 0, {-1, -1, -1}, {}}"
Command = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CallRate:
    """Requests per second, and the p99 of one request's calls in milliseconds."""

    per_s: float
    p99_ms: float


async def redis_calls(port: int) -> dict[str, list[float]]:
    """Return ``vs_bare_redis``; a line of absolute figures per round is printed."""
    numbers = itertools.count()
    limiter = RedisLimiter(f"redis://127.0.0.1:{port}", SystemClock())
    client = redis.asyncio.Redis(port=port, max_connections=CALLERS)
    try:
        calls = await captured_calls(port)
        sha = await client.script_load(NOTHING)
        evalsha: Any = client.execute_command

        async def ours() -> None:
            await one_request(limiter, f"request-{next(numbers):012d}")

        async def bare() -> None:
            for command in calls:
                await evalsha("EVALSHA", sha, *command[2:])

        ratios: list[float] = []
        for side in (bare, ours):
            await call_rate(side, seconds=1.0)
        for number in range(ROUNDS):
            found = {side.__name__: await call_rate(side, seconds=ROUND_S) for side in (bare, ours)}
            ratios.append(found["ours"].per_s / found["bare"].per_s)
            print(f"redis, round {number + 1} of {ROUNDS}: {found}, ratio {ratios[-1]:.2f}", flush=True)
    finally:
        await limiter.close()
        await client.aclose()
    return {"vs_bare_redis": ratios}


async def one_request(limiter: RedisLimiter, request_id: str) -> None:
    """Admit, reserve and settle one request: three calls."""
    held = await limiter.admit(TENANT, request_id, ADMITTED)
    held = await limiter.reserve(held, RESERVED, PRICE)
    await limiter.settle(held, USED)


async def call_rate(request: Callable[[], Awaitable[None]], *, seconds: float) -> CallRate:
    """Return the rate of ``CALLERS`` that each run one request after another."""
    taken_s: list[float] = []
    began_s = time.perf_counter()

    async def one() -> None:
        while (sent_s := time.perf_counter()) < began_s + seconds:
            await request()
            taken_s.append(time.perf_counter() - sent_s)

    await asyncio.gather(*(one() for _ in range(CALLERS)))
    return CallRate(
        round(len(taken_s) / (time.perf_counter() - began_s)), round(quantile(taken_s, 0.99) * 1000, 2)
    )


async def captured_calls(port: int) -> tuple[Command, ...]:
    """Return the script calls of one request, as they leave the limiter in the middle of a run."""
    sent: list[Command] = []
    pumps: list[asyncio.Task[None]] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", port)
        pumps.append(asyncio.ensure_future(_copy(from_redis, writer)))
        parser = hiredis.Reader()
        while data := await reader.read(65536):
            parser.feed(data)
            while command := parser.gets():
                sent.append(tuple(command))
            to_redis.write(data)
        to_redis.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    relayed = RedisLimiter(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", SystemClock())
    for number in range(3):  # a settlement confirms the one before it
        await one_request(relayed, f"captured-{number:011d}")
    await relayed.close()
    server.close()
    await asyncio.gather(*pumps)
    return tuple(command for command in sent if command[0] == b"EVALSHA")[-3:]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
