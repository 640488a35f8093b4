"""The process of a fixed-cost model: ``python -P -m services.worker.batcher.process --config JSON``.

It loads the model, measures it, and runs one batch after the other, in the frame of the engine's process:
the same socket, heartbeats and end. Rows are checked before a batch runs; a row with a problem does not run.
An exception of a batch is returned and the process goes on: the agent finds the row that causes it.

Memory: once the model is measured, the process may take ``kv_memory_bytes`` for a batch, and ``SLACK_BYTES``.
On a CPU an allocation beyond fails, so that a batch without bounds raises, and ends neither this process nor
others of the machine.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from services.core.fixed_cost.rows import RawTensor
from services.worker.batcher.measure import MeasuredModel, measure
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.model import FixedCostModel, ModelFacts, Outputs
from services.worker.batcher.models.rows import DTYPES, Packed, Padded, Row
from services.worker.engine import process
from services.worker.engine.load.loading import Report
from services.worker.engine.load.memory_meter import meter_for
from services.worker.engine.unsupported import TooLittleMemory
from services.worker.engine_protocol import (
    BatchRaised,
    BatchRan,
    Command,
    EngineConfig,
    EngineHeartbeat,
    Ready,
    Resized,
    RowModel,
    RunBatch,
    StepLink,
)

SLACK_BYTES: Final = 256 * 1024 * 1024
_STATUS: Final = Path("/proc/self/status")
_DATATYPES: Final = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

log = structlog.get_logger()


class BatchRunner:
    """Implements ``process.StepLoop``: a step is a batch."""

    def __init__(self, model: FixedCostModel, *, packs: bool) -> None:
        self._model = model
        self._packs = packs
        self._batches: deque[RunBatch] = deque()
        self._ran = 0
        self._link: StepLink | None = None
        self._pauses = 0.0  # seconds that the running batch paused
        self._paused = False

    def connect(self, link: StepLink) -> None:
        self._link = link

    @property
    def has_work(self) -> bool:
        return bool(self._batches)

    def apply(self, command: Command) -> None:
        assert isinstance(command, RunBatch), "it has no sequences"
        self._batches.append(command)

    def step(self) -> BatchRan | BatchRaised:
        """Run the oldest batch, and between its layers those that arrive meanwhile."""
        return self._run_batch(self._batches.popleft())

    def _run_batch(self, batch: RunBatch) -> BatchRan | BatchRaised:
        self._ran += 1
        rows, problems = self._checked(batch.rows)
        self._pauses, began_s = 0.0, time.perf_counter()
        try:
            outputs = self._run(rows, batch.width) if rows else []
        except process.AgentGone:
            raise
        except Exception as error:  # the agent isolates the row that causes it
            log.exception("batch.failed", number=batch.number, rows=len(rows))
            run_s = time.perf_counter() - began_s - self._pauses
            return BatchRaised(batch.number, run_s, type(error).__name__)
        run_s = time.perf_counter() - began_s - self._pauses
        found = iter(outputs)
        all_rows = [() if place in problems else _raw(next(found)) for place in range(len(batch.rows))]
        return BatchRan(batch.number, run_s, all_rows, problems)

    def heartbeat(self) -> EngineHeartbeat:
        return EngineHeartbeat(self._ran, 0, 0, len(self._batches))

    def resized(self) -> Resized | None:
        return None

    def check_integrity(self) -> None:
        """It keeps nothing between batches."""

    def _pause(self) -> None:
        """Run and answer the batches that have arrived. They have no pauses of their own."""
        if self._link is None or self._paused:
            return
        self._link.receive()
        if not self._batches:
            return
        self._paused, pauses, began_s = True, self._pauses, time.perf_counter()
        try:
            while self._batches:
                self._link.send(self._run_batch(self._batches.popleft()))
        finally:
            self._paused, self._pauses = False, pauses + time.perf_counter() - began_s

    def _checked(self, raw: Sequence[Sequence[RawTensor]]) -> tuple[list[Row], dict[int, str]]:
        rows: list[Row] = []
        problems: dict[int, str] = {}
        for place, tensors in enumerate(raw):
            try:
                row = row_of(tensors)
            except ValueError as error:
                problems[place] = str(error)
                continue
            if problem := self._model.problem(row):
                problems[place] = problem
            else:
                rows.append(row)
        return rows, problems

    def _run(self, rows: Sequence[Row], width: int) -> list[Outputs]:
        if self._packs:
            lengths = {len(row["input_ids"]) for row in rows}
            packed = Padded(rows, max(lengths)) if len(lengths) == 1 else Packed(rows)
            return self._model.run(packed, self._pause)
        return self._model.run(Padded(rows, width), self._pause)


def row_of(tensors: Sequence[RawTensor]) -> Row:
    """Return the arrays of a row, which refer to the received bytes. Raises ValueError with what is wrong."""
    found: dict[str, NDArray[Any]] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise ValueError(f"the input {tensor.name[:80]} is there twice")
        if (dtype := DTYPES.get(tensor.datatype)) is None:
            raise ValueError(f"{tensor.name[:80]} has data type {tensor.datatype[:16]}")
        size = np.dtype(dtype).itemsize * prod(tensor.shape)
        if size != len(tensor.data):
            raise ValueError(f"{tensor.name[:80]} has {len(tensor.data)} bytes, its shape {size}")
        found[tensor.name] = np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
    return found


def _raw(outputs: Outputs) -> tuple[RawTensor, ...]:
    return tuple(
        RawTensor(name, _DATATYPES[values.dtype], values.shape, values.tobytes())
        for name, values in outputs.items()
    )


def load(
    config: EngineConfig,
    report: Report,
    *,
    around: Callable[[FixedCostModel], FixedCostModel] | None = None,
) -> tuple[BatchRunner, Ready]:
    """Return a runner whose model has run. Raises LoadError where a retry would not help.

    ``around`` returns the model that runs, around the loaded one.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    report("weights", 0.0)
    model = _loaded(config, report)
    report("warm_up", 0.0)
    measured = measure(model, partial(meter_for, config.device))
    facts, is_cpu = model.facts, config.device == "cpu"
    least_bytes = measured.largest_row_bytes
    if config.memory_bytes and config.kv_memory_bytes < least_bytes:
        raise TooLittleMemory(
            f"a batch of one row takes {least_bytes} bytes",
            weight_bytes=facts.weight_bytes,
            working_bytes=0,
            kv_bytes=least_bytes,
        )
    if is_cpu and config.memory_bytes:
        bound_memory(config.kv_memory_bytes + SLACK_BYTES)
    packs = facts.accepts_packed and is_cpu  # elsewhere each length would be a kernel
    rows = RowModel(
        facts.operation, facts.dtype, facts.inputs, facts.max_tokens, packs, measured.costs, facts.pauses
    )
    runner = BatchRunner(model if around is None else around(model), packs=packs)
    return runner, _ready(config, measured, rows, facts)


