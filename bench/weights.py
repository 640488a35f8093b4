"""How long a version takes to reach many worker caches from a thin source, over the time of one copy.

Each cache is a process with a server of its own. The registry is in this process, and its source sends at a
stated rate. The bound is size over rate: no cache has the version before one copy has left the source.

1. In a swarm: ``time_over_bound`` of the slowest cache, ``origin_copies`` of the bytes that left the source.
2. With caches killed at 60 %, which start again on their folders: ``resumed_refetched_ratio`` is what they
   fetched twice, over the size.
3. A next version, 1 % of whose elements are others, to caches of which half have the one before:
   ``delta_bytes_ratio`` of what those receive, over the size.
4. By libtorrent with super-seeding, in the same way: ``vs_libtorrent`` is our time over its.
5. Each from the registry, with a smaller version: ``direct_time_over_bound``, ``direct_origin_copies``.

The last line is ``RESULT {json}``. Exit status 1 when an aim is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from bench.engines.peers.install import install
from bench.results import print_result
from fairway.client.publish.publish import publish
from fairway.v1 import registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc
from scripts.setup_env import pip
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.grpc.chunk_peers import ChunkPeers
from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.adapters.model_files.shared_chunks import ByteRate
from services.adapters.model_files.swarm import Swarm
from services.core.generation import Principal
from services.core.records import KeyRole
from services.core.swarm import ChunkPeer
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from services.rpc.channel import RoleChannel, auth_metadata, open_channel
from services.rpc.server import RpcServer, RpcService
from services.runtime.clock import SystemClock
from services.worker.chunk_servicer import ChunkServicer

AIMS: Final = {
    "time_over_bound": 1.3,
    "origin_copies": 1.2,
    "delta_bytes_ratio": 0.05,
    "resumed_refetched_ratio": 0.02,
    "vs_libtorrent": 1.0,
}
LIBTORRENT: Final = "libtorrent==2.1.1"
PEER: Final = Path(".fairway", "bench", "libtorrent")
CHANGED: Final = 0.01  # share of a next version's elements that are others
MODEL: Final = "weights"
TOKEN: Final = "b" * 40
MIB: Final = 2**20
KILL_AT: Final = 0.6
LIMIT_S: Final = 900.0


class PacedRegistry(RegistryService):
    """Sends at most ``rate`` bytes of chunks per second in all, and counts them. 0: as fast as it can."""

    rate = 0.0
    sent_bytes = 0
    _free_s = 0.0

    async def download(
        self, digest: str, offset_bytes: int = 0, *, base: str = ""
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().download(digest, offset_bytes, base=base)) as pieces:
            async for piece in pieces:
                if self.rate:
                    now_s = time.monotonic()
                    self._free_s = max(now_s, self._free_s) + len(piece) / self.rate
                    await asyncio.sleep(self._free_s - now_s)
                self.sent_bytes += len(piece)
                yield piece


# --- the process of one cache ---------------------------------------------------------------------


async def run_cache(options: argparse.Namespace) -> None:
    """Serve, fetch once a line arrives on stdin, and report every step as JSON until stdin ends."""
    clock, rng = SystemClock(), Random()
    peers, channel = ChunkPeers(TOKEN), RoleChannel(options.registry)
    client = RegistryClient(channel, TOKEN)
    swarm = Swarm(client, peers, ChunkPeer(options.listen), clock, rng)
    swarm.pace = Counted(0, clock)
    service = RpcService(
        worker_pb2.DESCRIPTOR.services_by_name["ChunkService"],
        worker_pb2_grpc.add_ChunkServiceServicer_to_server,
        ChunkServicer(swarm.shared),
    )
    server = RpcServer([service], listen=options.listen, internal_token=TOKEN, new_incident=lambda: "bench")
    await server.start()
    announcing = asyncio.create_task(swarm.announce())
    files = ModelFiles(client, options.root, clock, max_bytes=2**40, swarm=None if options.direct else swarm)
    _report(event="ready")
    await asyncio.to_thread(sys.stdin.readline)
    path = await files.fetch(
        MODEL, options.digest, progress=lambda ratio: _report(event="progress", ratio=ratio)
    )
    size_bytes = sum(file.stat().st_size for file in path.iterdir())
    _report(event="done", size_bytes=size_bytes)
    await asyncio.to_thread(sys.stdin.read)
    announcing.cancel()
    await server.stop(0)


class Counted(ByteRate):
    """Reports what arrived, of chunks that are not complete too."""

    taken_bytes = 0

    async def take(self, size_bytes: int) -> None:
        self.taken_bytes += size_bytes
        _report(event="received", bytes=self.taken_bytes)
        await super().take(size_bytes)


def _report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


# --- the registry, and what it measures -----------------------------------------------------------


@dataclass
class Cache:
    """A process. ``ratio`` is the last progress that it reported."""

    process: asyncio.subprocess.Process
    log: Path
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    has_part: asyncio.Event = field(default_factory=asyncio.Event)  # ``KILL_AT`` of the bytes
    done: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ratio: float = 0.0
    done_s: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0
    size_bytes: int = 1

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if not line.startswith(b'{"event"'):
                continue
            found = json.loads(line)
            if found["event"] == "ready":
                self.ready.set()
            elif found["event"] == "progress":
                self.ratio = found["ratio"]
                if self.ratio >= KILL_AT:
                    self.has_part.set()
            elif found["event"] == "done":
                self.done_s, self.size_bytes = time.monotonic(), found["size_bytes"]
                self.done.set()
            elif found["event"] == "received":
                self.received_bytes = found["bytes"]
            elif found["event"] == "sent":
                self.sent_bytes = found["bytes"]
        self.ended.set()
        for waited in (self.ready, self.has_part, self.done):
            waited.set()

    async def finish(self) -> None:
        """Return once it has the version. Raises RuntimeError with the end of its log if it ended before."""
        await self.done.wait()
        if not self.done_s:
            raise RuntimeError(f"a cache ended: {self.log.read_text()[-2000:]}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    async def stop(self) -> None:
        """End its input, and return once it has reported what it sent."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.ended.wait()

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self.ended.wait()


