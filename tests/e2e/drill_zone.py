"""`make drill-zone`: one of two zones is cut off under load. Exits 0 when no request failed.

Four workers in the zones a and b serve a deployment of two to four replicas; the engine is the null executor
of ``drill_elastic``, so that a replica has a known capacity. Interactive requests arrive at three quarters of
the capacity of two replicas, and batch requests fill what is left. Then every process of zone a is frozen,
as a network does that is cut: its streams move, and its replicas are made good by what is left of zone b.
After a while zone a returns.

Prints second by second what serves and what the first class sees; ``breach_s`` are the seconds in which an
interactive request waited longer than its target for its first token. The last line is ``RESULT {json}``.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import psutil

from bench.overhead import quantile
from fairway.client import AdminClient
from fairway.v1 import common_pb2, inference_pb2_grpc, worker_pb2
from fairway.v1 import controlplane_pb2 as cp
from tests.e2e.drill_elastic import NAME, SETTINGS, deploy, streamed
from tests.support.stack import Stack
from tests.support.updating import admin_of

WORKERS: Final = 4
ZONES: Final = {f"worker-{number}": "ab"[number % 2] for number in range(WORKERS)}
INTERACTIVE_PER_S: Final = 3.0
BATCH_PER_S: Final = 1.0
TARGET_S: Final = 2.0
BEFORE_S, CUT_S, AFTER_S = 45.0, 40.0, 15.0


@dataclass(slots=True)
class ZoneDrill:
    """What the clients and the operator observed; times are since the cut."""

    stack: Stack
    admin: AdminClient
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    cut_s: float = 0.0
    served: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    ttft_s: list[tuple[float, float]] = field(default_factory=list)  # (sent, waited) of interactive requests
    ready: dict[int, Counter[str]] = field(default_factory=dict)  # READY replicas by second and zone

    async def stream(self, priority: common_pb2.Priority.ValueType) -> None:
        began_s, name = time.monotonic(), common_pb2.Priority.Name(priority)
        first_s, _, failure = await streamed(self.stack, self.stub, priority)
        if failure:
            self.failures.append(f"{name}: {failure}")
            return
        self.served[name] += 1
        if priority == common_pb2.PRIORITY_INTERACTIVE:
            self.ttft_s.append((began_s, first_s - began_s))

    async def arrive(self, priority: common_pb2.Priority.ValueType, per_s: float, until_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < until_s:
                group.create_task(self.stream(priority))
                await asyncio.sleep(1.0 / per_s)

    async def watch(self) -> None:
        while True:
            status = (await self.admin.deployments.get(NAME)).status
            ready = [one for one in status.replicas if one.state == worker_pb2.VERSION_STATE_READY]
            second = int(time.monotonic() - self.cut_s) if self.cut_s else -1
            self.ready[second] = Counter(ZONES[one.worker_id] for one in ready)
            await asyncio.sleep(0.5)

    def breach_s(self, from_s: float, until_s: float) -> int:
        """Return in how many seconds a request was sent whose first token was later than the target."""
        late = {int(sent_s) for sent_s, waited_s in self.ttft_s if waited_s > TARGET_S}
        return len([second for second in late if from_s <= second < until_s])

    def table(self) -> Iterator[str]:
        yield f"{'s':>4} {'a':>3} {'b':>3} {'sent':>5} {'worst ttft s':>13}"
        zones = self.ready[-1]
        for second in range(-2, int(CUT_S + AFTER_S)):
            sent = [waited for at_s, waited in self.ttft_s if int(at_s - self.cut_s) == second]
            zones = self.ready.get(second, zones)
            worst_s = max(sent, default=0.0)
            yield f"{second:>4} {zones['a']:>3} {zones['b']:>3} {len(sent):>5} {worst_s:>13.2f}"


@contextmanager
def cut_off(stack: Stack, zone: str) -> Iterator[None]:
    """Freeze every process of a zone's workers, and let them go on."""
    frozen: list[psutil.Process] = []
    for name in (name for name, of in ZONES.items() if of == zone):
        worker = psutil.Process(stack.worker_pid(name))
        frozen += [worker, *worker.children(recursive=True)]
    for process in frozen:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in frozen:
            os.kill(process.pid, signal.SIGCONT)


async def run(stack: Stack) -> ZoneDrill:
    async with admin_of(stack) as admin, grpc.aio.insecure_channel(stack.endpoints["grpc"]) as channel:
        await deploy(stack, admin, cp.Scaling(min_replicas=2, max_replicas=WORKERS))
        drill = ZoneDrill(stack, admin, inference_pb2_grpc.InferenceServiceStub(channel))
        watching = asyncio.create_task(drill.watch())
        while len(drill.ready.get(-1, Counter())) < 2:
            await asyncio.sleep(0.2)
        ends_s = time.monotonic() + BEFORE_S + CUT_S + AFTER_S
        async with asyncio.TaskGroup() as group:
            group.create_task(drill.arrive(common_pb2.PRIORITY_INTERACTIVE, INTERACTIVE_PER_S, ends_s))
            group.create_task(drill.arrive(common_pb2.PRIORITY_BATCH, BATCH_PER_S, ends_s))
            await asyncio.sleep(BEFORE_S)
            (decided,) = await admin.scaling.list(NAME)
            for reason in decided.reasons:
                print(f"  {reason.signal}: {reason.replicas}: {reason.text}", flush=True)
            drill.cut_s = time.monotonic()
            with cut_off(stack, "a"):
                await asyncio.sleep(CUT_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return drill


def main() -> int:
    zones = itertools.chain.from_iterable(
        ("--set", f"{name}:FAIRWAY_ZONE={zone}") for name, zone in ZONES.items()
    )
    with (
        tempfile.TemporaryDirectory(prefix="fairway-zone-") as folder,
        Stack.started(
            Path(folder) / "state", workers=WORKERS, replicas=1, settings=SETTINGS, options=(*zones,)
        ) as stack,
    ):
        drill = asyncio.run(run(stack))
    print("\n".join(drill.table()))
    for failure in sorted(set(drill.failures)):
        print(f"  {drill.failures.count(failure)}: {failure}", flush=True)
    before = drill.ready[-1]
    settled = [waited for at_s, waited in drill.ttft_s if drill.cut_s + 20.0 < at_s < drill.cut_s + CUT_S]
    result = {
        "failed": len(drill.failures),
        "served": sum(drill.served.values()),
        "replicas_before": before.total(),
        "left_when_cut": before.total() - before["a"],
        "breach_s": drill.breach_s(drill.cut_s - TARGET_S, drill.cut_s + CUT_S),
        "ttft_p95_s_without_zone": round(quantile(settled, 0.95), 2),
    }
    print("RESULT", json.dumps(result))
    return 0 if not drill.failures and result["left_when_cut"] >= 2 and result["breach_s"] <= 30 else 1


if __name__ == "__main__":
    sys.exit(main())
