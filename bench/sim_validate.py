"""The simulator against a live installation: the same small workload on both, and how far they are apart.

``make sim-validate``. The installation has two workers with the null executor, whose step takes a set time.
While it is idle, the time of a step and of a request's way are measured, and the simulator is calibrated by
them; then both get the same load, at about three quarters of what the workers hold, so that requests wait.
The last line is ``RESULT {json}``: both sides' TTFT and ITL in seconds and the relative errors.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import grpc
import uvloop

from bench.results import print_result
from bench.stack import NullStack
from fairway.v1 import inference_pb2, inference_pb2_grpc
from simulator.fleet.clients.client import RequestRecord, SimRequest
from simulator.lab.report.measure import RecordCollector, Slo
from simulator.lab.validate import (
    MAX_SEQUENCES,
    STEP_S,
    WORKERS,
    Latencies,
    busy_load,
    calibrated,
    idle_load,
    relative_errors,
)

WORD = "a "


class Live:
    """A client of the installation that keeps what a simulated client would."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, stack: NullStack) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {stack.api_key}"),)
        self._model = stack.model

    async def run(self, load: Sequence[SimRequest]) -> list[RequestRecord]:
        """Send each request at its arrival; return what came of them once all have ended."""
        began_s = time.perf_counter()
        tasks = []
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(load):
                await asyncio.sleep(max(0.0, began_s + request.arrival_s - time.perf_counter()))
                tasks.append(group.create_task(self._one(number, request)))
        return [task.result() for task in tasks]

    async def _one(self, number: int, request: SimRequest) -> RequestRecord:
        record = RequestRecord(number, request, time.perf_counter())
        message = inference_pb2.GenerateRequest(
            generation=inference_pb2.Generation(
                model=self._model,
                prompt=f"{number} " + WORD * request.prompt_tokens,
                max_output_tokens=request.output_tokens,
                ignore_eos=True,
            )
        )
        async for event in self._stub.Generate(message, metadata=self._metadata):
            if event.HasField("chunk") and event.chunk.ids:
                _note(record, len(event.chunk.ids), time.perf_counter())
        record.ended_s = time.perf_counter()
        record.outcome = "finished"
        return record


def _note(record: RequestRecord, tokens: int, now_s: float) -> None:
    if record.first_token_s:
        record.gap_s.append(now_s - record.last_token_s)
        record.gap_tokens.append(tokens)
    else:
        record.first_token_s = now_s
    record.last_token_s = now_s
    record.output_tokens += tokens


def latencies(records: Sequence[RequestRecord]) -> Latencies:
    """Return what clients saw, counted as the simulator counts it."""
    collector = RecordCollector(Slo())
    collector.origin_s = min(record.sent_s for record in records)
    for record in records:
        collector.take(record)
    (group,) = collector.groups.values()
    return Latencies.of(group)


async def measure(stack: NullStack, seed: int) -> tuple[Latencies, float, Latencies]:
    """Return what idle requests saw, the time of a step, and what the load saw."""
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        live = Live(inference_pb2_grpc.InferenceServiceStub(channel), stack)
        await live.run(idle_load()[:8])
        idle = await live.run(idle_load())
        gaps = [
            gap_s / tokens for each in idle for gap_s, tokens in zip(each.gap_s, each.gap_tokens, strict=True)
        ]
        return latencies(idle), statistics.mean(gaps), latencies(await live.run(busy_load(seed)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory(prefix="fairway-validate-") as name:
        folder = Path(name)
        settings = (f"worker:FAIRWAY_MAX_SEQUENCES={MAX_SEQUENCES}",)
        with NullStack.started(folder, step_s=STEP_S, workers=WORKERS, settings=settings) as stack:
            idle, step_s, live = uvloop.run(measure(stack, seed))
        model = calibrated(step_s, idle.ttft_p50_s, folder)
        simulated = model.latencies(busy_load(seed))
    print(f"calibrated: a step {step_s * 1000:.2f} ms, one way {model.spec.link.base_s * 1e6:.0f} us")
    for side, found in (("idle", idle), ("live", live), ("simulated", simulated)):
        print(
            f"{side:>10}: "
            + ", ".join(f"{key} {value * 1000:.1f} ms" for key, value in asdict(found).items())
        )
    errors = relative_errors(live, simulated)
    print_result({"live": asdict(live), "simulated": asdict(simulated), "error": errors})


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