@dataclass
class Bench:
    """A registry, a folder for the caches, and the processes that run."""

    registry: PacedRegistry
    address: str
    root: Path
    caches: list[Cache] = field(default_factory=list)
    reading: list[asyncio.Task[None]] = field(default_factory=list)

    def folder(self, seed: int) -> Path:
        return self.root / f"model-{seed}"

    async def published(self, size_bytes: int, seed: int, *, after: int | None = None) -> str:
        """Return the digest of a new version of that size; ``after``: a change of the one of another seed."""
        rng, elements = np.random.default_rng(seed), size_bytes // 4
        data = np.random.default_rng(seed if after is None else after).integers(
            2**32, size=elements, dtype="u4"
        )
        if after is not None:
            changed = rng.random(elements) < CHANGED
            data[changed] = rng.integers(2**32, size=int(changed.sum()), dtype="u4")
        folder = self.folder(seed)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        header = json.dumps({"w": {"dtype": "U32", "shape": [elements], "data_offsets": [0, 4 * elements]}})
        length = len(header).to_bytes(8, "little")
        (folder / "model.safetensors").write_bytes(length + header.encode() + data.tobytes())
        self.registry.rate = 0.0
        async with open_channel(self.address) as channel:
            key = auth_metadata("admin")
            done = await publish(channel, folder, MODEL, metadata=key, for_another_engine=True)
        return done.digest

    async def start(self, name: str, digest: str, port: int, *, direct: bool = False) -> Cache:
        command = [sys.executable, "-m", "bench.weights", "--cache", "--registry", self.address]
        command += ["--root", str(self.root / name), "--digest", digest, "--listen", f"127.0.0.1:{port}"]
        return await self.run(*command, *(["--direct"] if direct else []))

    async def run(self, *command: str) -> Cache:
        """Return a process that has reported that it is ready."""
        pipe, log = asyncio.subprocess.PIPE, self.root / f"{len(self.caches)}.log"
        with log.open("w") as written:
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=written)
        cache = Cache(process, log)
        self.caches.append(cache)
        self.reading.append(asyncio.create_task(cache.read()))
        async with asyncio.timeout(LIMIT_S):
            await cache.ready.wait()
        return cache

    async def end(self) -> None:
        for cache in self.caches:
            await cache.end()
        await asyncio.gather(*self.reading)
        self.caches.clear()
        self.reading.clear()


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[Bench]:
    clock = SystemClock()
    registry = PacedRegistry(MemoryStore(clock), FolderBlobs(root / "blobs"), clock)
    service = RpcService(
        registry_pb2.DESCRIPTOR.services_by_name["RegistryService"],
        registry_pb2_grpc.add_RegistryServiceServicer_to_server,
        RegistryServicer(registry),
    )
    server = RpcServer(
        [service],
        listen="127.0.0.1:0",
        internal_token=TOKEN,
        new_incident=lambda: "bench",
        authenticate=lambda _: Principal("admin", KeyRole.ADMIN),
    )
    await server.start()
    bench = Bench(registry, f"127.0.0.1:{server.port}", root)
    try:
        yield bench
    finally:
        await bench.end()
        await server.stop(0)


