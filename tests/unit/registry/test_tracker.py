"""The registry's tracker rejects what no version has, and its downloads wait in turn."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from services.core.errors import InvalidInput, ModelNotFound, Unavailable
from services.core.manifest import Manifest, ManifestFile, sha256_of
from services.core.swarm import ChunkPeer, ChunkReport, FailedChunk
from services.registry import tracker as module
from services.registry.tracker import ChunkTracker, DownloadTurns
from services.runtime.clock import SystemClock

NODE = ChunkPeer("a:1")
DIGEST = sha256_of(b"version")
CHUNKS = tuple(sha256_of(bytes([number])) for number in range(3))


async def readable(model: str, digest: str) -> Manifest:
    if model != "m":
        raise ModelNotFound(f"no model {model}")
    # The second file repeats a chunk of the first.
    return Manifest((ManifestFile("a", 1, DIGEST, CHUNKS), ManifestFile("b", 1, DIGEST, CHUNKS[:1])))


@pytest.mark.parametrize(
    "report",
    [
        ChunkReport(NODE, have=b"\x08"),
        ChunkReport(NODE, gained=(3,)),
        ChunkReport(NODE, fetching=(3,)),
        ChunkReport(NODE, failed=(FailedChunk(3),)),
    ],
)
async def test_a_chunk_that_the_version_lacks_is_rejected(report: ChunkReport) -> None:
    tracker = ChunkTracker(readable, SystemClock(), Random(1))
    with pytest.raises(InvalidInput, match="3 chunks"):
        await tracker.exchange("m", DIGEST, report)
    answer = await tracker.exchange("m", DIGEST, ChunkReport(NODE, have=b"\x03", wanted=4))
    assert [order.index for order in answer.orders] == [2]


async def test_swarms_are_of_versions_that_exist_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SWARMS", 2)
    tracker = ChunkTracker(readable, SystemClock(), Random(1))
    with pytest.raises(ModelNotFound):
        await tracker.exchange("other", DIGEST, ChunkReport(NODE))
    for number in range(4):
        await tracker.exchange("m", sha256_of(bytes([number])), ChunkReport(NODE, have=b"\0"))
    assert len(tracker._swarms) == 2


async def test_downloads_run_a_few_at_once_and_only_some_wait() -> None:
    turns, running, most, rejected = DownloadTurns(Random(1), 2), 0, 0, 0
    retries = set()

    async def download() -> None:
        nonlocal running, most, rejected
        try:
            async with turns.one():
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.001)
                running -= 1
        except Unavailable as error:
            rejected += 1
            retries.add(error.retry_after_s)

    await asyncio.gather(*(download() for _ in range(40)))
    assert (running, most) == (0, 2)
    assert 20 <= rejected <= 24
    assert len(retries) == rejected, "retries come at the same time"
    await download()
    assert rejected <= 24, "a turn was not returned"
