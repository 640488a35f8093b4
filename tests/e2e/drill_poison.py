"""`make drill-poison`: one row in 100 that ends its batch. Exits 0 when only it failed, within the bounds.

Each run is a gateway and a worker agent with a real process of a fixed-cost model. 100 requests of one row
arrive at once, one of which raises, ends the process by a signal, allocates without end, or hangs. The others
must equal the direct computation; the poison must end with POISONED_INPUT, and be refused at once when it
comes again, to this gateway and to another one, without reaching the worker: each gateway has a quarantine of
its own on a real etcd. The place of the poison is the
one at which the search takes longest: every run of the search contains it.

The last line is ``RESULT {json}``, each figure that of the worst kind: ``correct`` of 99, ``extra_runs`` of
the search, processes lost that served and that were sacrificed, seconds until the last answer of the others,
``refused_s``: of the second arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from fairway.v1 import common_pb2, inference_pb2
from services.adapters.etcd.store import EtcdStore
from services.adapters.quarantine import StoreQuarantine
from services.core.errors import FairwayError, PoisonedInput
from services.core.fixed_cost.rows import RowEnd, RowsRequest
from services.runtime.clock import SystemClock
from services.runtime.telemetry.metrics import Metrics
from services.worker.telemetry import WorkerTelemetry
from tests.conftest import Server
from tests.integration.worker.row_worker import RowWorker
from tests.support.poisoned_batcher import POISON, RowFault
from tests.support.quarantines import store_quarantine
from tests.support.rows_gateway import RowsGateway, digest_of, rows_gateway
from tests.support.stack import ROOT
from tests.support.waiting import until
from tests.unit.worker.batcher.models.test_loading import save_mlp

ROWS: Final = 100
PLACE: Final = 1  # the first row starts a batch of its own: the device is idle
MOST_EXTRA_RUNS: Final = 14
REFUSED_S: Final = 1.0  # a search takes longer, a refusal milliseconds
MODEL: Final = "rows"
TIMEOUT_S: Final = 240.0
KINDS: Final = (RowFault.RAISES, RowFault.SEGFAULTS, RowFault.KILLED, RowFault.ALLOCATES, RowFault.HANGS)


@dataclass(frozen=True, slots=True)
class PoisonRun:
    """What one run showed. ``problems`` is empty if nothing is wrong."""

    correct: int
    extra_runs: int
    serving_lost: int
    sacrificial_lost: int
    last_answer_s: float
    refused_s: float
    problems: tuple[str, ...]


@dataclass
class WorkerRows:
    """Implements ``RowRunner``: one worker computes the rows."""

    worker: RowWorker
    rows: int = 0

    async def run(self, request: RowsRequest) -> tuple[RowEnd, ...]:
        """See ``RowRunner``."""
        self.rows += len(request.rows)
        (inputs,) = request.rows
        while True:
            reader = await self.worker.start(inputs).wait(TIMEOUT_S)
            if reader.refusal is None:
                return (reader.answer,)
            await asyncio.sleep(0.05)  # the process starts again: as a gateway does, start it again


@dataclass(frozen=True, slots=True)
class _Answer:
    outputs: np.ndarray | None
    error: FairwayError | None
    at_s: float


async def infer(gateway: RowsGateway, row: np.ndarray) -> _Answer:
    tensor = common_pb2.Tensor(name="input", datatype="FP32", shape=[1, len(row)], data=row.tobytes())
    request = inference_pb2.InferRequest(model=MODEL, inputs=[tensor])
    loop = asyncio.get_running_loop()
    try:
        found = await gateway.rows.infer(gateway.principal, request, received=gateway.received())
    except FairwayError as error:
        return _Answer(None, error, loop.time())
    return _Answer(np.frombuffer(found.outputs[0].data, np.float32), None, loop.time())


async def refused(gateways: Sequence[RowsGateway], row: np.ndarray) -> tuple[float, list[str]]:
    """Return the longest time in which a gateway refused the poison, and what is wrong."""
    longest_s, problems, loop = 0.0, [], asyncio.get_running_loop()
    for name, gateway in enumerate(gateways):
        began_s = loop.time()
        found = await infer(gateway, row)
        longest_s = max(longest_s, found.at_s - began_s)
        if not isinstance(found.error, PoisonedInput):
            problems.append(f"the second arrival at gateway {name} ended with {found}")
    if longest_s > REFUSED_S:
        problems.append(f"the second arrival was refused after {longest_s:.2f} s")
    return longest_s, problems


@asynccontextmanager
async def quarantines(folder: Path, count: int) -> AsyncIterator[list[StoreQuarantine]]:
    """Yield the quarantines of so many gateways, on an etcd of their own."""
    folder.mkdir()
    server = Server("etcd", folder)
    server.start()
    async with AsyncExitStack() as stack:
        stack.callback(server.kill)
        made = []
        for _ in range(count):
            store = EtcdStore([server.address], SystemClock())
            stack.push_async_callback(store.close)
            made.append(await store_quarantine(store, stack))
        yield made


async def poison_among_rows(folder: Path, fault: RowFault) -> PoisonRun:
    model = folder / "model"
    model.mkdir()
    net, metrics = save_mlp(model), Metrics()
    telemetry = WorkerTelemetry(metrics, clock=SystemClock())
    worker = await RowWorker.started(model, telemetry=telemetry)
    runner = WorkerRows(worker)
    values = [index / 10 for index in range(ROWS)]
    rows = [np.full(6, value, np.float32) for value in values]
    rows[PLACE][0] = POISON + fault
    async with (
        quarantines(folder / "etcd", 2) as (own, others),
        rows_gateway({MODEL: model}, runner=runner, quarantine=own) as first,
        rows_gateway({MODEL: model}, runner=runner, quarantine=others) as other,
    ):
        try:
            began_s = asyncio.get_running_loop().time()
            found = await asyncio.gather(*(infer(first, row) for row in rows))
            await worker.ready()
            computed = runner.rows
            await until(lambda: others.holds(digest_of(MODEL)), timeout_s=REFUSED_S)
            refused_s, problems = await refused((first, other), rows[PLACE])
            if runner.rows != computed:
                problems.append("the second arrival reached the worker")
            restarts = worker.restarts
        finally:
            await worker.close()
    last_s = max(answer.at_s for place, answer in enumerate(found) if place != PLACE) - began_s
    with torch.inference_mode():
        expected = net(torch.tensor(np.stack(rows))).numpy()
    right = [place != PLACE and is_right(each, expected[place]) for place, each in enumerate(found)]
    extra = round(sum(_values(metrics.registry, "fairway_worker_isolation_runs_total")))
    lost = round(sum(_values(metrics.registry, "fairway_worker_sacrificed_processes_total")))
    if not isinstance(found[PLACE].error, PoisonedInput):
        problems.append(f"the poison ended with {found[PLACE]}")
    if sum(right) != ROWS - 1:
        problems.append(f"{ROWS - 1 - sum(right)} neighbours without a right answer")
    if restarts > 1 or extra > MOST_EXTRA_RUNS:
        problems.append(f"{restarts} serving processes lost, {extra} extra runs")
    return PoisonRun(sum(right), extra, restarts, lost, last_s, refused_s, tuple(problems))


def is_right(answer: _Answer, expected: np.ndarray) -> bool:
    return answer.outputs is not None and bool(np.allclose(answer.outputs, expected, atol=1e-5))


def _values(registry: CollectorRegistry, name: str) -> list[float]:
    return [sample.value for family in registry.collect() for sample in family.samples if sample.name == name]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="drill-poison", description=__doc__)
    names = [kind.name.lower() for kind in KINDS]
    parser.add_argument("--fault", choices=names, help="only this kind")
    asked = parser.parse_args(arguments)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests/support/engine_faults")])
    runs = []
    for kind in KINDS:
        if asked.fault not in (None, kind.name.lower()):
            continue
        with tempfile.TemporaryDirectory(prefix="fairway-poison-") as folder:
            run = asyncio.run(poison_among_rows(Path(folder), kind))
        runs.append(run)
        print(
            f"{kind.name.lower()}: {run.correct} of {ROWS - 1} correct, {run.extra_runs} extra runs, "
            f"{run.serving_lost} serving and {run.sacrificial_lost} sacrificial processes lost, "
            f"last answer after {run.last_answer_s:.1f} s, second arrival refused in {run.refused_s:.3f} s",
            flush=True,
        )
        for problem in run.problems:
            print(f"  {problem}", flush=True)
    result = {
        "correct": min(run.correct for run in runs),
        "extra_runs": max(run.extra_runs for run in runs),
        "serving_lost": max(run.serving_lost for run in runs),
        "sacrificial_lost": max(run.sacrificial_lost for run in runs),
        "last_answer_s": round(max(run.last_answer_s for run in runs), 1),
        "refused_s": round(max(run.refused_s for run in runs), 3),
    }
    print("RESULT", json.dumps(result))
    return 1 if any(run.problems for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