@dataclass(frozen=True)
class Distribution:
    """One run. ``kills`` caches are killed at ``KILL_AT`` and start again; ``direct``: without a swarm."""

    size_bytes: int
    seed: int
    kills: int = 0
    direct: bool = False


async def restarted(bench: Bench, cache: Cache, name: str, digest: str, port: int) -> tuple[Cache, float]:
    """Kill a cache in the midst; return its successor, and the ratio of all bytes that both received."""
    await cache.has_part.wait()
    await cache.end()
    again = await bench.start(name, digest, port)
    again.go()
    await again.finish()
    return again, (cache.received_bytes + again.received_bytes) / again.size_bytes


async def distribute(
    bench: Bench, options: argparse.Namespace, what: Distribution
) -> tuple[float, float, float]:
    """Return time over bound, copies that left the source, and what killed caches fetched twice."""
    digest, rate = await bench.published(what.size_bytes, what.seed), options.rate_mib * MIB
    places = [(f"{what.seed}-{number}", digest, options.port + number) for number in range(options.nodes)]
    caches = await asyncio.gather(*(bench.start(*place, direct=what.direct) for place in places))
    bench.registry.rate, bench.registry.sent_bytes = rate, 0
    began_s = time.monotonic()
    for cache in caches:
        cache.go()
    async with asyncio.timeout(LIMIT_S):
        kills = (restarted(bench, caches[at], *places[at]) for at in range(what.kills))
        killed = await asyncio.gather(*kills)
        caches[: what.kills] = [again for again, _ in killed]
        for cache in caches:
            await cache.finish()
    slowest_s = max(cache.done_s for cache in caches) - began_s
    copies = bench.registry.sent_bytes / what.size_bytes
    await bench.end()
    twice = sum(max(0.0, ratio - 1.0) for _, ratio in killed) / max(1, what.kills)
    return slowest_s / (what.size_bytes / rate), copies, twice


