"""2,000 live streams on one gateway: memory per stream, time to first token, and what is left afterwards.

``make bench-streams``. The null executor makes a token per stream and second, so that two cores carry all
streams at once. ``kib_per_stream`` is the growth of the gateway's resident memory over the streams that are
open then. ``ttft_p99_ms`` is of streams opened at 50 a second; up to a second of it is the step. Afterwards
half end by themselves and half are cancelled: then no request may run in the gateway, Redis may hold no slot
and the worker no block. ``kib_left_per_stream`` is what the gateway's memory did not return. The last line is
``RESULT {json}``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import psutil
import uvloop

from bench.admissions.compare import gateway_target
from bench.overhead import Target, quantile
from bench.results import print_result
from bench.stack import NullStack, metric_sum
from fairway.cli.state import StateDir
from fairway.v1 import inference_pb2_grpc
from services.adapters.redis.limiter import RedisLimiter
from services.runtime.clock import SystemClock

STREAMS: Final = 2000
RATE_PER_S: Final = 50.0
STEP_S: Final = 1.0
TOKENS: Final = 90  # the last is opened before the first ends, on a busy machine too
CHANNELS: Final = 40
KV_MEMORY_BYTES: Final = 4 * 1024**3  # room for all streams; the null executor allocates none of it
OPENED_S: Final = 60.0
RESTED_S: Final = 60.0


@dataclass(slots=True)
class StreamFigures:
    """What the streams showed."""

    first_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    finished: int = 0
    open: int = 0


async def stream(target: Target, figures: StreamFigures, *, cancelled: asyncio.Event | None) -> None:
    """Read one stream to its end, or until it is to be cancelled."""
    began_s = time.perf_counter()
    call = target.stub.Generate(target.request(TOKENS), metadata=target.metadata)
    first = True
    try:
        async for event in call:
            if event.HasField("chunk") and first:
                first = False
                figures.first_s.append(time.perf_counter() - began_s)
                figures.open += 1
            if cancelled is not None and cancelled.is_set():
                call.cancel()
                return
            figures.finished += event.HasField("finished")
    except grpc.aio.AioRpcError as error:
        figures.failed.append(f"{error.code().name} {error.details()}")


async def measure(stack: NullStack, state: Path, streams: int) -> dict[str, float]:
    gateway = psutil.Process(gateway_target(stack, state).pids[0])
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(stack.grpc, options) for _ in range(CHANNELS)]
    metadata = (("authorization", f"Bearer {stack.api_key}"),)
    targets = [
        Target("streams", inference_pb2_grpc.InferenceServiceStub(channel), metadata, stack.model)
        for channel in channels
    ]
    warm = StreamFigures()
    await asyncio.gather(*(stream(target, warm, cancelled=None) for target in targets))
    idle_bytes = gateway.memory_info().rss
    figures, cancel = StreamFigures(), asyncio.Event()
    begins_s, tasks = time.perf_counter(), []
    for number in range(streams):
        await asyncio.sleep(max(0.0, begins_s + number / RATE_PER_S - time.perf_counter()))
        call = stream(targets[number % CHANNELS], figures, cancelled=cancel if number % 2 else None)
        tasks.append(asyncio.create_task(call))
    for _ in range(int(OPENED_S / 0.05)):
        if figures.open + len(figures.failed) >= streams:
            break
        await asyncio.sleep(0.05)
    live, open_bytes = figures.open - figures.finished, gateway.memory_info().rss
    cancel.set()
    await asyncio.gather(*tasks)
    slots = await slots_held(state)
    left = await left_behind(state)
    left_bytes = gateway.memory_info().rss
    for channel in channels:
        await channel.close()
    for failure in sorted(set(figures.failed))[:5]:
        print(f"failed: {failure}")
    return {
        "streams": live,
        "kib_per_stream": round((open_bytes - idle_bytes) / 1024 / max(live, 1), 1),
        "ttft_p50_ms": round(quantile(figures.first_s, 0.5) * 1000, 1),
        "ttft_p99_ms": round(quantile(figures.first_s, 0.99) * 1000, 1),
        "failed": len(figures.failed),
        "kib_left_per_stream": round((left_bytes - idle_bytes) / 1024 / max(live, 1), 1),
        "leaked_slots": slots,
        "leaked_requests": left.requests,
        "leaked_blocks": left.blocks,
    }


async def slots_held(state: Path) -> int:
    """Return the tenant's slots once none is held, or after a minute."""
    limiter = RedisLimiter(StateDir.at(state).redis_url, SystemClock(), timeout_s=5.0)
    try:
        held = 0
        for _ in range(int(RESTED_S / 0.5)):
            held = await limiter.concurrency("default")
            if not held:
                break
            await asyncio.sleep(0.5)
        return held
    finally:
        await limiter.close()


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Requests that run in the gateway, and blocks that the worker reserves for sequences."""

    requests: int
    blocks: int


async def left_behind(state: Path) -> LeftBehind:
    """Return what is left once nothing is, or after a minute."""
    left = LeftBehind(0, 0)
    for _ in range(int(RESTED_S)):
        left = await asyncio.to_thread(_left_now, state)
        if left == LeftBehind(0, 0):
            break
        await asyncio.sleep(1.0)
    return left


def _left_now(state: Path) -> LeftBehind:
    requests = metric_sum(state, "gateway", "fairway_gateway_requests_running")
    blocks = metric_sum(state, "worker-0", "fairway_worker_kv_blocks", 'state="reserved"')
    return LeftBehind(int(requests), int(blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=STREAMS)
    options = parser.parse_args()
    worker = {
        "FAIRWAY_MAX_SEQUENCES": options.streams,
        "FAIRWAY_TOKEN_BUDGET": 2 * options.streams + 4096,
        "FAIRWAY_ITL_TARGET_S": 0,  # the steps are slow by intent
        "FAIRWAY_KV_MEMORY_BYTES": KV_MEMORY_BYTES,
    }
    settings = [f"worker-0:{name}={value}" for name, value in worker.items()]
    with (
        tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder,
        NullStack.started(Path(folder), step_s=STEP_S, settings=settings) as stack,
    ):
        figures = uvloop.run(measure(stack, Path(folder) / "state", options.streams))
    print_result(figures)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
