"""A version takes over the engine of the one before while streams run: no token is of mixed weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.core.generation import FinishReason, NotAdmittedReason, OutputLimits, Prompt, Sampling
from services.core.manifest import Manifest, ManifestFile, sha256_of
from services.core.records import AssignedVersion, InPlace, LoadedVersion, VersionState
from services.worker.engine_protocol import Progress, Submit
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.version_slot import VersionSlot
from tests.integration.worker.harness import (
    VOCAB,
    FolderSource,
    Harness,
    Sink,
    eventually,
    start_harness,
    write_model,
)
from tests.support.engine_oracle import load_engine

A, B, C = ("sha256:" + letter * 64 for letter in "abc")
TOKENS: Final = 24
PROMPTS: Final = [[(7 * place + 11 * number) % VOCAB for place in range(40)] for number in range(4)]
PATIENCE_S: Final = 60.0
SMALL: Final[dict[str, Any]] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
LARGE: Final[dict[str, Any]] = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 8}
Outputs = dict[str, list[list[int]]]  # tokens by version and prompt


def write_version(folder: Path, seed: int, sizes: Mapping[str, Any]) -> Path:
    """A random checkpoint with the harness' tokenizer; versions of one size differ in weights alone."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config: Any = transformers.LlamaConfig(
        vocab_size=VOCAB,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        **sizes,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    write_model(folder)
    model.save_pretrained(folder)
    with contextlib.suppress(FileNotFoundError):
        (folder / "generation_config.json").unlink()
    return folder


