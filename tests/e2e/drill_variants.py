"""`make drill-variants`: 40 versions of the bundled model on two workers, all at zero, under Zipf arrivals.

The workers have room for a part of them. Each request streams a few tokens; one to a version that is not
loaded waits for it. Exits 0 when no request failed and ``thrash_ratio`` is at most 1.5: loads over those of
an oracle with the same room, from which the version leaves whose next request is farthest (Belady). The last
line is ``RESULT {json}``.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration

from bench.overhead import quantile
from fairway.client import AdminClient
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc, worker_pb2
from tests.support.stack import Stack, metadata
from tests.support.updating import CHECKPOINT, admin_of, publish

VERSIONS: Final = 40
ZIPF: Final = 1.2
TOKENS: Final = 4
WORKER_MIB: Final = 512
SETTINGS: Final = {
    "FAIRWAY_ENGINE_THREADS": "1",
    "FAIRWAY_MEMORY_BYTES": str(WORKER_MIB * 2**20),
    "FAIRWAY_KV_MEMORY_BYTES": str(24 * 2**20),
    "FAIRWAY_MAX_SEQUENCES": "4",
    "FAIRWAY_SCALING_SETTLE_S": "15",
}


def name_of(number: int) -> str:
    return f"variant-{number:02}"


def write_variant(folder: Path, number: int) -> Path:
    """Write the bundled checkpoint with other weights, so that it shares no engine."""
    shutil.copytree(CHECKPOINT, folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        last = bytearray(file.read(4))
        last[0] ^= number + 1  # the lowest bits of one value
        file.seek(-4, 2)
        file.write(last)
    return folder


@dataclass(slots=True)
class Drill:
    """What the clients and the operator observed."""

    stack: Stack
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    failures: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)  # a version each time that it became READY on a worker
    most_resident: int = 0

    async def request(self, name: str) -> None:
        generation = pb.Generation(model=name, prompt="x" * 40, max_output_tokens=TOKENS, ignore_eos=True)
        began_s, count = time.monotonic(), 0
        try:
            async for event in self.stub.Generate(
                pb.GenerateRequest(generation=generation), metadata=metadata(self.stack.api_key), timeout=180
            ):
                if event.HasField("chunk"):
                    if not count:
                        self.waits_s.append(time.monotonic() - began_s)
                    count += len(event.chunk.ids)
        except grpc.aio.AioRpcError as error:
            self.failures.append(f"{name}: {error.code().name}: {error.details()}")
        else:
            if count != TOKENS:
                self.failures.append(f"{name}: {count} of {TOKENS} tokens")

    async def watch(self, admin: AdminClient) -> None:
        """Note each load."""
        before: set[tuple[str, str]] = set()
        while True:
            ready = {
                (node.metadata.name, version.deployment)
                for node in await admin.nodes.list()
                for version in node.versions
                if version.state == worker_pb2.VERSION_STATE_READY
            }
            self.loads += [name for _, name in sorted(ready - before)]
            self.most_resident = max(self.most_resident, len(ready))
            before = ready
            await asyncio.sleep(0.2)


def oracle_loads(trace: list[str], room: int) -> int:
    """Return the loads where whoever is used farthest in the future leaves."""
    inside: set[str] = set()
    loads = 0
    for index, name in enumerate(trace):
        if name not in inside:
            loads += 1
            if len(inside) == room:
                inside.remove(max(inside, key=lambda one: _next(trace, index, one)))
            inside.add(name)
    return loads


def _next(trace: list[str], index: int, name: str) -> int:
    return trace.index(name, index) if name in trace[index:] else len(trace)


async def run(stack: Stack, trace: list[str], gap_s: float) -> Drill:
    async with admin_of(stack) as admin, grpc.aio.insecure_channel(stack.endpoints["grpc"]) as channel:
        await admin.deployments.delete(stack.model)
        for number in range(VERSIONS):
            await admin.deployments.create(
                cp.Deployment(
                    metadata=cp.Metadata(name=name_of(number), labels={"owner": f"team-{number % 4}"}),
                    model=name_of(number),
                    version="latest",
                    scaling=cp.Scaling(max_replicas=1, idle=Duration(seconds=3600)),
                )
            )
        drill = Drill(stack, inference_pb2_grpc.InferenceServiceStub(channel))
        watching = asyncio.create_task(drill.watch(admin))
        rng = random.Random(7)
        async with asyncio.TaskGroup() as group:
            for number, name in enumerate(trace):
                group.create_task(drill.request(name))
                if number % 20 == 19:
                    print(f"{number + 1} requests, {len(drill.loads)} loads", flush=True)
                await asyncio.sleep(rng.expovariate(1.0 / gap_s))
        await asyncio.sleep(0.5)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return drill


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--gap-s", type=float, default=2.5)
    given = parser.parse_args()
    rng = random.Random(11)
    weights = list(itertools.accumulate((rank + 1) ** -ZIPF for rank in range(VERSIONS)))
    trace = [name_of(bisect.bisect(weights, rng.random() * weights[-1])) for _ in range(given.requests)]
    with (
        tempfile.TemporaryDirectory(prefix="fairway-variants-") as folder,
        Stack.started(Path(folder) / "state", workers=2, replicas=1, settings=SETTINGS) as stack,
    ):

        def publish_one(number: int) -> None:
            source = write_variant(Path(folder) / name_of(number), number)
            publish(stack, source, name_of(number), "latest")

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(publish_one, range(VERSIONS)))
        drill = asyncio.run(run(stack, trace, given.gap_s))
    for failure in sorted(set(drill.failures)):
        print(f"  {drill.failures.count(failure)}: {failure}", flush=True)
    best = oracle_loads(trace, drill.most_resident)
    result = {
        "failed": len(drill.failures),
        "requests": len(trace),
        "loads": len(drill.loads),
        "oracle_loads": best,
        "thrash_ratio": round(len(drill.loads) / best, 2),
        "most_resident": drill.most_resident,
        "wait_p50_s": round(statistics.median(drill.waits_s), 3),
        "wait_p95_s": round(quantile(drill.waits_s, 0.95), 2),
    }
    print("RESULT", json.dumps(result))
    return 0 if not drill.failures and result["thrash_ratio"] <= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
