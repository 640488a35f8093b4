"""Fetches from the swarm where peers have other certificates, disks are full, or servers are older."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from fairway.v1 import registry_pb2
from services.adapters.grpc.chunk_peers import ChunkPeers
from services.adapters.model_files import swarm as node_side
from services.adapters.model_files.swarm import PARALLEL
from services.core.errors import (
    FairwayError,
    OverQuota,
    PermissionDenied,
    StoreUnavailable,
    Unavailable,
    Unimplemented,
)
from services.core.manifest import CHUNK_BYTES
from services.core.swarm import ChunkPeer
from services.registry.service import RegistryService
from services.registry.servicer import RegistryServicer
from tests.integration.registry.harness import same
from tests.integration.registry.swarm_fleet import (
    CHUNKS,
    MODEL,
    Fleet,
    Node,
    fleet_in,
    published,
    weights_in,
)
from tests.support.certificates import HeldCertificates, authority_in, identity_of
from tests.support.registry import TOKEN
from tests.support.tiny_disk import fill, tiny_disk
from tests.support.waiting import until

DISK_BYTES = (CHUNKS * CHUNK_BYTES) + 80 * 2**20  # the version, the reserve, and a little


class OlderRegistry(RegistryServicer):
    """A registry that has no swarms."""

    async def ExchangeChunks(self, request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


class Refusing(RegistryServicer):
    """A registry whose swarms take no more nodes in once ``refusal`` is set."""

    refusal: FairwayError | None = None

    async def ExchangeChunks(self, request: Any, context: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return await super().ExchangeChunks(request, context)


class OrderingNothing(RegistryServicer):
    """A registry whose tracker helps no node."""

    async def ExchangeChunks(self, request: Any, context: Any) -> Any:
        return registry_pb2.ExchangeChunksResponse()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return weights_in(tmp_path / "model")


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet_in(tmp_path) as found:
        yield found


class Identities:
    """Certificates of this installation, and of another one."""

    def __init__(self, root: Path) -> None:
        self._here, self._elsewhere = authority_in(root / "here"), authority_in(root / "elsewhere")

    def of(self, role: str, name: str = "") -> HeldCertificates:
        return HeldCertificates(identity_of(self._here, role, name))

    def foreign(self, role: str) -> HeldCertificates:
        return HeldCertificates(identity_of(self._elsewhere, role))


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


async def read(node: Node, digest: str, certificates: HeldCertificates | None) -> bytes:
    """Return the first chunk, as a caller with these certificates gets it."""
    peers = ChunkPeers(TOKEN, certificates)
    try:
        async with aclosing(peers.read(ChunkPeer(node.swarm.node.address), digest, 0)) as pieces:
            return b"".join([piece async for piece in pieces])
    finally:
        await peers.close()


async def test_workers_of_an_installation_send_each_other_chunks(
    fleet: Fleet, folder: Path, identities: Identities
) -> None:
    digest = await published(fleet, folder)
    seed = await fleet.node("seed", certificates=identities.of("worker", "seed"))
    await seed.fetch(digest)
    fleet.sent.clear()
    other = await fleet.node("other", certificates=identities.of("worker", "other"))
    assert same(folder, await other.fetch(digest))
    assert set(fleet.sent) == {digest}, "a chunk left the registry that a node has"
    assert await read(seed, digest, identities.of("follower"))


async def test_chunks_are_sent_to_no_other_role_and_to_no_other_installation(
    fleet: Fleet, folder: Path, identities: Identities
) -> None:
    digest = await published(fleet, folder)
    seed = await fleet.node("seed", certificates=identities.of("worker", "seed"))
    await seed.fetch(digest)
    with pytest.raises(PermissionDenied, match="worker") as caught:
        await read(seed, digest, identities.of("gateway"))
    assert caught.value.metadata == {"role": "gateway"}
    for certificates in (identities.foreign("worker"), None):
        with pytest.raises(Unavailable):
            await read(seed, digest, certificates)
    assert not seed.swarm.shared.sent_bytes


async def test_a_peer_is_believed_with_the_certificate_of_a_worker_alone(
    fleet: Fleet, folder: Path, identities: Identities
) -> None:
    """A process on a worker's address is no worker, and the registry sends what it would have sent."""
    digest = await published(fleet, folder)
    false = [
        await fleet.node("gateway", certificates=identities.of("gateway")),
        await fleet.node("foreign", certificates=identities.foreign("worker")),
    ]
    for node in false:
        await node.fetch(digest)
        with pytest.raises(Unavailable):
            await read(node, digest, identities.of("worker"))
    worker = await fleet.node("worker", certificates=identities.of("worker"))
    assert same(folder, await worker.fetch(digest))
    assert worker.swarm.received_bytes.keys() == {"from_registry"}
    assert not any(node.swarm.shared.sent_bytes for node in false)