class Versions(FolderSource):
    """Model files of several versions that are there already."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        super().__init__(next(iter(folders.values())))
        self.folders = dict(folders)
        self.computations = {digest: digest for digest in folders}

    async def fetch(self, model: str, digest: str, **_: object) -> Path:
        self.fetches += 1
        return self.folders[digest]

    async def readable(self, model: str, digest: str) -> Manifest:
        return Manifest(
            tuple(
                ManifestFile(path.name, path.stat().st_size, sha256_of(path.read_bytes()), ())
                for path in sorted(self.folders[digest].iterdir())
            )
        )


def oracle(folders: Mapping[str, Path]) -> Outputs:
    """Return what a fresh load of each version makes of each prompt."""
    found: Outputs = {}
    for digest, folder in folders.items():
        engine = load_engine(folder, {"max_model_len": 256, "kv_blocks": 64})
        outputs: dict[int, list[int]] = {}
        for handle, prompt in enumerate(PROMPTS):
            limits, sampling = OutputLimits(TOKENS, ignore_eos=True), Sampling(handle, temperature=1.0)
            engine.apply(Submit(handle, Prompt(prompt), sampling, limits, credit_limit=TOKENS))
            while engine.has_work:
                stepped = engine.step()
                for number, token in zip(stepped.handles, stepped.tokens, strict=True):
                    outputs.setdefault(number, []).append(token)
        found[digest] = [outputs[handle] for handle in range(len(PROMPTS))]
    return found


def version(digest: str, finish_s: float | None = None, revision: int = 10) -> AssignedVersion:
    in_place = None if finish_s is None else InPlace(finish_s, revision)
    return AssignedVersion("chat", "m", digest, in_place=in_place)


@dataclass
class Traffic:
    """Streams that start as long as it runs, each on the version that the worker admits it for."""

    worker: Harness
    digest: str  # the version that new streams ask for
    wanted: Outputs
    served: dict[str, int] = field(default_factory=dict)  # whole streams by version
    rerouted: int = 0  # streams that a refusal sent to the successor
    started_over: int = 0  # streams that were returned without output
    gone: int = 0  # streams that were returned with output
    mixed: list[str] = field(default_factory=list)  # streams whose tokens are not their version's
    successors: dict[str, str] = field(default_factory=dict)
    stopped: bool = False

    async def run(self, number: int) -> None:
        while not self.stopped:
            await self._stream(number % len(PROMPTS), self.digest)

    async def _stream(self, prompt: int, digest: str) -> None:
        for _ in range(10_000):
            sink = Sink()
            self.worker.client.start(self._spec(prompt, digest), sink)
            await sink.wait(PATIENCE_S)
            if sink.refusal is NotAdmittedReason.STALE_ROUTE:
                self.rerouted += 1
                digest = self.successors[digest]
                continue
            if sink.refusal is not None:
                await asyncio.sleep(0.02)
                continue
            whole = self.wanted[digest][prompt]
            if sink.ids != whole[: len(sink.ids)]:
                self.mixed.append(f"{digest[:12]} {prompt}: {sink.ids} is not {whole}")
            if sink.finished.reason is FinishReason.LENGTH:
                self.served[digest] = self.served.get(digest, 0) + 1
                return
            if sink.ids:
                self.gone += 1
                return
            self.started_over += 1

    def _spec(self, prompt: int, digest: str):  # type: ignore[no-untyped-def]
        spec = self.worker.spec(prompt=PROMPTS[prompt], max_tokens=TOKENS, version_digest=digest)
        generation = replace(
            spec.generation,
            version_digest=digest,
            sampling=Sampling(prompt, temperature=1.0),
            limits=OutputLimits(TOKENS, ignore_eos=True),
        )
        return replace(spec, generation=generation)

    @contextlib.asynccontextmanager
    async def running(self, streams: int) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.run(number)) for number in range(streams)]
        try:
            yield
        finally:
            self.stopped = True
            await asyncio.gather(*tasks)


def record(worker: Harness, digest: str) -> LoadedVersion | None:
    records = (one.record for one in worker.agent.status().versions)
    return next((one for one in records if one.version_digest == digest), None)


def state(worker: Harness, digest: str) -> VersionState | None:
    found = record(worker, digest)
    return None if found is None else found.state


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., object]]:
    started: list[Harness] = []

    async def begin(folders: Mapping[str, Path], digest: str) -> Harness:
        settings = EngineSettings(threads=1, kv_memory_bytes=16 << 20, token_budget=64, retire_s=600.0)
        source = Versions(folders)
        worker = await start_harness(source.folder, settings, assign=False, source=source)
        started.append(worker)
        await worker.assign(version(digest))
        await eventually(lambda: state(worker, digest) is VersionState.READY, PATIENCE_S)
        return worker

    yield begin
    for worker in started:
        await worker.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("small")
    return {digest: write_version(root / digest[-1], seed, SMALL) for seed, digest in enumerate((A, B, C))}


async def test_each_stream_is_that_of_one_version_over_several_replacements(
    small: dict[str, Path], start: Callable[..., object]
) -> None:
    wanted = await asyncio.to_thread(oracle, small)
    assert wanted[A] != wanted[B]
    worker: Harness = await start(small, A)  # type: ignore[misc]
    traffic = Traffic(worker, A, wanted)
    pid = worker.engine_pid
    before = A
    async with traffic.running(6):
        # Requests in flight finish, are returned at once, and the version that was first comes back.
        for digest, finish_s in ((B, 60.0), (C, 0.0), (A, 0.0), (B, 60.0)):
            served = traffic.served.get(before, 0)
            await eventually(lambda: traffic.served.get(before, 0) > served + 3, PATIENCE_S)  # noqa: B023
            traffic.successors[before] = digest
            traffic.successors.pop(digest, None)
            await worker.assign(
                replace(version(before), served=True), version(digest, finish_s, revision=1000)
            )
            await eventually(lambda: state(worker, digest) is VersionState.READY, PATIENCE_S)  # noqa: B023
            await eventually(lambda: record(worker, before) is None)  # noqa: B023
            assert record(worker, digest).weight_bytes  # type: ignore[union-attr]
            if digest == B and finish_s:
                await eventually(lambda: traffic.rerouted, PATIENCE_S)
            traffic.digest = before = digest
    assert traffic.mixed == []
    assert set(traffic.served) == {A, B, C}
    assert traffic.rerouted, "what waited for the version before got its successor"
    assert traffic.started_over + traffic.gone, "nothing ran while weights were replaced at once"
    assert [one.engine_pid for one in worker.agent.status().versions] == [pid], "it is one process all along"
    worker.agent.check_integrity()


async def test_a_kill_in_the_middle_brings_back_a_whole_version(
    tmp_path: Path, start: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {
        digest: write_version(tmp_path / digest[-1], seed, LARGE) for seed, digest in enumerate((A, B))
    }
    wanted = await asyncio.to_thread(oracle, folders)
    worker: Harness = await start(folders, A)  # type: ignore[misc]
    pid = worker.engine_pid

    note, killed = VersionSlot.engine_progress, list[float]()

    def kill(slot: VersionSlot, event: Progress) -> None:
        note(slot, event)
        if not killed and slot.message == "replacing weights" and 0.2 < event.done_ratio < 1.0:
            killed.append(event.done_ratio)
            os.kill(pid, signal.SIGKILL)

    # The records of a worker are polled, and a fast machine replaces the weights between two looks.
    monkeypatch.setattr(VersionSlot, "engine_progress", kill)
    await worker.assign(replace(version(A), served=True), version(B, 0.0))
    await eventually(lambda: killed, PATIENCE_S)
    await eventually(lambda: state(worker, B) is VersionState.FAILED, PATIENCE_S)
    failed = record(worker, B)
    assert failed is not None
    assert failed.reason == "REPLACEMENT_CRASHED"
    assert failed.retry_unix_s == 0.0, "each try would end the engine that serves"
    await worker.assign(version(A))
    await eventually(lambda: state(worker, A) is VersionState.READY, PATIENCE_S)
    traffic = Traffic(worker, A, wanted)
    await traffic._stream(0, A)
    assert (traffic.served, traffic.mixed) == ({A: 1}, [])
    await worker.assign(replace(version(A), served=True), version(B, 0.0))
    await eventually(lambda: state(worker, B) is VersionState.READY, PATIENCE_S)
    await traffic._stream(0, B)
    assert (traffic.served, traffic.mixed) == ({A: 1, B: 1}, [])


async def test_deleted_files_of_the_version_before_are_fetched_again(
    small: dict[str, Path], tmp_path: Path, start: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Path(shutil.copytree(small[A], tmp_path / "before"))
    worker: Harness = await start({A: before, B: small[B]}, A)  # type: ignore[misc]
    pid = worker.engine_pid
    shutil.rmtree(before)
    fetch, readable, kept = Versions.fetch, Versions.readable, Versions(small)

    async def restored(source: Versions, model: str, digest: str, **given: object) -> Path:
        if digest == A:
            shutil.copytree(small[A], before, dirs_exist_ok=True)
        return await fetch(source, model, digest, **given)

    monkeypatch.setattr(Versions, "fetch", restored)
    monkeypatch.setattr(Versions, "readable", lambda _, model, digest: readable(kept, model, digest))
    await worker.assign(replace(version(A), served=True), version(B, 0.0))
    await eventually(lambda: state(worker, B) is VersionState.READY, PATIENCE_S)
    # The version before may be listed still.
    assert {one.engine_pid for one in worker.agent.status().versions} == {pid}


async def test_weights_that_cannot_be_replaced_are_refused_by_name(
    small: dict[str, Path], tmp_path: Path, start: Callable[..., object]
) -> None:
    other = Path(shutil.copytree(small[B], tmp_path / "other"))
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**fields, "rope_theta": 5e5}))
    damaged = Path(shutil.copytree(small[C], tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, damaged / "model.safetensors")
    wanted = await asyncio.to_thread(oracle, {A: small[A]})
    worker: Harness = await start({A: small[A], B: other, C: damaged}, A)  # type: ignore[misc]
    pid = worker.engine_pid
    traffic = Traffic(worker, A, wanted)

    await worker.assign(replace(version(A), served=True), version(B, 0.0))
    await eventually(lambda: state(worker, B) is VersionState.FAILED, PATIENCE_S)
    refused = record(worker, B)
    assert refused is not None
    assert refused.reason == "NOT_REPLACEABLE"
    assert "config.json" in refused.message
    assert state(worker, A) is VersionState.READY
    await traffic._stream(0, A)
    assert worker.engine_pid == pid, "nothing was tried"

    await worker.assign(replace(version(A), served=True), version(C, 0.0))
    await eventually(lambda: state(worker, C) is VersionState.FAILED, PATIENCE_S)
    refused = record(worker, C)
    assert refused is not None
    assert refused.reason == "BAD_CHECKPOINT"
    assert name in refused.message
    await eventually(lambda: state(worker, A) is VersionState.READY, PATIENCE_S)
    assert record(worker, A).engine_restarts == 1  # type: ignore[union-attr]
    await traffic._stream(1, A)
    assert (traffic.served, traffic.mixed) == ({A: 2}, [])
