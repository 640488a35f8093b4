"""A worker whose disk changes what it keeps: no engine starts on it, and what is damaged is fetched again."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest_asyncio

from services.adapters.blobs.folder import FolderBlobs
from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.core.generation import Sampling
from services.core.records import AssignedVersion, VersionState
from services.runtime.clock import SystemClock
from services.worker.slots.engine_process import EngineTimeouts
from services.worker.slots.engine_settings import EngineSettings
from tests.integration.registry.harness import publish_any
from tests.integration.worker.harness import Harness, Sink, eventually, start_harness
from tests.integration.worker.test_drafts import save
from tests.support.registry import ADMIN, served

SETTINGS = EngineSettings(
    operators="torch",
    kv_memory_bytes=16 * 2**20,
    crash_backoff_first_s=0.05,
    failed_backoff_first_s=0.2,
    timeouts=EngineTimeouts(silence_s=20.0, shutdown_s=5.0),
)
CLOCK = SystemClock()


@dataclass
class Cached:
    """A worker that has fetched a version, and the file of its weights."""

    worker: Harness
    weights: Path
    digest: str
    damaged: list[None]

    async def ready(self) -> None:
        await eventually(lambda: self.worker.state(self.digest) is VersionState.READY, 60.0)

    async def answer(self) -> list[int]:
        """Return a greedy answer of the engine that runs now."""
        sink = Sink()
        spec = self.worker.spec(max_tokens=24, version_digest=self.digest)
        generation = replace(
            spec.generation, version_digest=self.digest, sampling=Sampling(seed=1, temperature=0.0)
        )
        self.worker.client.start(replace(spec, generation=generation), sink)
        await sink.wait(30.0)
        assert sink.end is not None, sink.refusal or sink.lost
        return sink.ids

    async def kill_engine(self) -> None:
        """Return once the engine is gone and its end was noticed."""
        os.kill(self.worker.engine_pid, signal.SIGKILL)
        await eventually(lambda: self.worker.state(self.digest) is not VersionState.READY)


@pytest_asyncio.fixture
async def cached(model_dir: Path, tmp_path: Path) -> AsyncIterator[Cached]:
    save(model_dir, layers=2)
    async with served(MemoryStore(CLOCK), FolderBlobs(tmp_path / "blobs"), CLOCK) as registry:
        done = await publish_any(registry.channel, model_dir, "m", metadata=ADMIN)
        damaged: list[None] = []
        files = ModelFiles(
            registry.client,
            tmp_path / "cache",
            CLOCK,
            max_bytes=10**9,
            found_damaged=lambda: damaged.append(None),
        )
        worker = await start_harness(model_dir, SETTINGS, assign=False, source=files)
        await worker.assign(AssignedVersion("d", "m", done.digest, executor="torch"))
        (weights,) = [tmp_path / "cache/ready" / done.digest.removeprefix("sha256:") / "model.safetensors"]
        made = Cached(worker, weights, done.digest, damaged)
        await made.ready()
        yield made
        await worker.close()
        files.check_integrity()
        files.close()


def flip(path: Path) -> None:
    """Change one byte amid the weights."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 0x40]))


async def test_a_damaged_cache_is_found_at_an_engines_start_and_healed(cached: Cached) -> None:
    before, answer = cached.weights.read_bytes(), await cached.answer()
    flip(cached.weights)
    assert await cached.answer() == answer, "what is loaded owns its memory"
    assert cached.damaged == []
    await cached.kill_engine()
    await cached.ready()
    assert cached.weights.read_bytes() == before
    assert await cached.answer() == answer
    assert cached.damaged == [None]


async def test_a_sound_cache_starts_an_engine_without_the_registry(cached: Cached) -> None:
    answer = await cached.answer()
    await cached.kill_engine()
    await cached.ready()
    assert await cached.answer() == answer
    assert cached.damaged == []
