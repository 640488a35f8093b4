"""A worker's process around a simulated engine: it registers, serves, and comes back from what befalls it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from services.adapters.memory.store import MemoryStore
from services.core.estimates.cost_model import PRESETS
from services.core.generation import (
    FinishReason,
    GenerationSpec,
    Grant,
    NotAdmittedReason,
    OutputLimits,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
)
from services.core.records import ASSIGNMENTS, WORKERS, VersionState, Worker, dump, load
from services.ports.store import Put
from simulator.engine.sim_engine import SimEngineSpec
from simulator.engine.sim_worker import SimVersion, SimWorker, SimWorkerSpec
from simulator.engine.tokens import output_tokens
from simulator.fleet.nodes.worker_node import _PlainText
from simulator.kernel.links.store_link import StoreServer
from simulator.kernel.loop import VirtualTimeLoop, run
from simulator.kernel.network import Latency, Network
from simulator.kernel.process import Process

DIGEST = "sha256:" + "ab" * 32
ENGINE = SimEngineSpec(PRESETS["h100"], kv_blocks=512, vocab_size=32_000, eos_id=2)


class Client:
    """Reads one stream of the worker as a gateway would, in its process."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self._grants = 0
        self._stream = worker.host.open(self._read)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, SequenceEnd] = {}
        self.refusals: dict[int, NotAdmittedReason] = {}

    def start(self, handle: int, *, prompt: int, output: int) -> None:
        self._grants += 1
        grant = Grant(
            worker_id="worker-0",
            address="worker-0",
            incarnation=self._worker.host.grants.incarnation,
            epoch=1,
            sequence=self._grants,
            kv_blocks=40,
            ttl_s=5.0,
            version_digest=DIGEST,
        )
        generation = GenerationSpec(
            request_id=f"r{handle}",
            model="m",
            version_digest=DIGEST,
            route_revision=1,
            prompt=Prompt(range(prompt)),
            sampling=Sampling(seed=handle),
            limits=OutputLimits(output),
        )
        self._stream.start(handle, StartSpec(generation, 0, "tenant", grant, 1 << 20))

    def _read(self) -> None:
        asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        while (frame := self._stream.take()) is not None:
            at = 0
            for handle, count in zip(frame.handles, frame.counts, strict=True):
                self.tokens.setdefault(handle, []).extend(frame.ids[at : at + count])
                at += count
            self.ends |= dict(frame.finished)
            self.refusals |= dict(frame.not_admitted)