def _loaded(config: EngineConfig, report: Report) -> FixedCostModel:
    if config.executor != "vllm_rows":
        return load_model(Path(config.model_dir), device=config.device, dtype=config.dtype)
    report("import", 0.0)
    from services.worker.engines.vllm.rows import load_rows  # it is there in vLLM's environment alone

    report("import", 1.0)
    return load_rows(config, report)


def _ready(config: EngineConfig, measured: MeasuredModel, rows: RowModel, facts: ModelFacts) -> Ready:
    return Ready(
        kv_blocks_total=1,
        block_size=1,
        max_model_len=1,
        vocab_size=0,
        kv_bytes_per_block=min(config.kv_memory_bytes, measured.largest_batch_bytes),
        weight_bytes=facts.weight_bytes,
        full_step_s=measured.largest_batch_s,
        rows=rows,
        capabilities=frozenset({"exact"}) if facts.exact else frozenset(),
    )


def bound_memory(more_bytes: int) -> None:
    """Let this process take so many bytes more; an allocation beyond fails. No bound without /proc."""
    try:
        found = re.search(r"^VmData:\s*(\d+) kB$", _STATUS.read_text("utf-8"), re.MULTILINE)
    except OSError:
        return
    if found is not None:
        most = int(found[1]) * 1024 + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    sys.exit(process.main(sys.argv[1:], load=load))
