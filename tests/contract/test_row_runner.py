"""What every ``RowRunner`` does: the one on leased slots, over gRPC, and the one of the interfaces' tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from services.core.fixed_cost.rows import RawTensor, RowsRequest
from services.core.records import Priority
from services.ports.rows import RowRunner
from tests.integration.leased_rows import row_rig
from tests.integration.scheduler_fleet import DIGEST
from tests.support.row_versions import LocalRows, mlp_version
from tests.support.waiting import until


@dataclass
class Rig:
    runner: RowRunner
    pause: Callable[[bool], None]  # no row ends meanwhile
    rows: Callable[[], int]  # that run or wait


@asynccontextmanager
async def leased(_: Path) -> AsyncIterator[Rig]:
    async with row_rig() as found:
        worker, gateway = await found.add_worker(), found.add_gateway()

        def pause(paused: bool) -> None:
            worker.rows.paused = paused

        yield Rig(gateway.runner, pause, lambda: gateway.runner.rows)


@asynccontextmanager
async def computed(folder: Path) -> AsyncIterator[Rig]:
    runner = LocalRows()
    runner.load(DIGEST, mlp_version(folder / "mlp"))
    runner.gate.set()
    yield Rig(
        runner, lambda paused: runner.gate.clear() if paused else runner.gate.set(), lambda: runner.running
    )


Start = Callable[[Path], AbstractAsyncContextManager[Rig]]
RUNNERS = pytest.mark.parametrize("start", [leased, computed])


def request(count: int) -> RowsRequest:
    values = np.arange(4 * count, dtype=np.float32).reshape(count, 4)
    rows = tuple((RawTensor("input", "FP32", (4,), row.tobytes()),) for row in values)
    return RowsRequest("req_1", "acme", "mlp", DIGEST, rows, Priority.STANDARD)


@RUNNERS
async def test_the_ends_have_the_order_of_the_rows(start: Start, tmp_path: Path) -> None:
    async with start(tmp_path) as rig:
        asked = request(30)
        ends = await rig.runner.run(asked)
        alone = [await rig.runner.run(replace(asked, rows=(row,))) for row in asked.rows[:5]]
        assert len(ends) == 30
        assert all(end.error is None and not end.lost and end.batch_rows >= 1 for end in ends)
        assert [end.outputs for end in ends[:5]] == [found[0].outputs for found in alone]
        assert rig.rows() == 0


@RUNNERS
async def test_a_request_without_rows_has_no_ends(start: Start, tmp_path: Path) -> None:
    async with start(tmp_path) as rig:
        assert await rig.runner.run(request(0)) == ()


@RUNNERS
async def test_requests_run_at_the_same_time(start: Start, tmp_path: Path) -> None:
    async with start(tmp_path) as rig:
        found = await asyncio.gather(*(rig.runner.run(request(count)) for count in (1, 7, 3)))
        assert [len(ends) for ends in found] == [1, 7, 3]


@RUNNERS
async def test_cancelling_leaves_no_rows(start: Start, tmp_path: Path) -> None:
    async with start(tmp_path) as rig:
        rig.pause(True)
        running = asyncio.create_task(rig.runner.run(request(5)))
        await until(rig.rows)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        assert rig.rows() == 0
        rig.pause(False)
        assert len(await rig.runner.run(request(2))) == 2
