"""The registry's tracker rejects what no version has, and its downloads wait in turn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.errors import InvalidInput, ModelNotFound, Unavailable
from services.core.manifest import Manifest, ManifestFile, sha256_of
from services.core.swarm import ChunkPeer, ChunkReport, FailedChunk
from services.registry import tracker as module
from services.registry import tracker as tracker_module
from services.registry.servicer import RegistryServicer
from services.registry.tracker import SILENT_S, ChunkTracker, DownloadTurns
from services.rpc.convert.registry import report_to_proto
from services.runtime.clock import SystemClock
from tests.support.certificates import authority_in, identity_of
from tests.support.clocks import HandClock

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


async def test_a_swarm_without_reports_is_dropped() -> None:
    clock = HandClock()
    tracker = ChunkTracker(readable, clock, Random(1))
    old, new = sha256_of(b"old"), sha256_of(b"new")
    for digest in (old, new):
        await tracker.exchange("m", digest, ChunkReport(NODE, have=b"\0"))
    for _ in range(4):
        clock.now_s += SILENT_S / 3
        await tracker.exchange("m", new, ChunkReport(NODE))
    assert tracker._swarms.keys() == {(new, "")}


async def test_the_reporter_is_the_identity_in_the_certificate(tmp_path: Path) -> None:
    """Whatever address it claims: one certificate is one reporter."""
    certificate = identity_of(authority_in(tmp_path), "worker", "worker-0").chain_pem
    context = SimpleNamespace(auth_context=lambda: {"x509_pem_cert": [certificate]})
    tracker = ChunkTracker(readable, SystemClock(), Random(1))
    servicer = RegistryServicer(cast(Any, SimpleNamespace(tracker=tracker)))
    for address in ("a:1", "b:1"):
        report = ChunkReport(ChunkPeer(address), have=b"\0")
        request = report_to_proto(report, model="m", version_digest=DIGEST)
        await servicer.ExchangeChunks(request, cast(Any, context))
    (swarm,) = tracker._swarms.values()
    (reporter,) = {node.reporter for node in swarm._nodes.values()}
    assert reporter.endswith("/worker/worker-0")


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


async def test_a_download_that_waits_for_long_is_refused_with_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker_module, "_TURN_S", 0.05)
    turns = DownloadTurns(Random(1), 1)
    async with turns.one():
        with pytest.raises(Unavailable) as caught:
            async with turns.one():
                pass
        assert caught.value.retry_after_s
    async with turns.one():
        pass
