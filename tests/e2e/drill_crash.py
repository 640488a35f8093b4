"""`make drill-crash`: a prompt that ends its engine, among 32 neighbours. Exits 0 when only it failed.

Each run is an installation with the bundled model and two gateways. 32 streams run; a poison joins them. The
neighbours must complete with the tokens of an undisturbed run and the usage of one run; the poison must end
with POISONED_INPUT, and again at each gateway at once. Engines end by an exception and by a signal on one,
two and three workers, and by a kill (as by the memory killer) and a hang on two.

``engine_restarts`` is the largest of the runs. The last line is ``RESULT {json}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc

from fairway.v1 import inference_pb2 as pb
from fairway.v1 import inference_pb2_grpc
from tests.support.poisoned_engine import Fault, poison_ids
from tests.support.stack import ROOT, Stack, at_rest, metadata

NEIGHBOURS: Final = 32
TOKENS: Final = 160
JOINS_AFTER: Final = 20  # tokens of the first neighbour
AT_ONCE_S: Final = 0.5
MAX_RESTARTS: Final = 6
TIMEOUT_S: Final = 300.0
REST_S: Final = 90.0
RUNS: Final = (
    *((workers, fault) for workers in (1, 2, 3) for fault in (Fault.RAISES, Fault.SEGFAULTS)),
    (2, Fault.KILLED),
    (2, Fault.HANGS),
)
SETTINGS: Final = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support/engine_faults")]),
    "FAIRWAY_ENGINE_THREADS": "1",
    "FAIRWAY_KV_MEMORY_BYTES": str(128 * 1024**2),
    "FAIRWAY_SHEDDING": "false",
    "FAIRWAY_QUEUE_TTL_S": "60",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a stream ended: its output, or the reason of its error."""

    ids: tuple[int, ...]
    usage: tuple[int, int]  # prompt and output tokens that were charged
    reason: str
    took_s: float
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What one run showed. ``problems`` is empty if nothing is wrong."""

    complete: int
    restarts: int
    second_refused: bool
    second_s: float
    problems: tuple[str, ...]


def prompt_of(number: int) -> list[int]:
    return [100 + (number * 37 + place * 11) % 3000 for place in range(24)]


class Clients:
    """Streams to one gateway after another. ``begun`` is set once the first neighbour has some tokens."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.gateways: tuple[str, ...] = tuple(stack.endpoints["gateways"])
        self.begun = asyncio.Event()

    async def stream(self, prompt: Sequence[int], *, gateway: int = 0) -> Ended:
        began_s, ids = time.monotonic(), list[int]()
        generation = pb.Generation(
            model=self._stack.model, token_ids=pb.TokenIds(ids=prompt), max_output_tokens=TOKENS,
            ignore_eos=True,
        )  # fmt: skip
        generation.sampling.temperature = 0.0
        address = self.gateways[gateway % len(self.gateways)]
        usage, reason, resumes = (0, 0), "", 0
        async with grpc.aio.insecure_channel(address) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(generation=generation),
                metadata=metadata(self._stack.api_key),
                timeout=TIMEOUT_S,
            )
            try:
                async for event in call:
                    ids += event.chunk.ids
                    if len(ids) >= JOINS_AFTER:
                        self.begun.set()
                    if event.HasField("finished"):
                        found = event.finished
                        usage = found.usage.prompt_tokens, found.usage.output_tokens
                        resumes = found.resumes
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
        return Ended(tuple(ids), usage, reason, time.monotonic() - began_s, resumes)

    async def neighbours(self) -> list[Ended]:
        return await asyncio.gather(
            *(self.stream(prompt_of(number), gateway=number) for number in range(NEIGHBOURS))
        )


async def restarts_of(stack: Stack) -> int:
    workers = await stack.workers()
    return sum(version.engine_restarts for one in workers.values() for version in one.versions)


async def poison_among(stack: Stack, fault: Fault) -> Found:
    """Run the neighbours undisturbed, then with the poison, and return what happened."""
    poison = [*poison_ids(fault, 1), *prompt_of(7)]
    clients = Clients(stack)
    undisturbed = await clients.neighbours()
    clients.begun.clear()
    running = asyncio.create_task(clients.neighbours())
    await clients.begun.wait()
    first = await clients.stream(poison)
    neighbours = await running
    # A hung engine is killed long after its sequences have left it.
    await stack.wait_workers(lambda state: at_rest(state, len(state)), REST_S)
    restarts = await restarts_of(stack)
    seconds = [await clients.stream(poison, gateway=gateway) for gateway in range(len(clients.gateways))]
    problems = [f"undisturbed: {one.reason}" for one in undisturbed if one.reason]
    problems += [
        f"neighbour {number}: {after.reason or _difference(before, after)}"
        for number, (before, after) in enumerate(zip(undisturbed, neighbours, strict=True))
        if (before.ids, before.usage) != (after.ids, after.usage)
    ]
    if not is_poisoned(first):
        problems.append(f"the poison ended with {first.reason or 'success'}")
    second_s = max(one.took_s for one in seconds)
    refused = all(map(is_poisoned, seconds)) and second_s <= AT_ONCE_S
    if not refused:
        problems.append(f"second arrival: {[(one.reason, round(one.took_s, 3)) for one in seconds]}")
    if (after := await restarts_of(stack)) != restarts:
        problems.append(f"the second arrival ended {after - restarts} engines")
    if not 1 <= restarts <= MAX_RESTARTS:
        problems.append(f"{restarts} engine restarts")
    complete = sum(before.ids == after.ids for before, after in zip(undisturbed, neighbours, strict=True))
    return Found(complete, restarts, refused, second_s, tuple(problems))


def is_poisoned(ended: Ended) -> bool:
    return ended.reason.startswith("FAILED_PRECONDITION") and "ended the engine" in ended.reason


def _difference(before: Ended, after: Ended) -> str:
    return (
        f"{len(after.ids)} tokens and usage {after.usage}, undisturbed {len(before.ids)} and {before.usage}"
    )


def run(workers: int, fault: Fault, folder: Path) -> Found:
    began_s = time.monotonic()
    with Stack.started(
        folder / "state", workers=workers, replicas=workers, gateways=2, settings=SETTINGS
    ) as stack:
        up_s = time.monotonic() - began_s
        found = asyncio.run(poison_among(stack, fault))
    took_s = time.monotonic() - began_s
    print(
        f"{workers} workers, {fault.name.lower()}: {found.complete} of {NEIGHBOURS} complete, "
        f"{found.restarts} engine restarts, second arrival answered after {1e3 * found.second_s:.0f} ms "
        f"(start {up_s:.0f} s, in all {took_s:.0f} s)",
        flush=True,
    )
    for problem in found.problems:
        print(f"  {problem}", flush=True)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="drill-crash", description=__doc__)
    parser.add_argument("--workers", type=int, help="only the runs with so many workers")
    parser.add_argument("--fault", choices=[fault.name.lower() for fault in Fault], help="only these runs")
    asked = parser.parse_args(arguments)
    rows = []
    for workers, fault in RUNS:
        if asked.workers in (None, workers) and asked.fault in (None, fault.name.lower()):
            with tempfile.TemporaryDirectory(prefix="fairway-crash-") as folder:
                rows.append(run(workers, fault, Path(folder)))
    result = {
        "neighbours_complete_ratio": min(row.complete for row in rows) / NEIGHBOURS,
        "engine_restarts": max(row.restarts for row in rows),
        "second_refused": all(row.second_refused for row in rows),
    }
    print("RESULT", json.dumps(result))
    return 1 if any(row.problems for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