async def by_delta(bench: Bench, options: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Send a change of the version of ``seed`` to its caches and as many without; return time over bound, and
    the ratio of the size that the former received."""
    size_bytes, rate, half = options.size_mib * MIB, options.rate_mib * MIB, options.nodes // 2
    digest = await bench.published(size_bytes, seed + 1, after=seed)
    names = [f"{seed}-{at}" if at < half else f"{seed + 1}-{at}" for at in range(options.nodes)]
    caches = await asyncio.gather(
        *(bench.start(name, digest, options.port + at) for at, name in enumerate(names))
    )
    bench.registry.rate = rate
    began_s = time.monotonic()
    for cache in caches:
        cache.go()
    async with asyncio.timeout(LIMIT_S):
        for cache in caches:
            await cache.finish()
    slowest_s = max(cache.done_s for cache in caches) - began_s
    received = sum(cache.received_bytes for cache in caches[:half]) / half
    await bench.end()
    return slowest_s / (size_bytes / rate), received / size_bytes


async def by_torrent(bench: Bench, options: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Return time over bound and copies that left the source, of the files of a version by libtorrent."""
    there = await asyncio.to_thread(torrent_python)
    size_bytes, rate = options.size_mib * MIB, options.rate_mib * MIB
    addresses = [f"127.0.0.1:{options.port + at}" for at in range(options.nodes + 1)]
    processes = []
    for at, address in enumerate(addresses):
        place = ["--upload-bytes-per-s", str(int(rate))]
        if at:
            place = ["--root", str(bench.root / f"torrent-{at}")]
            Path(place[1]).mkdir()
        command = [there, "bench/torrent.py", "--folder", str(bench.folder(seed)), "--listen", address]
        processes.append(await bench.run(*command, *place, *addresses))
    began_s = time.monotonic()
    for process in processes:
        process.go()
    async with asyncio.timeout(LIMIT_S):
        for process in processes[1:]:
            await process.finish()
    slowest_s = max(process.done_s for process in processes[1:]) - began_s
    await processes[0].stop()
    copies = processes[0].sent_bytes / size_bytes
    await bench.end()
    return slowest_s / (size_bytes / rate), copies


def torrent_python() -> str:
    """Return the interpreter of libtorrent's environment, which is made where it is missing."""

    def fill(python: str, _: Path) -> None:
        pip(python, ["install", LIBTORRENT])

    install(PEER, LIBTORRENT, fill)
    return str(PEER / "bin" / "python")


async def run(options: argparse.Namespace) -> dict[str, float]:
    size_bytes = options.size_mib * MIB
    with tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder:
        async with opened(Path(folder)) as bench:
            ratio, copies, _ = await distribute(bench, options, Distribution(size_bytes, 1))
            print(f"in a swarm: {ratio:.2f} of the bound, {copies:.2f} copies from the source", flush=True)
            resumed = Distribution(size_bytes, 4, kills=options.kills)
            killed, _, refetched = await distribute(bench, options, resumed)
            print(f"with kills: {killed:.2f} of the bound, {refetched:.4f} fetched twice", flush=True)
            changed, delta = await by_delta(bench, options, 1)
            print(f"a next version: {changed:.2f} of the bound, {delta:.4f} of it as deltas", flush=True)
            torrent, torrent_copies = await by_torrent(bench, options, 1)
            print(f"libtorrent: {torrent:.2f} of the bound, {torrent_copies:.2f} copies", flush=True)
            alone = Distribution(options.direct_mib * MIB, 5, direct=True)
            direct, direct_copies, _ = await distribute(bench, options, alone)
    found = {
        "time_over_bound": ratio,
        "origin_copies": copies,
        "killed_time_over_bound": killed,
        "delta_time_over_bound": changed,
        "delta_bytes_ratio": delta,
        "resumed_refetched_ratio": refetched,
        "vs_libtorrent": ratio / torrent,
        "libtorrent_time_over_bound": torrent,
        "libtorrent_origin_copies": torrent_copies,
        "direct_time_over_bound": direct,
        "direct_origin_copies": direct_copies,
    }
    stated = {"nodes": options.nodes, "size_mib": options.size_mib, "source_mib_per_s": options.rate_mib}
    return {**{name: round(value, 4) for name, value in found.items()}, **stated}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rate-mib", type=float, default=3.0, help="rate of the source, MiB/s")
    parser.add_argument("--kills", type=int, default=5, help="caches that are killed at 60 %%")
    parser.add_argument(
        "--direct-mib", type=int, default=32, help="size of the version that each fetches alone"
    )
    parser.add_argument("--port", type=int, default=23_100, help="first port of the caches")
    for hidden in ("--cache", "--direct"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--registry", "--digest", "--listen"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cache:
        asyncio.run(run_cache(options))
        return 0
    found = asyncio.run(run(options))
    print_result(found)
    missed = [name for name, most in AIMS.items() if found[name] > most]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
