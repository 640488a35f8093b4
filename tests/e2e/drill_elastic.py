"""`make drill-elastic`: replicas follow real load on a live installation. Exits 0 when no request failed.

One deployment goes from zero to one, to three, and back to zero replicas; the installation from one to three
worker processes, which its control plane orders, and back (``--workers 1:3``). The engine is the null
executor with steps of 50 ms for four sequences, so that a replica has a known capacity of two requests per
second on any machine. Four phases:

1. wakes: the first request at zero, and again after each return to zero
2. calm: half a request per second
3. ramp: from 1.5 to 4.5 requests per second, which three replicas serve
4. rest: nothing, until no replica and no ordered worker is left

``wake_over_load``: the median of the wakes over the median time from an assignment until READY; what is above
1 is detection, decision and placement. The last line is ``RESULT {json}``.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration

from bench.overhead import quantile
from fairway.client import AdminClient
from fairway.v1 import common_pb2, inference_pb2_grpc, worker_pb2
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as pb
from tests.support.stack import Stack, metadata
from tests.support.updating import admin_of

NAME: Final = "elastic"
TOKENS: Final = 40
WAKES: Final = 3
CALM: Final = (0.5, 20.0)  # requests per second, seconds
RAMP: Final = ((1.5, 20.0), (2.5, 25.0), (3.5, 25.0), (4.5, 75.0))  # a node arrives between the steps
SETTINGS: Final = {
    "FAIRWAY_NULL_STEP_S": "0.05",
    "FAIRWAY_MAX_SEQUENCES": "4",
    "FAIRWAY_ENGINE_THREADS": "1",
    "FAIRWAY_KV_MEMORY_BYTES": str(24 * 1024**2),
    "FAIRWAY_SCALING_SETTLE_S": "15",
    "FAIRWAY_NODE_IDLE_S": "10",
}


@dataclass(slots=True)
class Drill:
    """What the clients and the operator observed."""

    stack: Stack
    admin: AdminClient
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    served: int = 0
    failures: list[str] = field(default_factory=list)
    broken: int = 0
    ttft_s: list[float] = field(default_factory=list)
    wakes_s: list[float] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)
    most: int = 0  # READY replicas
    most_workers: int = 0

    async def stream(self) -> float:
        """Run one request and return its time to first token."""
        began_s = time.monotonic()
        first_s, count, failure = await streamed(self.stack, self.stub)
        if failure:
            self.failures.append(failure)
        self.served += 1
        self.broken += bool(self.failures and first_s and count != TOKENS)
        self.ttft_s.append(first_s - began_s)
        return first_s - began_s

    async def arrive(self, per_s: float, seconds: float) -> None:
        """Send requests at a steady rate, whether or not earlier ones have ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(round(per_s * seconds)):
                group.create_task(self.stream())
                await asyncio.sleep(1.0 / per_s)

    async def watch(self) -> None:
        """Note how long each replica took from its assignment until READY, and how many there were."""
        began_s, wanted = dict[str, float](), -1
        while True:
            (decided,) = await self.admin.scaling.list(NAME)
            if decided.replicas != wanted:
                wanted, why = decided.replicas, decided.reasons[0].text if decided.reasons else ""
                print(f"  {wanted} replicas: {why}; a replica does {decided.load.rate:.0f}/s", flush=True)
            status = (await self.admin.deployments.get(NAME)).status
            ready = [one for one in status.replicas if one.state == worker_pb2.VERSION_STATE_READY]
            self.most = max(self.most, len(ready))
            self.most_workers = max(self.most_workers, len(await self.admin.nodes.list()))
            for one in status.replicas:
                began_s.setdefault(one.worker_id, time.monotonic())
            for one in ready:
                if began_s[one.worker_id]:
                    self.loads_s.append(time.monotonic() - began_s[one.worker_id])
                began_s[one.worker_id] = 0.0
            present = {one.worker_id for one in status.replicas}
            began_s = {name: at_s for name, at_s in began_s.items() if name in present}
            await asyncio.sleep(0.1)

    async def until(self, what: str, holds: Callable[[cp.Deployment], bool], limit_s: float) -> None:
        """Return once the deployment is so. Raises AssertionError with its explanation."""
        began_s = time.monotonic()
        while not holds(await self.admin.deployments.get(NAME)):
            if time.monotonic() - began_s > limit_s:
                (found,) = await self.admin.scaling.list(NAME)
                raise AssertionError(f"{what} took more than {limit_s:g} s:\n{found}")
            await asyncio.sleep(0.2)
        print(f"{what}: {time.monotonic() - began_s:.1f} s", flush=True)


