"""A fetch in a swarm charges what fails to the source that failed, and this node's own rate to none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from services.adapters.model_files import shared_chunks
from services.adapters.model_files import swarm as node_side
from services.adapters.model_files.chunk_fetcher import ChunkFetcher
from services.adapters.model_files.folders import ChunkPlace
from services.adapters.model_files.shared_chunks import PIECE_BYTES, ChunkBase, SharedChunks, SharedVersion
from services.adapters.model_files.swarm import Swarm
from services.core.errors import IntegrityError, NotFound, Unavailable
from services.core.manifest import CHUNK_BYTES, ManifestFile, sha256_of
from services.core.swarm import ChunkOrder, ChunkOrders, ChunkPeer, ChunkReport, FailedChunk
from services.runtime.clock import SystemClock
from tests.support.clocks import HandClock

MIB = 2**20
DIGEST = "sha256:" + "0" * 64
PEER = ChunkPeer("peer:1")


def file_of(chunks: list[bytes]) -> ManifestFile:
    whole = b"".join(chunks)
    starts = tuple(sum(map(len, chunks[:at])) for at in range(len(chunks)))
    return ManifestFile("a.safetensors", len(whole), sha256_of(whole), tuple(map(sha256_of, chunks)), starts)


class Registry:
    """Orders every chunk from ``source``, and sends what is requested of it."""

    def __init__(self, chunks: list[bytes], source: ChunkPeer | None = None) -> None:
        self.file = file_of(chunks)
        self.source = source
        self.contents = {sha256_of(chunk): chunk for chunk in chunks}
        self.reports: list[ChunkReport] = []
        self.damages = 0  # next chunks that are damaged
        self.next_report_s = 0.05
        self.is_away: Callable[[], bool] = lambda: False  # called for each report

    @property
    def failed(self) -> set[FailedChunk]:
        return {failed for report in self.reports for failed in report.failed}

    async def exchange_chunks(self, _: str, __: str, report: ChunkReport, **___: str) -> ChunkOrders:
        if self.is_away():
            raise Unavailable("no registry")
        self.reports.append(report)
        had = {index for each in self.reports for index in each.gained} | set(report.fetching)
        lacking = [index for index in range(len(self.file.chunks)) if index not in had]
        orders = tuple(ChunkOrder(index, self.source) for index in lacking[: report.wanted])
        return ChunkOrders(orders, peers=(PEER,), next_report_s=self.next_report_s)

    async def download(self, digest: str, *_: int, base: str = "") -> AsyncGenerator[bytes, None]:
        data = self.contents[digest]
        if self.damages:
            self.damages -= 1
            data = b"!" + data[1:]
        for begin in range(0, len(data), PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]


class Peers:
    """One peer, which sends what it has."""

    def __init__(self, contents: list[bytes]) -> None:
        self.contents = dict(enumerate(contents))
        self.sends = asyncio.Event()
        self.sends.set()
        self.waiting = 0

    async def read(self, _: ChunkPeer, __: str, index: int, ___: str) -> AsyncGenerator[bytes, None]:
        self.waiting += 1
        await self.sends.wait()
        if index not in self.contents:
            raise NotFound("not here")
        yield self.contents[index]


class Trickling(Peers):
    """Sends a byte now and then."""

    async def read(self, _: ChunkPeer, __: str, index: int, ___: str) -> AsyncGenerator[bytes, None]:
        for at in range(len(self.contents[index])):
            await asyncio.sleep(0.05)
            yield self.contents[index][at : at + 1]


class Busy(Peers):
    """Answers that it sends as much as it can."""

    async def read(self, _: ChunkPeer, __: str, index: int, ___: str) -> AsyncGenerator[bytes, None]:
        self.waiting += 1
        await asyncio.sleep(0.02)
        raise Unavailable("too many chunks are being sent", retry_after_s=1.0)
        yield b""


class Believing(Registry):
    """Orders from the source until it is reported, and then sends itself if it is to."""

    sends = True

    async def exchange_chunks(self, _: str, __: str, report: ChunkReport, **___: str) -> ChunkOrders:
        if self.sends and any(failed.address for failed in report.failed):
            self.source = None
        return await super().exchange_chunks(_, __, report)


@pytest.mark.parametrize("kind", [Trickling, Busy])
async def test_a_peer_that_trickles_or_is_always_busy_is_reported_and_replaced(
    kind: type[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_side, "STALL_S", 0.2)
    monkeypatch.setattr(node_side, "BUSY_S", 0.3)
    monkeypatch.setattr(node_side, "PATIENCE_S", 2.0)
    chunks = [str(number).encode() * 40 for number in range(20)]
    registry = Believing(chunks, source=PEER)
    swarm = await fetch(registry, kind(chunks))
    assert {failed.address for failed in registry.failed} >= {PEER.address}
    assert swarm.received_bytes.keys() == {"from_registry"}


async def test_what_is_queued_of_a_peer_that_failed_is_not_requested_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_side, "STALL_S", 0.3)
    monkeypatch.setattr(node_side, "_LEAST_ORDERS", 64)
    chunks = [str(number).encode() * 40 for number in range(60)]
    registry, peers = Believing(chunks, source=PEER), Peers(chunks)
    peers.sends.clear()
    await fetch(registry, peers)
    assert peers.waiting == node_side.PARALLEL, "queued orders went to a peer that had failed"


async def test_a_fetch_that_its_tracker_does_not_help_reports_what_failed_and_leaves_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_side, "STALL_S", 0.3)
    monkeypatch.setattr(node_side, "PATIENCE_S", 0.2)  # it ends before the next report
    chunks = [b"first", b"second"]
    registry, peers = Believing(chunks, source=PEER), Peers(chunks)
    registry.sends, registry.next_report_s = False, 0.6
    peers.sends.clear()
    with pytest.raises(AssertionError):  # It is this test's own: not all chunks arrived.
        await fetch(registry, peers)
    assert {failed.address for failed in registry.failed} == {PEER.address}


async def fetch(registry: Registry, peers: Peers, base: ChunkBase | None = None, rate: int = 0) -> Swarm:
    """Return the swarm of a node that fetched the version."""
    node, clock = ChunkPeer("node:1"), SystemClock()
    swarm = Swarm(cast(Any, registry), cast(Any, peers), node, clock, Random(0), download_bytes_per_s=rate)
    version = SharedVersion("m", DIGEST, [registry.file], [], base)
    got: dict[int, bytes] = {}

    async def take(index: int, data: bytes) -> None:
        got[index] = data

    async with asyncio.timeout(30.0):
        await swarm.fetch(version, take)
    assert sorted(map(sha256_of, got.values())) == sorted(registry.file.chunks)
    return swarm


def lost_base(registry: Registry) -> ChunkBase:
    """Return a base of every chunk whose file is gone."""
    old = file_of([b"o" * len(chunk) for chunk in registry.contents.values()])
    path = Path("/nowhere") / old.path
    places = {chunk: ChunkPlace(path, old, at) for at, chunk in enumerate(registry.file.chunks)}
    return ChunkBase("sha256:" + "1" * 64, places)


async def test_what_the_registry_damages_for_a_lost_base_is_not_the_ordered_peer_s() -> None:
    chunks = [b"first", b"second"]
    registry = Registry(chunks, source=PEER)
    registry.damages = 1
    swarm = await fetch(registry, Peers(chunks), lost_base(registry))
    assert registry.failed == {FailedChunk(0, "")}
    assert swarm.received_bytes == {"from_registry": len(b"".join(chunks))}


async def test_the_registry_damages_twice_what_has_lost_its_base() -> None:
    registry = Registry([b"first"], source=PEER)
    registry.damages = 2
    with pytest.raises(IntegrityError):
        await fetch(registry, Peers([b"first"]), lost_base(registry))


async def test_an_order_guessed_without_the_tracker_blames_no_peer_once_it_is_back() -> None:
    chunks = [str(number).encode() for number in range(40)]
    registry, peers = Registry(chunks), Peers([])
    registry.next_report_s = 0.5  # long beside the time of 8 chunks: a node queues 16 next
    peers.sends.clear()
    turns = 0

    def is_away() -> bool:
        """Away at the second report; back at the third, while guessed orders still queue."""
        nonlocal turns
        turns += 1
        if turns == 3:
            assert peers.waiting == node_side.PARALLEL, "no guessed order is queued"
            peers.sends.set()
            registry.next_report_s = 0.05
        return turns == 2

    registry.is_away = is_away
    await fetch(registry, peers)
    assert len(registry.failed) > node_side.PARALLEL, (
        "the peer was asked for nothing once the tracker was back"
    )
    assert not any(failed.address for failed in registry.failed)


async def test_a_node_s_own_rate_is_not_charged_to_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_side, "CHUNK_S", 0.5)
    chunks = [bytes([number]) * MIB for number in range(3)]
    registry = Registry(chunks, source=PEER)
    swarm = await fetch(registry, Peers(chunks), rate=MIB)
    assert swarm.received_bytes == {"from_peer": 3 * MIB}
    assert not registry.failed


async def test_a_node_with_a_low_rate_sends_few_chunks_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each in a few seconds: all at once would exceed the time in which receivers expect one."""
    monkeypatch.setattr(shared_chunks, "_TURN_S", 0.05)
    chunks = [bytes([number]) * CHUNK_BYTES for number in range(3)]
    file = file_of(chunks)
    (tmp_path / file.path).write_bytes(b"".join(chunks))
    shared = SharedChunks(HandClock(), bytes_per_s=2 * MIB)
    version = SharedVersion("m", DIGEST, [file], [tmp_path])
    version.add_all()
    shared.versions[version.key] = version
    async with aclosing(shared.pieces(DIGEST, 0)) as one, aclosing(shared.pieces(DIGEST, 1)) as other:
        await anext(one)
        await anext(other)
        async with aclosing(shared.pieces(DIGEST, 2)) as third:
            with pytest.raises(Unavailable) as caught:
                await anext(third)
        assert caught.value.retry_after_s


class BusyRegistry:
    """Has too many downloads for a while, or is away if it gives no time."""

    def __init__(self, clock: HandClock, data: bytes, retry_after_s: float | None) -> None:
        self.clock, self.data, self.retry_after_s = clock, data, retry_after_s

    async def download(self, _: str, __: int) -> AsyncGenerator[bytes, None]:
        if self.clock.monotonic_s() < 1300.0:
            raise Unavailable("later", retry_after_s=self.retry_after_s)
        yield self.data


async def test_a_busy_registry_is_waited_for_longer_than_one_that_is_away() -> None:
    data = b"x" * 100
    for retry_after_s in (2.0, None):
        clock = HandClock()
        fetching = ChunkFetcher(cast(Any, BusyRegistry(clock, data, retry_after_s)), clock).fetch(
            file_of([data]), 0
        )
        if retry_after_s is None:
            with pytest.raises(Unavailable):
                await fetching
        else:
            assert await fetching == data
