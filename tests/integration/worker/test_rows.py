"""Rows over a socket, an agent and a real process of a fixed-cost model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from services.core.errors import DeadlineUnmeetable, InvalidInput, PoisonedInput
from services.core.generation import NotAdmittedReason
from services.core.records import InPlace, VersionState
from services.worker.batcher.models.loading import load_model
from services.worker.batcher.models.rows import Padded
from services.worker.batcher.policy.isolation import RunPlace
from tests.integration.worker.harness import eventually, start_harness
from tests.integration.worker.row_worker import SETTINGS, VERSION, RowWorker, raw
from tests.support.fixed_cost import save, save_pooling, token_row
from tests.support.poisoned_batcher import POISON, RowFault
from tests.unit.worker.batcher.models.test_loading import save_mlp

ROOT = Path(__file__).parents[3]
FAULTS = os.pathsep.join([str(ROOT), str(ROOT / "tests/support/engine_faults")])


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[list[RowWorker]]:
    """Workers that are stopped at the end."""
    started: list[RowWorker] = []
    yield started
    for worker in started:
        worker.batcher.check_integrity()
        await worker.close()


def vector(value: float, size: int = 6) -> Any:
    return raw({"input": np.full(size, value, np.float32)})


def poison(fault: RowFault) -> Any:
    return vector(POISON + fault)


def expected(net: torch.nn.Module, values: list[float]) -> Any:
    with torch.inference_mode():
        return net(torch.tensor([[value] * 6 for value in values])).numpy()


async def test_rows_of_an_mlp_are_batched_and_equal_the_direct_pass(
    tmp_path: Path, workers: list[RowWorker]
) -> None:
    net = save_mlp(tmp_path)
    worker = await RowWorker.started(tmp_path)
    workers.append(worker)
    values = [index / 10 for index in range(200)]
    found = await worker.run([vector(value) for value in values])
    outputs = np.stack([reader.outputs["output"] for reader in found])
    np.testing.assert_allclose(outputs, expected(net, values), atol=1e-5)
    sizes = [reader.answer.batch_rows for reader in found]
    assert max(sizes) > 8, "no batches formed"
    assert max(sizes) <= 100
    assert all(reader.answer.device_s > 0 for reader in found)
    assert {reader.answer.batch_cause for reader in found} <= {"full", "idle", "linger", "deadline"}
    assert len(worker.batcher) == 0
    assert worker.batcher.batches < 200
    uses = list(worker.harness.usage.sequences)
    assert len(uses) == 200
    assert sum(use.device_s for use in uses) == pytest.approx(worker.harness.host.device.busy_s)  # type: ignore[union-attr]
    (pool,) = worker.harness.agent.take_snapshot(True).pools
    assert (pool.row_slots, pool.running, pool.waiting, pool.ready) == (400, 0, 0, True)
    assert pool.row_us > 0


async def test_a_fixed_cost_version_replaces_no_weights_and_loads_no_second_copy(
    tmp_path: Path, workers: list[RowWorker]
) -> None:
    save_mlp(tmp_path)
    worker = await RowWorker.started(tmp_path)
    workers.append(worker)
    next_ = replace(VERSION, version_digest="sha256:" + "e" * 64, in_place=InPlace(1.0, 7))
    await worker.harness.assign(replace(VERSION, served=True), next_)

    def failed() -> list[str]:
        records = [one.record for one in worker.harness.agent.status().versions]
        return [one.reason for one in records if one.state is VersionState.FAILED]

    await eventually(failed)
    assert failed() == ["NOT_REPLACEABLE"]
    assert worker.harness.state() is VersionState.READY


async def test_rows_of_any_length_equal_the_row_alone(tmp_path: Path, workers: list[RowWorker]) -> None:
    save("Bert", "Model", tmp_path)
    save_pooling(tmp_path)
    model = load_model(tmp_path)
    worker = await RowWorker.started(tmp_path)
    workers.append(worker)
    rng = np.random.default_rng(1)
    rows = [dict(token_row(rng, int(length))) for length in rng.integers(1, 41, 80)]
    found = await worker.run([raw(row) for row in rows])
    for row, reader in zip(rows, found, strict=True):
        alone = model.run(Padded([row], 40))[0]["embedding"]
        np.testing.assert_allclose(reader.outputs["embedding"], alone, atol=1e-5)
    assert max(reader.answer.batch_rows for reader in found) > 4
    uses = list(worker.harness.usage.sequences)
    assert sum(use.usage.prompt_tokens for use in uses) == sum(len(row["input_ids"]) for row in rows)


async def test_rows_that_cannot_be_computed_fail_alone(tmp_path: Path, workers: list[RowWorker]) -> None:
    save("Bert", "Model", tmp_path)
    save_pooling(tmp_path)
    worker = await RowWorker.started(tmp_path)
    workers.append(worker)
    good = raw({"input_ids": np.arange(2, 9)})
    long = raw({"input_ids": np.full(41, 3)})
    beyond = raw({"input_ids": np.array([99])})
    other = raw({"input": np.ones(3, np.float32)})
    found = await worker.run([good, long, beyond, other, good])
    assert [type(reader.answer.error) for reader in found] == [
        type(None), InvalidInput, InvalidInput, InvalidInput, type(None),
    ]  # fmt: skip
    assert worker.restarts == 0


async def test_a_fixed_cost_version_on_several_devices_is_refused_by_name(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    harness = await start_harness(tmp_path, SETTINGS, assign=False)
    harness.files.version_kind = "fixed-cost"
    await harness.assign(replace(VERSION, executor="vllm", tensor_parallel=2))
    await eventually(lambda: harness.state() is VersionState.FAILED)
    assert "runs on one device" in harness.agent.status().versions[0].record.message
    await harness.close()


async def test_what_is_not_admitted_and_what_is_too_late(tmp_path: Path, workers: list[RowWorker]) -> None:
    save_mlp(tmp_path)
    worker = await RowWorker.started(tmp_path)
    workers.append(worker)
    stale = await worker.start(vector(1.0), incarnation=99).wait()
    assert stale.refusal is NotAdmittedReason.STALE_INCARNATION
    unknown = await worker.start(vector(1.0), version_digest="sha256:" + "c" * 64).wait()
    assert unknown.refusal is NotAdmittedReason.NOT_READY
    late = await worker.start(vector(1.0), time_left_s=1e-9).wait()
    assert isinstance(late.answer.error, DeadlineUnmeetable)
    worker.harness.host.draining = True
    drained = await worker.start(vector(1.0)).wait()
    assert drained.refusal is NotAdmittedReason.DRAINING


async def test_a_killed_process_loses_no_row_and_condemns_none(
    tmp_path: Path, workers: list[RowWorker]
) -> None:
    net = save_mlp(tmp_path)
    worker = await RowWorker.started(tmp_path)
    workers.append(worker)
    os.kill(worker.pid, signal.SIGSTOP)
    values = [index / 10 for index in range(50)]
    readers = [worker.start(vector(value)) for value in values]
    await eventually(lambda: len(worker.batcher) == 50)
    assert worker.batcher.running > 0
    os.kill(worker.pid, signal.SIGKILL)
    for reader in readers:
        await reader.wait(60.0)
    outputs = np.stack([reader.outputs["output"] for reader in readers])
    np.testing.assert_allclose(outputs, expected(net, values), atol=1e-5)
    await worker.ready()
    assert worker.restarts == 1
    await eventually(lambda: len(worker.batcher) == 0)


@pytest.mark.parametrize("fault", [RowFault.RAISES, RowFault.SEGFAULTS, RowFault.ALLOCATES, RowFault.HANGS])
async def test_one_bad_row_is_condemned_and_its_neighbours_are_answered(
    fault: RowFault, tmp_path: Path, workers: list[RowWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", FAULTS)
    net = save_mlp(tmp_path)
    worker = await RowWorker.started(tmp_path)
    workers.append(worker)
    values = [index / 10 for index in range(12)]
    rows = [vector(value) for value in values]
    rows.insert(7, poison(fault))
    found = await worker.run(rows, timeout_s=120.0)
    condemned = found.pop(7)
    assert isinstance(condemned.answer.error, PoisonedInput)
    outputs = np.stack([reader.outputs["output"] for reader in found])
    np.testing.assert_allclose(outputs, expected(net, values), atol=1e-5)
    ended = fault in (RowFault.SEGFAULTS, RowFault.HANGS)
    # What a busy machine allocates for long is taken for a hang.
    assert worker.restarts == ended or (fault is RowFault.ALLOCATES and worker.restarts == 1)
    await eventually(lambda: RunPlace.SACRIFICIAL not in worker.batcher.places)
    await worker.ready()
    record = worker.harness.agent.status().versions[0].record
    assert record.reason == ""
    # The kernel counts resident pages to within 64 per core, and 8 measured rows stand for 100.
    assert 0 < record.kv_bytes < 2**24, "it holds what its largest batch takes, not all it may"
    held_bytes = record.weight_bytes + record.working_bytes + record.kv_bytes
    async with asyncio.timeout(20.0):  # until the sacrificial process holds no memory
        while held_bytes + (await worker.harness.registered()).memory_free_bytes != 2 * 1024**3:
            await asyncio.sleep(0.05)


async def test_a_bad_row_is_condemned_where_no_second_process_fits(
    tmp_path: Path, workers: list[RowWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", FAULTS)
    net = save_mlp(tmp_path)
    kv_bytes = 512 * 1024
    settings = replace(SETTINGS, kv_memory_bytes=kv_bytes, crash_backoff_most_s=0.2)
    worker = await RowWorker.started(tmp_path, settings, memory_bytes=kv_bytes + 128 * 1024)
    workers.append(worker)
    values = [index / 10 for index in range(100)]
    rows = [vector(value) for value in values]
    rows.insert(60, poison(RowFault.SEGFAULTS))
    found = await worker.run(rows, timeout_s=120.0)
    condemned = found.pop(60).answer.error
    assert isinstance(condemned, PoisonedInput)
    assert condemned.metadata["deaths"] == "2"
    outputs = np.stack([reader.outputs["output"] for reader in found])
    np.testing.assert_allclose(outputs, expected(net, values), atol=1e-5)
    assert 2 <= worker.restarts <= 5
    assert worker.batcher.places <= {RunPlace.SERVING}


async def test_a_client_that_returns_after_its_row_hung_is_refused_at_once(
    tmp_path: Path, workers: list[RowWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", FAULTS)
    save_mlp(tmp_path)
    worker = await RowWorker.started(tmp_path)
    workers.append(worker)
    _, row = worker.start_row(poison(RowFault.HANGS))
    await eventually(lambda: worker.batcher.running == 1)
    row.cancel()
    await eventually(lambda: len(worker.batcher) == 0, 120.0)
    await worker.ready()
    again = await worker.start(poison(RowFault.HANGS)).wait(1.0)
    assert isinstance(again.answer.error, PoisonedInput)
    assert again.answer.error.metadata["deaths"] == "3"
    assert worker.restarts == 1


async def test_a_stopped_version_gives_its_rows_back(tmp_path: Path, workers: list[RowWorker]) -> None:
    save_mlp(tmp_path)
    worker = await RowWorker.started(tmp_path)
    os.kill(worker.pid, signal.SIGSTOP)
    reader = worker.start(vector(1.0))
    await eventually(lambda: worker.batcher.running == 1)
    stopping = asyncio.create_task(worker.harness.agent.close())
    await reader.wait()
    assert reader.answer.lost
    os.kill(worker.pid, signal.SIGCONT)
    await stopping
    await worker.close()
