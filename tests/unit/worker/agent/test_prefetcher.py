"""Files that a worker holds beside what it runs: those that a revert needs are pinned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.records import AssignedVersion
from services.runtime.clock import SystemClock
from services.worker.agent.prefetcher import Prefetcher
from tests.support.waiting import until

OLD, NEXT = AssignedVersion("chat", "tiny", "sha256:0"), AssignedVersion("chat", "tiny", "sha256:1")


@dataclass
class Files:
    """The files of one version; ``pins`` are those of all who have them."""

    target: Path
    pins: dict[str, int]
    folder: Path | None = None

    async def fetch(self, progress: Callable[[float], None], *, spare: bool) -> None:
        assert spare
        self.target.mkdir(exist_ok=True)
        self.folder = self.target
        self.pins[self.target.name] = self.pins.get(self.target.name, 0) + 1

    def lost(self) -> bool:
        gone = self.folder is not None and not self.folder.is_dir()
        if gone:
            self.unpin()
        return gone

    def unpin(self) -> None:
        if self.folder is not None:
            self.pins[self.folder.name] -= 1
        self.folder = None


@asynccontextmanager
async def running(root: Path, pins: dict[str, int]) -> AsyncIterator[Prefetcher]:
    def files(version: AssignedVersion) -> Any:
        return Files(root / version.version_digest[-1], pins)

    prefetcher = Prefetcher(files, SystemClock(), lambda: None)
    task = asyncio.create_task(prefetcher.run())
    try:
        yield prefetcher
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_what_a_revert_needs_is_pinned_until_it_is_not_needed(tmp_path: Path) -> None:
    pins: dict[str, int] = {}
    async with running(tmp_path, pins) as prefetcher:
        prefetcher.want((NEXT,), (OLD,))
        await until(lambda: prefetcher.present == ("sha256:0", "sha256:1"))
        assert pins == {"0": 1, "1": 0}
        prefetcher.want((), (OLD,))
        assert pins == {"0": 1, "1": 0}
        prefetcher.want((OLD,), ())
        assert pins == {"0": 0, "1": 0}, "what is only prefetched may be evicted"
        prefetcher.want((), (OLD,))
        await until(lambda: pins["0"] == 1)


async def test_pinned_files_that_were_deleted_are_fetched_and_pinned_again(tmp_path: Path) -> None:
    pins: dict[str, int] = {}
    async with running(tmp_path, pins) as prefetcher:
        prefetcher.want((), (OLD,))
        await until(lambda: pins.get("0") == 1)
        (tmp_path / "0").rmdir()
        assert prefetcher.present == ()
        prefetcher.want((NEXT,), (OLD,))  # wakes it before its next look
        await until(lambda: prefetcher.present == ("sha256:0", "sha256:1"))
        assert pins == {"0": 1, "1": 0}
