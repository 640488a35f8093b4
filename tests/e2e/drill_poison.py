"""`make drill-poison`: one row in 100 that ends its batch. Exits 0 when only it failed, within the bounds.

Each run is a worker agent with a real process of a fixed-cost model. 100 rows arrive at once, one of which
raises, ends the process by a signal, allocates without end, or hangs. The others must equal the direct
computation; the poison must end with POISONED_INPUT. The place of the poison is the one at which the search
takes longest: every run of the search contains it.

The last line is ``RESULT {json}``, each figure that of the worst kind: ``correct`` of 99, ``extra_runs`` of
the search, processes lost that served and that were sacrificed, seconds until the last answer of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from services.core.errors import PoisonedInput
from services.runtime.clock import SystemClock
from services.runtime.telemetry.metrics import Metrics
from services.worker.telemetry import WorkerTelemetry
from tests.integration.worker.row_worker import RowReader, RowWorker, raw
from tests.support.poisoned_batcher import POISON, RowFault
from tests.support.stack import ROOT
from tests.unit.worker.batcher.models.test_loading import save_mlp

ROWS: Final = 100
PLACE: Final = 1  # the first row starts a batch of its own: the device is idle
MOST_EXTRA_RUNS: Final = 14
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
    problems: tuple[str, ...]


async def poison_among_rows(folder: Path, fault: RowFault) -> PoisonRun:
    net, metrics = save_mlp(folder), Metrics()
    telemetry = WorkerTelemetry(metrics, clock=SystemClock())
    worker = await RowWorker.started(folder, telemetry=telemetry)
    try:
        values = [index / 10 for index in range(ROWS)]
        rows = [np.full(6, value, np.float32) for value in values]
        rows[PLACE][0] = POISON + fault
        began_s = asyncio.get_running_loop().time()
        found = await worker.run([raw({"input": row}) for row in rows], TIMEOUT_S)
        await worker.ready()
        last_s = max(reader.at_s for place, reader in enumerate(found) if place != PLACE) - began_s
        with torch.inference_mode():
            expected = net(torch.tensor(np.stack(rows))).numpy()
        right = [place != PLACE and is_right(reader, expected[place]) for place, reader in enumerate(found)]
        extra = round(sum(_values(metrics.registry, "fairway_worker_isolation_runs_total")))
        lost = round(sum(_values(metrics.registry, "fairway_worker_sacrificed_processes_total")))
        poison, restarts, problems = found[PLACE], worker.restarts, []
        if not isinstance(poison.answer.error, PoisonedInput):
            problems.append(f"the poison ended with {poison.answer}")
        if sum(right) != ROWS - 1:
            problems.append(f"{ROWS - 1 - sum(right)} neighbours without a right answer")
        if restarts > 1 or extra > MOST_EXTRA_RUNS:
            problems.append(f"{restarts} serving processes lost, {extra} extra runs")
        return PoisonRun(sum(right), extra, restarts, lost, last_s, tuple(problems))
    finally:
        await worker.close()


def is_right(reader: RowReader, expected: np.ndarray) -> bool:
    end = reader.end
    if end is None or end.error is not None or end.lost:
        return False
    return bool(np.allclose(reader.outputs["output"], expected, atol=1e-5))


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
            f"last answer after {run.last_answer_s:.1f} s",
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
    }
    print("RESULT", json.dumps(result))
    return 1 if any(run.problems for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
