"""A worker is lost with a hundred rows of one request in flight: each runs once more, and is charged once.

The gateway, its row runner, the scheduler, the streams and the batchers with their models are production
code. The models run in this process; that of the worker which is killed never answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fairway.v1 import inference_pb2 as pb
from services.core.fixed_cost.rows import RowSpec
from services.core.fleet import ReportSnapshot
from services.runtime.supervisor import Supervisor
from services.worker.batcher.charges import RowCharges
from services.worker.batcher.driver import Batcher, BatcherContext
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Padded
from services.worker.batcher.policy.isolation import RunPlace
from services.worker.batcher.process import BatchRunner
from services.worker.engine_protocol import BatchRaised, BatchRan, Command, RowCosts, RowModel, RunBatch
from services.worker.step_recorder import StepRecorder
from services.worker.streams.charges import DeviceKind, DeviceTime
from services.worker.streams.outbox import Outbox
from tests.integration.leased_rows import RowNode, RowRig, row_rig
from tests.support.kept_usage import KeptUsage
from tests.support.row_versions import WORDS, embedding_version, tokenizer
from tests.support.rows_gateway import digest_of, rows_gateway
from tests.support.waiting import until
from tests.unit.worker.batcher.scripted import KeptSacrifice, ScriptedProcess

DIGEST = digest_of("embed")
COSTS = RowCosts(batch_s=1e-3, row_s=1e-4, token_s=1e-6, row_bytes=1, token_bytes=1)
TEXTS = [f"{WORDS[4 + row % 8]} {WORDS[4 + row // 8 % 8]} {'fox ' * (row // 64)}" for row in range(100)]


class ModelHere(ScriptedProcess):
    """Runs the batches that it is sent in this process, unless it ``hangs``."""

    def __init__(self, runner: BatchRunner, batcher: Batcher) -> None:
        super().__init__()
        self.hangs = False
        self._runner = runner
        self._batcher = batcher

    def send(self, command: Command) -> bool:
        assert isinstance(command, RunBatch)
        if not self.hangs:
            self._runner.apply(command)
            asyncio.get_running_loop().call_soon(self._step)
        return super().send(command)

    def _step(self) -> None:
        event = self._runner.step()
        assert isinstance(event, BatchRan | BatchRaised)
        self._batcher.on_batch(RunPlace.SERVING, event)


class CountedBatcher(Batcher):
    """Counts how often each row started here."""

    def __init__(self, model: RowModel, context: BatcherContext) -> None:
        super().__init__(DIGEST, model, memory_bytes=0, context=context)
        self.started: Counter[int] = Counter()

    def start(self, outbox: Outbox, handle: int, spec: RowSpec) -> None:
        self.started[spec.row] += 1
        super().start(outbox, handle, spec)


class BatcherNode(RowNode):
    """A worker with a batcher of the embedding model."""

    def __init__(self, worker_id: str, supervisor: Supervisor, folder: Path) -> None:
        super().__init__(worker_id, supervisor)
        model, self.usage = load_model(folder), KeptUsage()
        facts = model.facts
        self.device = DeviceTime(DeviceKind(worker_id), self.usage, self.clock)
        context = BatcherContext(
            clock=self.clock,
            call_later=asyncio.get_running_loop().call_later,
            changed=lambda: self.host.changed(),
            draining=lambda: False,
            charges=RowCharges(DIGEST, "embed", self.host.tally, self.device),
            recorder=StepRecorder(self.clock).engine(DIGEST, "embed", rows=True),
            sacrifice=KeptSacrifice(),
        )
        rows = RowModel(facts.operation, facts.dtype, facts.inputs, facts.max_tokens, True, COSTS)
        self.batcher = CountedBatcher(rows, context)
        self.process = ModelHere(BatchRunner(model, packs=True), self.batcher)
        self.batcher.attach(RunPlace.SERVING, self.process)
        self.host.add_rows(self.batcher)

    def _snapshot(self, _whole: bool) -> ReportSnapshot:
        tenants = self.host.tally.take(100)
        pools = (self.batcher.report(ready=True),)
        epoch = self.host.grants.epoch
        return ReportSnapshot(self.worker_id, 100, self.address, pools=pools, epoch=epoch, tenants=tenants)


async def added(rig: RowRig, folder: Path, *, hangs: bool = False) -> BatcherNode:
    node = BatcherNode(f"w{len(rig.workers)}", rig.supervisor, folder)
    node.process.hangs = hangs
    rig.workers.append(node)
    await node.start(rig.directory)
    return node


async def test_a_hundred_rows_of_a_lost_worker_run_once_more_and_are_charged_once(tmp_path: Path) -> None:
    folder = embedding_version(tmp_path / "embed")
    async with row_rig() as rig:
        first = await added(rig, folder, hangs=True)
        runner = rig.add_gateway().runner
        async with rows_gateway({"embed": folder}, runner=runner) as gateway:
            request = pb.EmbedRequest(model="embed", inputs=TEXTS)
            running = asyncio.create_task(
                gateway.rows.embed(gateway.principal, request, received=gateway.received())
            )
            await until(lambda: len(first.batcher) == 100)
            assert first.batcher.running
            second = await added(rig, folder)
            await first.stop()
            rig.workers.remove(first)
            async with asyncio.timeout(20.0):
                found = await running
        ids = [np.array(tokenizer().encode(text).ids, np.int64) for text in TEXTS]
        model = load_model(folder)
        for vector, each in zip(found.vectors, ids, strict=True):
            own = model.run(Padded([{"input_ids": each}], len(each)))[0]["embedding"]
            np.testing.assert_allclose(vector, own, atol=1e-5)
        once = Counter(range(100))
        assert (first.batcher.started, second.batcher.started) == (once, once)
        tokens = sum(map(len, ids))
        (request_usage,) = gateway.reported
        assert request_usage.usage.prompt_tokens == tokens
        assert first.usage.sequences == []
        (device_use,) = second.usage.sequences
        assert (device_use.request_id, device_use.usage.prompt_tokens) == (request_usage.request_id, tokens)
        assert device_use.device_s == pytest.approx(second.device.busy_s)
        assert request_usage.usage.device_s == pytest.approx(device_use.device_s, abs=100 * 1e-6)
        assert not len(second.batcher)