def play(story: Callable[[SimWorker, Client, MemoryStore, Process], Coroutine[Any, Any, None]]) -> None:
    """Run a story around one registered worker."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        network = Network(loop, Random("network"), Latency(base_s=0.0002, jitter_s=0.0001))
        keeper = Process("store", loop, Random("store"))
        store = keeper.run(MemoryStore, keeper.clock)
        keeper.run(StoreServer, keeper, network, store)
        process = Process("worker-0", loop, Random("worker"))
        version = SimVersion("d", "m", DIGEST, ENGINE, restart_s=2.0)
        spec = SimWorkerSpec("worker-0", "worker-0", (version,), device_type="h100")
        await store.commit([Put(ASSIGNMENTS + "worker-0", dump(spec.assignment))])
        worker = process.run(lambda: SimWorker(spec, process, network, vocabulary=_PlainText()))
        process.run(worker.start)
        client = process.run(Client, worker)
        await asyncio.sleep(2.0)
        assert worker.host.grants.incarnation > 0
        await story(worker, client, store, process)
        worker.check_integrity()

    run(main())


def hang(worker: SimWorker) -> None:
    for engine in worker.engines.running():
        engine.hang()


def unhang(worker: SimWorker) -> None:
    for engine in worker.engines.running():
        engine.unhang()


async def published(store: MemoryStore) -> Worker:
    entry = await store.get(WORKERS + "worker-0")
    assert entry is not None
    return load(entry.value, Worker)


def test_it_registers_and_serves() -> None:
    async def story(worker: SimWorker, client: Client, store: MemoryStore, process: Process) -> None:
        assert [version.state for version in (await published(store)).versions] == [VersionState.READY]
        for handle in range(4):
            process.run(client.start, handle, prompt=100, output=50)
        await asyncio.sleep(5.0)
        assert {handle: end.reason for handle, end in client.ends.items()} == dict.fromkeys(
            range(4), FinishReason.LENGTH
        )
        for handle in range(4):
            due = output_tokens(handle, 0, 50, vocab_size=32_000, eos_id=2)
            assert client.tokens[handle] == due

    play(story)


def test_a_crashed_engine_loses_its_sequences_and_comes_back() -> None:
    async def story(worker: SimWorker, client: Client, store: MemoryStore, process: Process) -> None:
        process.run(client.start, 1, prompt=100, output=4000)
        await asyncio.sleep(1.0)
        process.run(worker.engines.crash)
        await asyncio.sleep(0.2)
        assert client.ends[1].reason is FinishReason.ENGINE_LOST
        assert client.tokens[1] == output_tokens(1, 0, len(client.tokens[1]), vocab_size=32_000, eos_id=2)
        assert [version.state for version in (await published(store)).versions] == [VersionState.RESTARTING]
        process.run(client.start, 2, prompt=10, output=5)
        await asyncio.sleep(0.1)
        assert client.refusals == {2: NotAdmittedReason.NOT_READY}
        await asyncio.sleep(3.0)
        assert [version.state for version in (await published(store)).versions] == [VersionState.READY]
        process.run(client.start, 3, prompt=10, output=5)
        await asyncio.sleep(1.0)
        assert client.ends[3].reason is FinishReason.LENGTH

    play(story)


def test_an_engine_that_hangs_gives_its_sequences_back_and_is_killed() -> None:
    async def story(worker: SimWorker, client: Client, store: MemoryStore, process: Process) -> None:
        process.run(client.start, 1, prompt=100, output=4000)
        await asyncio.sleep(1.0)
        process.run(hang, worker)
        await asyncio.sleep(4.0)
        assert not worker.host.takes(DIGEST)
        assert not client.ends
        await asyncio.sleep(3.0)
        assert client.ends[1].reason is FinishReason.ENGINE_LOST
        await asyncio.sleep(18.0)
        assert [version.engine_restarts for version in (await published(store)).versions] == [1]
        assert worker.host.takes(DIGEST)

    play(story)


def test_an_engine_that_wakes_in_time_goes_on() -> None:
    async def story(worker: SimWorker, client: Client, store: MemoryStore, process: Process) -> None:
        process.run(client.start, 1, prompt=100, output=600)
        await asyncio.sleep(1.0)
        process.run(hang, worker)
        await asyncio.sleep(4.0)
        process.run(unhang, worker)
        await asyncio.sleep(10.0)
        assert client.ends[1].reason is FinishReason.LENGTH
        assert client.tokens[1] == output_tokens(1, 0, 600, vocab_size=32_000, eos_id=2)
        assert [version.engine_restarts for version in (await published(store)).versions] == [0]

    play(story)


def test_a_draining_worker_finishes_and_takes_nothing() -> None:
    async def story(worker: SimWorker, client: Client, store: MemoryStore, process: Process) -> None:
        process.run(client.start, 1, prompt=100, output=200)
        await asyncio.sleep(0.1)
        drained = process.spawn("drain", worker.drain(30.0))
        await asyncio.sleep(0.1)
        process.run(client.start, 2, prompt=100, output=200)
        assert await drained == 0
        await asyncio.sleep(0.1)
        assert client.refusals == {2: NotAdmittedReason.DRAINING}
        assert client.ends[1].reason is FinishReason.LENGTH
        assert (await published(store)).draining

    play(story)
