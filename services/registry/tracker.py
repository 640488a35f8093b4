"""The swarms of the versions that nodes fetch, and the bound on what leaves the blob store at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Final

from services.core.errors import InvalidInput, Unavailable
from services.core.manifest import Manifest, distinct_chunks
from services.core.swarm import ChunkOrders, ChunkReport, ChunkSwarm
from services.ports.clock import Clock

MAX_SWARMS: Final = 256
SILENT_S: Final = 180.0  # time without a report after which a swarm is gone: three of a complete node's
DOWNLOADS: Final = 64
_WAITING: Final = 8  # downloads that wait, by downloads that run
_TURN_S: Final = 20.0  # longest wait of one: callers await an answer for longer


class ChunkTracker:
    """Soft state: after a restart the nodes report again what they have."""

    def __init__(
        self, readable: Callable[[str, str], Awaitable[Manifest]], clock: Clock, rng: Random
    ) -> None:
        """``readable`` returns the manifest of a version with the files of its base."""
        self._readable = readable
        self._clock = clock
        self._rng = rng
        # By version and base; the one used longest ago is first.
        self._swarms: OrderedDict[tuple[str, str], ChunkSwarm] = OrderedDict()

    async def exchange(
        self, model: str, digest: str, report: ChunkReport, *, base_digest: str = "", reporter: str = ""
    ) -> ChunkOrders:
        """Return what the reporting node is to fetch next. Nodes that have one base form a swarm.

        ``reporter`` is the identity in the caller's certificate; empty without one.
        Raises ModelNotFound, OverQuota, InvalidInput for chunks that the version lacks.
        """
        key, now_s = (digest, base_digest), self._clock.monotonic_s()
        while self._swarms and next(iter(self._swarms.values())).reported_s + SILENT_S <= now_s:
            self._swarms.popitem(last=False)
        if key not in self._swarms:
            chunks = len(distinct_chunks((await self._readable(model, digest)).files))
            self._swarms.setdefault(key, ChunkSwarm(chunks, Random(self._rng.random())))
            while len(self._swarms) > MAX_SWARMS:
                self._swarms.popitem(last=False)
        swarm = self._swarms[key]
        self._swarms.move_to_end(key)
        indexes = (*report.gained, *report.fetching, *(failed.index for failed in report.failed))
        is_wide = report.have and int.from_bytes(report.have, "little") >> swarm.chunks
        if is_wide or max(indexes, default=0) >= swarm.chunks:
            raise InvalidInput(f"the version has {swarm.chunks} chunks", field="have")
        return swarm.exchange(report, self._clock.monotonic_s(), reporter)


class DownloadTurns:
    """Bounds the downloads that read the blob store at once; others wait in order, and some of them."""

    def __init__(self, rng: Random, most: int = DOWNLOADS) -> None:
        self._rng = rng
        self._running = asyncio.Semaphore(most)
        self._most_waiting = _WAITING * most
        self._waiting = 0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Enter one download. Raises Unavailable where too many wait, or this one waited for ``_TURN_S``;
        retries are spread over two seconds.
        """
        if self._waiting >= self._most_waiting:
            raise self._busy()
        self._waiting += 1
        try:
            async with asyncio.timeout(_TURN_S):
                await self._running.acquire()
        except TimeoutError:
            raise self._busy() from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._running.release()

    def _busy(self) -> Unavailable:
        return Unavailable(
            f"{self._waiting} downloads wait for the blob store: try again",
            retry_after_s=self._rng.uniform(0.5, 2.5),
        )
