"""Two versions on a worker that holds both only if the first gives way: real engines, running streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest_asyncio

from services.core.generation import FinishReason, StartSpec
from services.core.records import AssignedVersion, LoadedVersion, VersionState
from services.worker.slots.engine_process import EngineTimeouts
from services.worker.slots.engine_settings import EngineSettings
from tests.integration.worker.harness import DIGEST, Harness, Sink, eventually, start_harness
from tests.tidy.sources import ROOT

TINY = ROOT / "models" / "tiny" / "checkpoint"
MIB = 2**20
TOTAL = 160 * MIB
OTHER = "sha256:" + "b" * 64
FIRST = AssignedVersion("first", "tiny", DIGEST, executor="torch")
SECOND = AssignedVersion("second", "tiny", OTHER, executor="torch")
SETTINGS = EngineSettings(
    threads=1,
    block_size=64,
    kv_memory_bytes=112 * MIB,
    token_budget=128,
    max_sequences=24,
    drain_s=5.0,
    timeouts=EngineTimeouts(silence_s=60.0),
)
LOADED_S = 300.0  # at most, on a machine that others use
STREAMS = 16
OUTPUT_TOKENS = 150  # whose blocks, for which they are placed, are more than the pool that stays


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Harness]:
    harness = await start_harness(TINY, SETTINGS, assign=False, memory_bytes=TOTAL)
    yield harness
    await harness.close()


def record(worker: Harness, digest: str) -> LoadedVersion:
    (found,) = (
        each.record for each in worker.agent.status().versions if each.record.version_digest == digest
    )
    return found


def specs(worker: Harness, digest: str, credit: int = 1 << 20) -> list[StartSpec]:
    return [
        addressed(
            worker.spec(
                prompt=range(10, 10 + 40 + place),
                max_tokens=OUTPUT_TOKENS,
                seed=place,
                credit=credit if place % 2 else 1 << 20,
                kv_blocks=4,
                version_digest=digest,
            ),
            digest,
        )
        for place in range(STREAMS)
    ]


def addressed(spec: StartSpec, digest: str) -> StartSpec:
    return replace(spec, generation=replace(spec.generation, version_digest=digest))


async def tokens_of(worker: Harness, digest: str) -> list[list[int]]:
    sinks = [Sink() for _ in range(STREAMS)]
    for spec, sink in zip(specs(worker, digest), sinks, strict=True):
        worker.client.start(spec, sink)
    return [(await sink.wait(LOADED_S)).ids for sink in sinks]


async def test_a_second_version_fits_beside_the_first_which_grows_again_when_it_leaves(
    worker: Harness,
) -> None:
    await worker.assign(FIRST)
    await worker.ready(LOADED_S)
    await eventually(lambda: TOTAL - held(worker) < 37 * MIB, LOADED_S)
    alone = record(worker, DIGEST)
    assert alone.working_bytes > 0
    expected = await tokens_of(worker, DIGEST)
    for _ in range(2):  # blocks are given out one run after the other: the streams are to lie beyond the end
        assert await tokens_of(worker, DIGEST) == expected

    sinks = [Sink() for _ in range(STREAMS)]
    running = [
        worker.client.start(spec, sink)
        for spec, sink in zip(specs(worker, DIGEST, credit=3), sinks, strict=True)
    ]
    await eventually(lambda: all(len(sink.ids) > 1 for sink in sinks), LOADED_S)
    await worker.assign(FIRST, SECOND)
    await eventually(lambda: record(worker, DIGEST).kv_bytes < alone.kv_bytes, LOADED_S)
    for sink, stream in zip(sinks, running, strict=True):
        stream.credit(1 << 20)
        sink.credit = None
    for sink, tokens in zip(sinks, expected, strict=True):
        await sink.wait(LOADED_S)
        assert sink.finished.reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert sink.ids == tokens, "a stream was lost, or continued otherwise"

    await eventually(lambda: worker.state(OTHER) is VersionState.READY, LOADED_S)
    first, second = record(worker, DIGEST), record(worker, OTHER)
    assert held(worker) <= TOTAL
    assert min(first.kv_bytes, second.kv_bytes) >= 16 * 64 * 6144, "what a context takes"
    assert first.kv_blocks_total == worker.table.limits.kv_blocks_total == first.kv_bytes // (64 * 6144)
    assert await tokens_of(worker, OTHER) == expected
    worker.agent.check_integrity()

    await worker.assign(FIRST)
    await eventually(lambda: worker.state(OTHER) is None, LOADED_S)
    await eventually(lambda: record(worker, DIGEST).kv_bytes == alone.kv_bytes, LOADED_S)
    assert await tokens_of(worker, DIGEST) == expected
    await eventually(lambda: worker.table.stats.kv_blocks_used == 0)
    worker.agent.check_integrity()


def held(worker: Harness) -> int:
    versions = [each.record for each in worker.agent.status().versions]
    return sum(each.weight_bytes + each.working_bytes + each.kv_bytes for each in versions)