def is_at_zero(found: cp.Deployment) -> bool:
    return not found.status.wanted_replicas and not found.status.replicas


async def streamed(
    stack: Stack,
    stub: inference_pb2_grpc.InferenceServiceAsyncStub,
    priority: common_pb2.Priority.ValueType = common_pb2.PRIORITY_UNSPECIFIED,
) -> tuple[float, int, str]:
    """Run one request; return when its first token came (0: none did), its tokens, and what failed."""
    generation = pb.Generation(
        model=NAME, prompt="x" * 40, max_output_tokens=TOKENS, ignore_eos=True, priority=priority
    )
    first_s, count, failure = 0.0, 0, ""
    try:
        async for event in stub.Generate(
            pb.GenerateRequest(generation=generation), metadata=metadata(stack.api_key), timeout=120
        ):
            if event.HasField("chunk"):
                first_s = first_s or time.monotonic()
                count += len(event.chunk.ids)
    except grpc.aio.AioRpcError as error:
        failure = f"{error.code().name}: {error.details()}"
    else:
        if count != TOKENS:
            failure = f"{count} of {TOKENS} tokens"
    return first_s, count, failure


async def deploy(stack: Stack, admin: AdminClient, scaling: cp.Scaling) -> None:
    """Replace the installation's deployment by one of the null executor, with bounds."""
    await admin.deployments.delete(stack.model)  # it has the same version, and so the same pool
    while any(node.versions for node in await admin.nodes.list()):
        await asyncio.sleep(0.2)
    await admin.deployments.create(
        cp.Deployment(
            metadata=cp.Metadata(name=NAME),
            model=stack.model,
            version="latest",
            executor="null",
            scaling=scaling,
        )
    )


async def run(stack: Stack) -> Drill:
    async with admin_of(stack) as admin, grpc.aio.insecure_channel(stack.endpoints["grpc"]) as channel:
        await deploy(stack, admin, cp.Scaling(max_replicas=3, idle=Duration(seconds=5)))
        drill = Drill(stack, admin, inference_pb2_grpc.InferenceServiceStub(channel))
        watching = asyncio.create_task(drill.watch())
        for number in range(WAKES):
            await drill.until("to zero", is_at_zero, 60.0)
            drill.wakes_s.append(await drill.stream())
            print(f"wake {number + 1}: {drill.wakes_s[-1]:.1f} s to the first token", flush=True)
        await drill.arrive(*CALM)
        assert drill.most == 1, f"{drill.most} replicas for a quarter of the capacity of one"
        for per_s, seconds in RAMP:
            await drill.arrive(per_s, seconds)
        print(f"{drill.most} replicas at the peak, on {drill.most_workers} workers", flush=True)
        await drill.until("to zero after the peak", is_at_zero, 120.0)
        began_s = time.monotonic()
        while len(await admin.nodes.list()) > 1:
            assert time.monotonic() - began_s < 60.0, "ordered workers are left"
            await asyncio.sleep(0.5)
        print(f"to one worker: {time.monotonic() - began_s:.1f} s", flush=True)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return drill


def main() -> int:
    with (
        tempfile.TemporaryDirectory(prefix="fairway-elastic-") as folder,
        Stack.started(
            Path(folder) / "state", workers=1, replicas=1, settings=SETTINGS, options=("--workers", "1:3")
        ) as stack,
    ):
        drill = asyncio.run(run(stack))
    for failure in sorted(set(drill.failures)):
        print(f"  {drill.failures.count(failure)}: {failure}", flush=True)
    print(f"{drill.served} requests, ttft p95 {quantile(drill.ttft_s, 0.95):.2f} s; loads {drill.loads_s}")
    result = {
        "failed": len(drill.failures),
        "wake_p95_s": round(quantile(drill.wakes_s, 0.95), 2),
        "wake_over_load": round(statistics.median(drill.wakes_s) / statistics.median(drill.loads_s), 2),
        "broken_streams": drill.broken,
        "most_replicas": drill.most,
        "most_workers": drill.most_workers,
    }
    print("RESULT", json.dumps(result))
    return 0 if not drill.failures and drill.most == drill.most_workers == 3 else 1


if __name__ == "__main__":
    sys.exit(main())
