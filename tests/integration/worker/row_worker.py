"""A worker with a real process of a fixed-cost model, and a gateway's stream to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from services.core.fixed_cost.rows import RawTensor, RowEnd, RowSpec
from services.core.generation import NotAdmittedReason
from services.core.records import AssignedVersion, Priority, VersionState
from services.worker.batcher.driver import Batcher
from services.worker.slots.engine_process import EngineTimeouts
from services.worker.slots.engine_settings import EngineSettings
from tests.integration.worker.harness import DIGEST, Harness, eventually, start_harness

VERSION: Final = AssignedVersion("rows", "rows", DIGEST)
LOAD_S: Final = 60.0
NAMES: Final = {"float32": "FP32", "int64": "INT64"}
SETTINGS: Final = EngineSettings(
    threads=1,
    kv_memory_bytes=64 * 1024**2,
    drain_s=5.0,
    crash_backoff_first_s=0.2,
    timeouts=EngineTimeouts(shutdown_s=5.0),
)


@dataclass(eq=False)
class RowReader:
    """Keeps what a row received."""

    end: RowEnd | None = None
    refusal: NotAdmittedReason | None = None
    lost: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    at_s: float = 0.0

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self.refusal = reason
        self._end()

    def on_row_ended(self, end: RowEnd) -> None:
        self.end = end
        self._end()

    def on_lost(self, message: str) -> None:
        self.lost = message
        self._end()

    @property
    def answer(self) -> RowEnd:
        assert self.end is not None, self.refusal or self.lost or "it runs still"
        return self.end

    @property
    def outputs(self) -> dict[str, NDArray[Any]]:
        assert self.answer.error is None, self.answer.error
        assert not self.answer.lost
        return {
            each.name: np.frombuffer(each.data, np.float32).reshape(each.shape)
            for each in self.answer.outputs
        }

    def _end(self) -> None:
        assert not self.done.is_set(), "two ends"
        self.at_s = asyncio.get_running_loop().time()
        self.done.set()

    async def wait(self, timeout_s: float = 20.0) -> RowReader:
        async with asyncio.timeout(timeout_s):
            await self.done.wait()
        return self


def raw(row: dict[str, NDArray[Any]]) -> tuple[RawTensor, ...]:
    """Return a row as it travels."""
    return tuple(
        RawTensor(name, NAMES[values.dtype.name], values.shape, values.tobytes())
        for name, values in row.items()
    )


@dataclass
class RowWorker:
    """One worker that serves a fixed-cost version, and one gateway."""

    harness: Harness
    sent: int = 0

    @staticmethod
    async def started(
        folder: Path,
        settings: EngineSettings = SETTINGS,
        version: AssignedVersion = VERSION,
        *,
        load_s: float = LOAD_S,
        **options: Any,
    ) -> RowWorker:
        harness = await start_harness(folder, settings, assign=False, **options)
        harness.files.version_kind = "fixed-cost"
        await harness.assign(version)
        worker = RowWorker(harness)
        await worker.ready(load_s)
        return worker

    async def ready(self, load_s: float = LOAD_S) -> None:
        await eventually(lambda: self.harness.state() is VersionState.READY, load_s)

    @property
    def batcher(self) -> Batcher:
        found = self.harness.host.row_table(DIGEST)
        assert isinstance(found, Batcher)
        return found

    @property
    def pid(self) -> int:
        return self.harness.engine_pid

    @property
    def restarts(self) -> int:
        return self.harness.agent.status().versions[0].record.engine_restarts

    def start(self, inputs: tuple[RawTensor, ...], **fields: Any) -> RowReader:
        reader, _ = self.start_row(inputs, **fields)
        return reader

    def start_row(self, inputs: tuple[RawTensor, ...], **fields: Any) -> tuple[RowReader, Any]:
        """Return the reader of a row, and the row as its gateway has it."""
        self.sent += 1
        incarnation = self.harness.host.grants.incarnation
        spec = RowSpec(
            f"r{self.sent}", 0, "t1", DIGEST, inputs, Priority.STANDARD, incarnation=incarnation, epoch=1
        )
        reader = RowReader()
        row = self.harness.client.start_row(self.harness.address, structs.replace(spec, **fields), reader)
        return reader, row

    async def run(self, rows: Sequence[tuple[RawTensor, ...]], timeout_s: float = 20.0) -> list[RowReader]:
        """Return what became of the rows, all sent at once."""
        readers = [self.start(row) for row in rows]
        for reader in readers:
            await reader.wait(timeout_s)
        return readers

    async def close(self) -> None:
        await self.harness.close()
