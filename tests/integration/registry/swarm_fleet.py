"""Nodes that fetch a version from a registry and from each other, over sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from fairway.v1 import worker_pb2, worker_pb2_grpc
from services.adapters.blobs.folder import FolderBlobs
from services.adapters.grpc.chunk_peers import ChunkPeers
from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.adapters.model_files.shared_chunks import SharedChunks
from services.adapters.model_files.swarm import Swarm
from services.core.manifest import CHUNK_BYTES
from services.core.swarm import ChunkPeer
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from services.rpc.channel import RoleChannel
from services.rpc.server import RpcServer, RpcService, ServerTls
from services.runtime.certificates import Certificates
from services.runtime.clock import SystemClock
from services.worker.chunk_servicer import ChunkServicer
from tests.integration.registry.harness import publish_any
from tests.support.local_servers import free_port
from tests.support.model_folder import write_model
from tests.support.registry import ADMIN, TOKEN, Served, served

CLOCK = SystemClock()
CHUNKS = 12  # of the weights; the small files are one chunk each
MODEL = "tiny"


class Origin(FolderBlobs):
    """Counts what leaves it, at most so many bytes per second; ``spoil`` sends other bytes of a chunk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sent = Counter[str]()
        self.rate = 40 * 2**20
        self._free_s = 0.0

    async def get(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        self.sent[digest] += 1
        async with aclosing(super().get(digest, offset_bytes)) as pieces:
            async for piece in pieces:
                now_s = time.monotonic()
                self._free_s = max(now_s, self._free_s) + len(piece) / self.rate
                await asyncio.sleep(self._free_s - now_s)
                yield piece


class Rubbish(SharedChunks):
    """Sends other bytes."""

    async def pieces(self, digest: str, index: int, base_digest: str = "") -> AsyncGenerator[bytes, None]:
        async with aclosing(super().pieces(digest, index, base_digest)) as pieces:
            async for piece in pieces:
                self.sent_bytes += 1
                yield bytes([piece[0] ^ 1]) + piece[1:]


class Stalling(SharedChunks):
    """Sends a piece and no more."""

    async def pieces(self, digest: str, index: int, base_digest: str = "") -> AsyncGenerator[bytes, None]:
        async with aclosing(super().pieces(digest, index, base_digest)) as pieces:
            yield await anext(pieces)
            await asyncio.sleep(3600)


@dataclass
class Node:
    """One worker's cache with its server. ``kill`` leaves its disk as it is."""

    files: ModelFiles
    swarm: Swarm
    server: RpcServer
    peers: ChunkPeers
    channel: RoleChannel
    announcing: asyncio.Task[None]
    fetching: asyncio.Task[Path] | None = None

    def fetch(self, digest: str) -> asyncio.Task[Path]:
        self.fetching = asyncio.create_task(self.files.fetch(MODEL, digest))
        return self.fetching

    async def kill(self) -> None:
        tasks = [task for task in (self.announcing, self.fetching) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.server.stop(0)
        await self.peers.close()
        await self.channel.close()
        self.files.close()


@dataclass
class Fleet:
    registry: Served
    origin: Origin
    root: Path
    open: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def node(
        self,
        name: str,
        chunks: type[SharedChunks] = SharedChunks,
        *,
        up: int = 0,
        down: int = 0,
        certificates: Certificates | None = None,
        serves: bool = True,
    ) -> Node:
        """Return a node with a disk of its own; with ``certificates`` it takes and makes secured calls."""
        address = f"127.0.0.1:{free_port()}"
        peers, channel = ChunkPeers(TOKEN, certificates), RoleChannel(self.registry.address)
        client = RegistryClient(channel, TOKEN)
        swarm = Swarm(client, peers, ChunkPeer(address), CLOCK, Random(name), download_bytes_per_s=down)
        swarm.shared = chunks(CLOCK, bytes_per_s=up)
        service = RpcService(
            worker_pb2.DESCRIPTOR.services_by_name["ChunkService"],
            worker_pb2_grpc.add_ChunkServiceServicer_to_server,
            ChunkServicer(swarm.shared),
        )
        server = RpcServer(
            [service] if serves else [],
            listen=address,
            internal_token=TOKEN,
            new_incident=lambda: "inc",
            tls=None if certificates is None else ServerTls(certificates, CLOCK),
        )
        await server.start()
        files = ModelFiles(client, self.root / name, CLOCK, max_bytes=10**9, swarm=swarm)
        node = Node(files, swarm, server, peers, channel, asyncio.create_task(swarm.announce()))
        self.open.push_async_callback(node.kill)
        return node

    async def nodes(self, count: int, *, down: int = 0) -> list[Node]:
        return [await self.node(f"node-{number}", down=down) for number in range(count)]

    def copies(self, digest: str) -> float:
        """What left the origin, by the chunks that did, without the manifest."""
        chunks = [times for name, times in self.sent.items() if name != digest]
        return sum(chunks) / len(chunks)

    @property
    def sent(self) -> Counter[str]:
        return self.origin.sent


@asynccontextmanager
async def fleet_in(
    root: Path, *, make_servicer: Callable[[RegistryService], RegistryServicer] = RegistryServicer
) -> AsyncIterator[Fleet]:
    """Yield a fleet without nodes, whose registry has a thin disk."""
    origin = Origin(root / "blobs")
    async with served(MemoryStore(CLOCK), origin, CLOCK, make_servicer=make_servicer) as registry:
        found = Fleet(registry, origin, root)
        async with found.open:
            yield found


def weights_in(root: Path) -> Path:
    return write_model(root, weight_bytes=CHUNKS * CHUNK_BYTES)


async def published(fleet: Fleet, folder: Path) -> str:
    done = await publish_any(fleet.registry.channel, folder, MODEL, metadata=ADMIN)
    fleet.sent.clear()
    return done.digest