async def test_a_disk_that_fills_up_ends_a_fetch_and_nothing_of_it_is_ready(
    fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    digest = await published(fleet, folder)
    with tiny_disk(tmp_path / "full", DISK_BYTES):
        full = await fleet.node("full", down=12 * 2**20)
        other = await fleet.node("other", down=12 * 2**20)
        ending, going = full.fetch(digest), other.fetch(digest)
        await until(lambda: full.swarm.received_bytes.total() >= 3 * CHUNK_BYTES)
        filler = await asyncio.to_thread(fill, tmp_path / "full")
        with pytest.raises(StoreUnavailable, match="disk of the model files is full"):
            await ending
        assert not list((tmp_path / "full" / "ready").iterdir())
        assert not list((tmp_path / "full" / "partial").iterdir())
        assert not full.swarm.shared.versions, "a chunk is offered that is gone"
        with pytest.raises(StoreUnavailable, match="disk of the model files is full"):
            await full.fetch(digest)
        assert same(folder, await going)
        filler.unlink()
        assert same(folder, await full.fetch(digest))
        full.files.check_integrity()
        await full.kill()


async def test_a_registry_without_swarms_sends_every_chunk_itself(tmp_path: Path, folder: Path) -> None:
    async with fleet_in(tmp_path, make_servicer=OlderRegistry) as fleet:
        digest = await published(fleet, folder)
        for node in await fleet.nodes(2):
            assert same(folder, await node.fetch(digest))
            assert not node.swarm.received_bytes
        assert fleet.copies(digest) == 2.0


@pytest.mark.parametrize("refusal", [Unimplemented("no swarms"), OverQuota("too many nodes")])
async def test_what_a_swarm_sent_stays_when_it_takes_the_node_in_no_more(
    tmp_path: Path, folder: Path, refusal: FairwayError
) -> None:
    servicers: list[Refusing] = []

    def make_servicer(service: RegistryService) -> RegistryServicer:
        servicers.append(Refusing(service))
        return servicers[0]

    async with fleet_in(tmp_path, make_servicer=make_servicer) as fleet:
        digest = await published(fleet, folder)
        node = await fleet.node("node", down=12 * 2**20)
        ratios: list[float] = []
        fetching = asyncio.create_task(node.files.fetch(MODEL, digest, progress=ratios.append))
        await until(lambda: node.swarm.received_bytes.total() >= 4 * CHUNK_BYTES)
        servicers[0].refusal = refusal
        assert same(folder, await fetching)
        assert node.swarm.received_bytes.total() < CHUNKS * CHUNK_BYTES, "the swarm sent everything"
        assert ratios == sorted(ratios)
        assert ratios[-1] == 1.0
        assert fleet.sent.total() <= len(fleet.sent) + PARALLEL, "more came twice than was on its way"


async def test_a_fetch_that_a_tracker_does_not_help_comes_from_the_registry_alone(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_side, "PATIENCE_S", 0.5)
    async with fleet_in(tmp_path, make_servicer=OrderingNothing) as fleet:
        digest = await published(fleet, folder)
        assert same(folder, await (await fleet.node("node")).fetch(digest))
        assert fleet.copies(digest) == 1.0


async def test_peers_that_send_no_chunks_are_replaced_by_the_registry(fleet: Fleet, folder: Path) -> None:
    digest = await published(fleet, folder)
    older = await fleet.node("older", serves=False)
    await older.fetch(digest)
    with pytest.raises(FairwayError) as caught:
        await read(older, digest, None)
    assert caught.value.reason == "UNIMPLEMENTED"
    fleet.sent.clear()
    for node in await fleet.nodes(2):
        assert same(folder, await node.fetch(digest))
    assert fleet.copies(digest) <= 1.5, fleet.sent


async def test_nodes_that_all_lose_their_files_at_once_fetch_about_one_copy(
    fleet: Fleet, folder: Path, tmp_path: Path
) -> None:
    """The registry still counts every one of them as a holder."""
    digest = await published(fleet, folder)
    nodes = await fleet.nodes(4)
    await asyncio.gather(*(node.fetch(digest) for node in nodes))
    fleet.sent.clear()
    for number in range(4):
        for part in ("ready", "partial", "manifests"):
            shutil.rmtree(tmp_path / f"node-{number}" / part)
    for path in await asyncio.gather(*(node.fetch(digest) for node in nodes)):
        assert same(folder, path)
    assert fleet.copies(digest) <= 1.5, fleet.sent
