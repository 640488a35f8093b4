"""A worker agent with a real engine process, a real gRPC server and the gateway's client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.adapters.grpc.client_stream import GrpcStreams
from services.adapters.links.muxed_workers import MuxedWorkers
from services.adapters.memory.store import MemoryStore
from services.core.errors import FairwayError
from services.core.generation import (
    GenerationSpec,
    Grant,
    NotAdmittedReason,
    OutputLimits,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.core.manifest import Manifest
from services.core.records import (
    ASSIGNMENTS,
    WORKERS,
    AssignedVersion,
    Assignment,
    VersionState,
    Worker,
    dump,
    load,
)
from services.gateway.text.child import TextProcessCheck
from services.ports.store import Put
from services.rpc.channel import auth_metadata
from services.rpc.server import RpcServer, RpcService
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.version_trust import VersionTrust
from services.worker.agent.agent import WorkerAgent
from services.worker.agent.report import WorkerIdentity
from services.worker.detokenizer import byte_of_char
from services.worker.servicer import WorkerServicer
from services.worker.slots.engine_process import (
    EngineTimeouts,
    process_launcher,
)
from services.worker.slots.engine_settings import EngineSettings
from services.worker.slots.version_files import ModelSource, VersionFiles
from services.worker.streams.charges import DeviceKind, DeviceTime
from services.worker.streams.host import SequenceHost
from services.worker.streams.sequences import SequenceTable
from services.worker.telemetry import WorkerTelemetry
from tests.support import local_servers
from tests.support.kept_usage import KeptUsage

DIGEST = "sha256:" + "a" * 64
VOCAB = 512
TOKEN = "internal-token-of-these-tests-0123456789"


def write_model(folder: Path) -> Path:
    """A folder for the null executor: a byte-level tokenizer of 256 bytes and 256 pairs, and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    chars = sorted(byte_of_char(), key=lambda char: byte_of_char()[char])
    vocab = {char: index for index, char in enumerate(chars)}
    letters = "abcdefghijklmnop"
    merges = [(a, b) for a in letters for b in letters]
    vocab.update({a + b: 256 + index for index, (a, b) in enumerate(merges)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 4096}))
    return folder


class FolderSource:
    """Model files that are there already."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pins = self.fetches = 0
        self.error: FairwayError | None = None  # raised by every fetch while it is set
        self.context = 0
        self.version_kind = "causal-lm"
        self.computations: dict[str, str] = {}  # by version; others share with none

    async def fetch(
        self,
        model: str,
        digest: str,
        *,
        only: Callable[[str], bool] | None = None,
        progress: Callable[[float], None] | None = None,
        recheck: bool = False,
        spare: bool = False,
    ) -> Path:
        if self.error is not None:
            raise self.error
        self.fetches += 1
        if progress is not None:
            progress(1.0)
        return self.folder

    async def readable(self, model: str, digest: str) -> Manifest:
        return Manifest((), self.version_kind, max_context_tokens=self.context)

    async def computation(self, model: str, digest: str, *, contents: Mapping[str, bytes]) -> str:
        return self.computations.get(digest, "")

    def pin(self, folder: Path, *, spare: bool = False) -> None:
        self.pins += 1

    def unpin(self, folder: Path, *, spare: bool = False) -> None:
        self.pins -= 1


@dataclass(eq=False)
class Sink:
    """Keeps what a sequence heard; ``ended`` is set by its last word."""

    accepted: bool = False
    refusal: NotAdmittedReason | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: SequenceEnd | None = None
    lost: str | None = None
    offset_base: int | None = None
    after_end: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    credit: Callable[[int], None] | None = None  # called with the number of tokens that came

    def on_accepted(self) -> None:
        assert not self.accepted
        self.accepted = True

    def on_not_admitted(self, reason: NotAdmittedReason) -> None:
        self.refusal = reason
        self._end()

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        raise AssertionError("nobody asked for scores")

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        assert self.accepted, "tokens before accepted"
        self.after_end += self.ended.is_set()
        if self.offset_base is None:
            self.offset_base = offset
        assert offset == self.offset_base + len(self.ids), "tokens lost, doubled or out of order"
        self.ids += ids
        self.text += text
        self.logprobs += logprobs
        if self.credit is not None:
            self.credit(len(ids))

    def on_finished(self, end: SequenceEnd) -> None:
        self.end = end
        self._end()

    def on_lost(self, message: str) -> None:
        self.lost = message
        self._end()

    @property
    def finished(self) -> SequenceEnd:
        assert self.end is not None, self.lost or self.refusal or "it runs still"
        return self.end

    def _end(self) -> None:
        assert not self.ended.is_set(), "two last words"
        self.ended.set()

    async def wait(self, timeout_s: float = 10.0) -> Sink:
        async with asyncio.timeout(timeout_s):
            await self.ended.wait()
        return self


async def eventually(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Return once the condition holds; the test fails after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # what is waited for signals nobody
            await asyncio.sleep(0.01)


@dataclass
class Harness:
    """One worker and one gateway's client."""

    agent: WorkerAgent
    host: SequenceHost
    store: MemoryStore
    client: MuxedWorkers
    supervisor: Supervisor
    address: str
    server: RpcServer
    run: asyncio.Task[None]
    files: FolderSource
    usage: KeptUsage
    worker_id: str = "w1"
    digest: str = DIGEST
    metadata: tuple[tuple[str, str], ...] = field(default_factory=lambda: auth_metadata(TOKEN))
    version: AssignedVersion = field(
        default_factory=lambda: AssignedVersion("null", "null", DIGEST, executor="null")
    )
    _sequence: int = 0

    async def assign(self, *versions: AssignedVersion) -> None:
        record = Assignment(self.worker_id, versions)
        await self.store.commit([Put(ASSIGNMENTS + self.worker_id, dump(record))])

    @property
    def table(self) -> SequenceTable:
        table = self.host.table(DIGEST)
        assert table is not None
        return table

    async def close(self) -> None:
        await self.client.close()
        self.run.cancel()
        await self.agent.close()
        await self.server.stop(0)
        await self.supervisor.close()
        assert self.supervisor.healthy, self.supervisor.failures

    async def registered(self) -> Worker:
        entry = await self.store.get(WORKERS + self.worker_id)
        assert entry is not None
        return load(entry.value, Worker)

    async def ready(self, timeout_s: float = 20.0) -> SequenceTable:
        await eventually(lambda: self.state() is VersionState.READY, timeout_s)
        return self.table

    def state(self, digest: str = DIGEST) -> VersionState | None:
        for version in self.agent.status().versions:
            if version.record.version_digest == digest:
                return version.record.state
        return None

    @property
    def engine_pid(self) -> int:
        return self.agent.status().versions[0].engine_pid

    def spec(
        self,
        *,
        prompt: Sequence[int] = tuple(range(32)),
        max_tokens: int = 32,
        credit: int = 1 << 20,
        kv_blocks: int = 4,
        stop: tuple[str, ...] = (),
        logprobs: int | None = None,
        produced: tuple[int, ...] = (),
        delivered_chars: int = 0,
        time_left_s: float | None = None,
        seed: int = 1,
        tenant: str = "t1",
        **grant: Any,
    ) -> StartSpec:
        self._sequence += 1
        values: dict[str, Any] = {
            "worker_id": self.worker_id,
            "address": self.address,
            "incarnation": self.host.grants.incarnation,
            "epoch": 7,
            "sequence": self._sequence,
            "kv_blocks": kv_blocks,
            "ttl_s": 5.0,
            "version_digest": DIGEST,
        }
        generation = GenerationSpec(
            request_id=f"r{self._sequence}",
            model="null",
            version_digest=DIGEST,
            route_revision=1,
            prompt=Prompt(list(prompt)),
            sampling=Sampling(seed, logprobs=logprobs),
            limits=OutputLimits(max_tokens, stop=stop),
        )
        return StartSpec(
            generation=generation,
            choice=0,
            tenant_id=tenant,
            grant=Grant(**{**values, **grant}),
            initial_credit_tokens=credit,
            produced_ids=produced,
            delivered_chars=delivered_chars,
            time_left_s=time_left_s,
        )


