"""This node's part in the swarms of its versions: it fetches chunks as the tracker orders, and reports.

While no registry answers, chunks are requested from the peers that are known, at random, until it is back.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from random import Random
from typing import Final, NoReturn

import structlog

from fairway.task_group import TaskGroup
from services.adapters.grpc.chunk_peers import ChunkPeers
from services.adapters.grpc.registry_client import RegistryClient
from services.adapters.model_files.shared_chunks import (
    PIECE_BYTES,
    ByteRate,
    ChunkBase,
    SharedChunks,
    SharedVersion,
)
from services.adapters.threads import in_thread
from services.core.errors import DeadlineExceeded, FairwayError, IntegrityError, NotFound, Unavailable
from services.core.swarm import (
    AVOID_S,
    MAX_ORDERS,
    ChunkOrder,
    ChunkOrders,
    ChunkPeer,
    ChunkReport,
    FailedChunk,
)
from services.ports.clock import Clock

log = structlog.get_logger()

Take = Callable[[int, bytes], Awaitable[None]]

STALL_S: Final = 5.0  # time without a byte after which a peer has stalled
LEAST_BYTES_PER_S: Final = PIECE_BYTES  # rate of a peer after STALL_S; a bounded node sends at 8 times it
BUSY_S: Final = 15.0  # time without a chunk after which a peer that answered "busy" thrice has failed
CHUNK_S: Final = 60.0  # longest time that is waited for the bytes of a chunk
PATIENCE_S: Final = 60.0  # longest time without a chunk from any source
PARALLEL: Final = 8  # most chunks that are received at once
_REGISTRY_STALL_S: Final = 30.0  # longest wait of a chunk for its turn there
_LEAST_ORDERS: Final = 8
_TRIED: Final = 8  # chunks with a base after which it is judged
_RETRY_S: Final = 0.5
_UNTRACKED: Final = 2  # orders to a registry that does not track
_ANNOUNCE_RETRY_S: Final = 5.0
_LOOK_S: Final = 1.0
_MOST_GAINED: Final = 4096  # most chunks of one report


class Swarm:
    """All versions that this node shares; one per process. ``announce`` has to run."""

    def __init__(
        self,
        registry: RegistryClient,
        peers: ChunkPeers,
        node: ChunkPeer,
        clock: Clock,
        rng: Random,
        *,
        upload_bytes_per_s: int = 0,
        download_bytes_per_s: int = 0,
    ) -> None:
        """``node`` is how others reach this one."""
        self.shared = SharedChunks(clock, bytes_per_s=upload_bytes_per_s)
        self.received_bytes = Counter[str]()  # verified: from_registry, from_peer
        self.registry = registry
        self.peers = peers
        self.node = node
        self.clock = clock
        self.rng = rng
        self.pace = ByteRate(download_bytes_per_s, clock)
        self._changed = asyncio.Event()

    async def fetch(self, version: SharedVersion, take: Take) -> None:
        """Return once the node has every chunk, or got none for ``PATIENCE_S`` although the registry answers:
        then the registry alone may send the rest. ``take`` stores a verified chunk.

        What arrives is shared at once. Raises Unavailable after ``PATIENCE_S`` without chunk and registry,
        IntegrityError for a chunk that the registry sent damaged twice, and what ``take`` raises and what
        refuses the reports.
        """
        self.shared.versions[version.key] = version
        version.is_fetching = True
        try:
            await _Fetch(self, version, take).run()
        finally:
            version.is_fetching, version.due_s = False, 0.0
            self._changed.set()

    def share(self, version: SharedVersion) -> None:
        """Share a version that is complete, unless it is shared already."""
        version.add_all()
        if self.shared.versions.setdefault(version.key, version) is version:
            self._changed.set()

    def traffic(self) -> Sequence[tuple[tuple[str], float]]:
        """Return the bytes of verified chunks received, by source, and of those sent."""
        way = {**self.received_bytes, "to_peer": self.shared.sent_bytes}
        return [((name,), float(size_bytes)) for name, size_bytes in way.items()]

    def drop_base(self, version: SharedVersion) -> None:
        """Fetch and share the version as nodes without its base do; those with it may request it on."""
        version.base, version.sends_bitmap = ChunkBase(), True
        version.failed.clear()
        self.shared.versions[version.key] = version

    def leave(self, digest: str) -> None:
        """Share no more what has chunks of the version. The tracker forgets this node in time."""
        for key in [key for key in self.shared.versions if digest in key]:
            del self.shared.versions[key]

    async def report(self, version: SharedVersion, fetching: tuple[int, ...], wanted: int) -> ChunkOrders:
        """Report what changed. What was not received is part of the next report."""
        have = version.bitmap() if version.sends_bitmap else b""
        gained, failed = tuple(version.gained[:_MOST_GAINED]), tuple(version.failed[:MAX_ORDERS])
        report = ChunkReport(self.node, have, gained, fetching, failed, wanted)
        answer = await self.registry.exchange_chunks(
            version.model, version.digest, report, base_digest=version.base.digest
        )
        del version.gained[: len(gained)], version.failed[: len(failed)]
        version.sends_bitmap = answer.resend
        return answer

    async def announce(self) -> NoReturn:
        """Report the versions that are not being fetched, until cancelled."""
        while True:
            for version in list(self.shared.versions.values()):
                if not version.is_fetching and version.due_s <= self.clock.monotonic_s():
                    await self._announce(version)
            self._changed.clear()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _announce(self, version: SharedVersion) -> None:
        try:
            answer = await self.report(version, (), 0)
            wait_s = 0.0 if answer.resend else answer.next_report_s
        except FairwayError as error:
            log.info("model_chunks.not_announced", digest=version.digest, error=error.message)
            wait_s = _ANNOUNCE_RETRY_S
        version.due_s = self.clock.monotonic_s() + wait_s


class _Fetch:
    """One fetch: a task that reports and queues orders, and up to ``PARALLEL`` that carry them out."""

    def __init__(self, swarm: Swarm, version: SharedVersion, take: Take) -> None:
        self._swarm = swarm
        self._version = version
        self._take = take
        self._clock = swarm.clock
        self._lacking = dict.fromkeys(version.lacking())
        # The orders that are queued or carried out, by chunk, and of each whether no tracker made it.
        self._open: dict[int, bool] = {}
        self._queue: asyncio.Queue[ChunkOrder] = asyncio.Queue()
        self._peers: tuple[ChunkPeer, ...] = ()
        self._avoided: dict[str, float] = {}  # time until which a peer is avoided, by address
        self._busy: dict[str, list[float]] = {}  # times of its answers "busy" since a chunk, by address
        self._damaged = Counter[int]()  # damaged receipts from the registry, by chunk
        self._deltas: list[float] = []  # bytes received over size, of the first chunks with a base
        self._is_tracked = True  # whether the registry answered last
        self._done = asyncio.Event()
        self._moved_s = self._clock.monotonic_s()
        self._error: FairwayError = Unavailable("neither the registry nor a peer sends chunks")

    async def run(self) -> None:
        try:
            async with TaskGroup() as group:
                count = self._swarm.pace.at_once(PARALLEL)
                workers = [group.create_task(self._work()) for _ in range(count)]
                await self._steer()
                for worker in workers:
                    worker.cancel()
        except BaseExceptionGroup as errors:  # the rest are consequences of the first
            raise errors.exceptions[0] from None

    async def _steer(self) -> None:
        """Report and queue orders for two intervals at the present rate, until nothing is lacking."""
        most, before, before_s = _LEAST_ORDERS, len(self._lacking), self._clock.monotonic_s()
        while self._lacking:
            wait_s = await self._report(most - len(self._open))
            try:
                async with asyncio.timeout(wait_s):
                    await self._done.wait()
            except TimeoutError:
                pass
            now_s = self._clock.monotonic_s()
            per_s = (before - len(self._lacking)) / max(1e-3, now_s - before_s)
            most = min(MAX_ORDERS, max(_LEAST_ORDERS, math.ceil(2.0 * wait_s * per_s)))
            before, before_s = len(self._lacking), now_s
            if now_s > self._moved_s + PATIENCE_S:
                await self._report(0)  # what failed last is not lost with this fetch
                if not self._is_tracked:
                    raise self._error
                log.warning("model_chunks.stalled", digest=self._version.digest, error=self._error.message)
                return

    async def _report(self, wanted: int) -> float:
        """Return the time until the next report."""
        try:
            answer = await self._swarm.report(self._version, tuple(self._open), max(0, wanted))
        except (Unavailable, DeadlineExceeded) as error:
            if self._is_tracked:
                log.warning("model_chunks.not_tracked", digest=self._version.digest, error=error.message)
            self._error, self._is_tracked = error, False
            self._request_at_random(wanted)
            return _RETRY_S
        self._is_tracked = True
        self._peers = answer.peers or self._peers
        for order in answer.orders:
            self._add(order)
        return answer.next_report_s

    def _request_at_random(self, wanted: int) -> None:
        """Queue orders to known peers; without any, a few to the registry, which may lack its store alone."""
        now_s, rng = self._clock.monotonic_s(), self._swarm.rng
        others = [peer for peer in self._peers if peer.address != self._swarm.node.address]
        peers = [peer for peer in others if self._avoided.get(peer.address, now_s) <= now_s]
        lacking = [index for index in self._lacking if index not in self._open]
        most = min(wanted if peers else _UNTRACKED, len(lacking))
        for index in rng.sample(lacking, max(0, most)):
            self._add(ChunkOrder(index, rng.choice(peers) if peers else None), is_guess=True)

    def _add(self, order: ChunkOrder, *, is_guess: bool = False) -> None:
        if order.index in self._lacking and order.index not in self._open:
            self._open[order.index] = is_guess
            self._queue.put_nowait(order)

    async def _work(self) -> NoReturn:
        while True:
            order = await self._queue.get()
            try:
                await self._carry_out(order)
            finally:
                del self._open[order.index]

    async def _carry_out(self, order: ChunkOrder) -> None:
        index, version = order.index, self._version
        digest, of = version.chunks[index], version.base
        base = await in_thread(of.read, digest)
        # A peer may send a delta, which is of no use without its base.
        peer = None if base is None and digest in of.places else order.peer
        try:
            data, wire_bytes = await self._receive(index, peer, of, base)
        except (FairwayError, TimeoutError) as error:
            self._fail(index, peer, error)
            return
        await self._take(index, data)
        self._swarm.received_bytes["from_registry" if peer is None else "from_peer"] += wire_bytes
        version.add(index)
        del self._lacking[index]
        if peer is not None:
            self._busy.pop(peer.address, None)
        if base is not None:
            self._try_base(wire_bytes / len(data))
        self._moved_s = self._clock.monotonic_s()
        if not self._lacking:
            self._done.set()

    def _try_base(self, ratio: float) -> None:
        """Drop the base once its first deltas save less than half: one swarm for all is then worth more."""
        if len(self._deltas) < _TRIED:
            self._deltas.append(ratio)
            if len(self._deltas) == _TRIED and sum(self._deltas) > _TRIED / 2:
                log.info("model_chunks.base_dropped", digest=self._version.digest)
                self._swarm.drop_base(self._version)
                self._peers = ()
                self._drop_queued()

    def _fail(self, index: int, peer: ChunkPeer | None, error: FairwayError | TimeoutError) -> None:
        """Report a chunk that did not come, and avoid a peer that is to blame.

        Raises IntegrityError for a chunk that the registry damaged twice.
        """
        if peer is None and isinstance(error, IntegrityError):
            self._damaged[index] += 1
            if self._damaged[index] > 1:
                raise error
        # A peer that lacks a chunk misled the tracker; requested at random, it did not.
        is_guess = isinstance(error, NotFound) and self._open[index]
        now_s = self._clock.monotonic_s()
        is_busy = isinstance(error, Unavailable) and error.retry_after_s is not None
        if peer is not None and is_busy:
            times = [*(at_s for at_s in self._busy.get(peer.address, ()) if at_s > now_s - AVOID_S), now_s]
            self._busy[peer.address] = times
            is_busy = len(times) < 3 or now_s < times[0] + BUSY_S
        address = "" if peer is None or is_guess or is_busy else peer.address
        if address:
            self._avoided[address] = now_s + AVOID_S
            self._busy.pop(address, None)
            self._drop_queued(address)
            log.warning("model_chunk.peer_failed", peer=address, chunk=index, error=repr(error))
        elif peer is None and isinstance(error, FairwayError):
            self._error = error
        self._version.failed.append(FailedChunk(index, address))

    def _drop_queued(self, address: str = "") -> None:
        """Drop what is queued of a peer, or of all: what is not reported as fetched is ordered of others."""
        for order in [self._queue.get_nowait() for _ in range(self._queue.qsize())]:
            if order.peer is not None and address in ("", order.peer.address):
                del self._open[order.index]
            else:
                self._queue.put_nowait(order)

    async def _receive(
        self, index: int, peer: ChunkPeer | None, of: ChunkBase, base: bytes | None
    ) -> tuple[bytes, int]:
        """Return a verified chunk from a peer or the registry, and the bytes that were received for it.

        Raises TimeoutError, IntegrityError, and what the source raises.
        """
        version, swarm = self._version, self._swarm
        size_bytes, digest, data = version.chunk_bytes(index), version.chunks[index], bytearray()
        if peer is None:
            stall_s = _REGISTRY_STALL_S
            source = swarm.registry.download(digest, base="" if base is None else of.chunk(digest))
        else:
            stall_s = STALL_S
            source = swarm.peers.read(peer, version.digest, index, of.digest)
        # The waits for this node's own rate do not count, since no source is to blame for them.
        waited_s = 0.0
        async with aclosing(source) as pieces:
            while len(data) <= size_bytes:
                began_s = self._clock.monotonic_s()
                earned_s = CHUNK_S if peer is None else STALL_S + len(data) / LEAST_BYTES_PER_S
                async with asyncio.timeout(min(stall_s, min(CHUNK_S, earned_s) - waited_s)):
                    piece = await anext(pieces, b"")
                waited_s += self._clock.monotonic_s() - began_s
                if not piece:
                    break
                data += piece
                await swarm.pace.take(len(piece))
        received = await in_thread(version.verified, index, bytes(data), base)
        if received is None:
            file, at = version.places[index][0]
            raise IntegrityError(
                f"chunk {at} of {file.path} is not {digest}", path=file.path, chunk=at, digest=digest
            )
        return received, len(data)