async def start_harness(
    model_dir: Path,
    settings: EngineSettings | None = None,
    *,
    assign: bool = True,
    memory_bytes: int = 2 * 1024**3,
    source: ModelSource | None = None,
    checks_texts: bool = False,
    telemetry: WorkerTelemetry | None = None,
    env: Mapping[str, str] | None = None,
    vllm_dir: Path | None = None,
) -> Harness:
    """Start a worker with the null executor, or with none until it is assigned a version. ``env``: of its
    engines."""
    clock = SystemClock()
    supervisor = Supervisor(clock)
    usage = KeptUsage()
    host = SequenceHost(changed=lambda: None, device=DeviceTime(DeviceKind("w1", "cpu", 0.36), usage, clock))
    store = MemoryStore(clock)
    address = f"127.0.0.1:{local_servers.free_port()}"
    files = FolderSource(model_dir)
    used: ModelSource = files if source is None else source
    texts = TextProcessCheck(clock, supervisor) if checks_texts else None
    engines = settings or EngineSettings(
        null_step_s=0.002, timeouts=EngineTimeouts(silence_s=20.0, shutdown_s=5.0)
    )
    agent = WorkerAgent(
        WorkerIdentity("w1", address, memory_bytes=memory_bytes),
        settings=engines,
        host=host,
        store=store,
        files=lambda version: VersionFiles(version, used, texts, clock, VersionTrust(store, clock)),
        launch=process_launcher(clock, supervisor, engines.timeouts, env, vllm_dir),
        clock=clock,
        supervisor=supervisor,
        telemetry=telemetry,
    )
    service = RpcService(
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
        worker_pb2_grpc.add_WorkerServiceServicer_to_server,
        WorkerServicer(host, agent, clock),
    )
    server = RpcServer((service,), listen=address, internal_token=TOKEN, new_incident=lambda: "incident")
    await server.start()
    client = MuxedWorkers(GrpcStreams(TOKEN), "g1", clock, supervisor)
    run = supervisor.spawn("agent", agent.run())
    harness = Harness(agent, host, store, client, supervisor, address, server, run, files, usage)
    await agent.wait_registered(5.0)
    if assign:
        await harness.assign(harness.version)
        await harness.ready()
    return harness


class Starter(Protocol):
    async def __call__(self, settings: EngineSettings | None = None, *, assign: bool = True) -> Harness: ...
