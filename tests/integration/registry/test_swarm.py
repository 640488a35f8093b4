"""A version that nodes fetch from a registry and from each other, over sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from services.adapters.model_files import shared_chunks
from services.adapters.model_files import swarm as node_side
from services.adapters.model_files.cache import ModelFiles
from services.adapters.model_files.shared_chunks import SharedChunks
from services.core.errors import IntegrityError, StoreUnavailable
from services.core.manifest import CHUNK_BYTES
from services.core.swarm import ChunkOrders
from tests.integration.registry.harness import same
from tests.integration.registry.swarm_fleet import (
    CHUNKS,
    CLOCK,
    MODEL,
    Fleet,
    Rubbish,
    Stalling,
    fleet_in,
    published,
    weights_in,
)
from tests.support.model_folder import header_of, write_model
from tests.support.waiting import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return weights_in(tmp_path / "model")


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet_in(tmp_path) as found:
        yield found


async def test_a_chunk_leaves_the_registry_about_once(fleet: Fleet, folder: Path) -> None:
    digest = await published(fleet, folder)
    nodes = await fleet.nodes(4)
    for path in await asyncio.gather(*(node.fetch(digest) for node in nodes)):
        assert same(folder, path)
    assert fleet.copies(digest) <= 1.1, fleet.sent
    fleet.registry.service.tracker._swarms[digest, ""].check_integrity()
    fleet.sent.clear()
    assert same(folder, await (await fleet.node("late")).fetch(digest))
    assert set(fleet.sent) == {digest}, "a chunk left the registry that nodes have"


@pytest.mark.parametrize("bad", [Rubbish, Stalling])
async def test_a_peer_that_lies_or_stalls_is_replaced_and_left_out(
    fleet: Fleet, folder: Path, bad: type[SharedChunks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_side, "STALL_S", 2.0)
    monkeypatch.setattr(shared_chunks, "_TURN_S", 0.5)
    digest = await published(fleet, folder)
    liar = await fleet.node("liar", bad)
    await liar.fetch(digest)
    assert liar.swarm.shared.versions[digest, ""].bitmap()
    fleet.sent.clear()
    nodes = await fleet.nodes(3)
    swarm = fleet.registry.service.tracker._swarms[digest, ""]
    tasks = [node.fetch(digest) for node in nodes]
    await until(lambda: swarm._nodes[liar.swarm.node.address].is_out)
    # The other peers are honest: only a stall of this machine could be taken for theirs. A chunk that was
    # ordered of the liar just before waits as long, so the limit is far below PATIENCE_S.
    monkeypatch.setattr(node_side, "STALL_S", 20.0)
    for path in await asyncio.gather(*tasks):
        assert same(folder, path)
    # It alone had the chunks: once two nodes have reported it, they come from the registry, once.
    assert fleet.copies(digest) <= 1.5, fleet.sent
    assert swarm._nodes[liar.swarm.node.address].is_out
    assert not any(swarm._nodes[node.swarm.node.address].is_out for node in nodes)


async def test_a_node_that_dies_resumes_without_fetching_again(fleet: Fleet, folder: Path) -> None:
    digest = await published(fleet, folder)
    nodes = await fleet.nodes(3)
    tasks = [node.fetch(digest) for node in nodes]
    victim = nodes[0]
    await until(lambda: victim.swarm.received_bytes.total() >= 0.6 * CHUNKS * CHUNK_BYTES)
    await victim.kill()
    had = victim.swarm.received_bytes.total()
    again = await fleet.node("node-0")
    assert same(folder, await again.fetch(digest))
    for task in tasks[1:]:
        assert same(folder, await task)
    size = sum(path.stat().st_size for path in folder.iterdir())
    refetched = had + again.swarm.received_bytes.total() - size
    assert refetched <= 0.02 * size, "verified chunks were fetched again"


async def test_peers_go_on_while_the_registry_is_gone(fleet: Fleet, folder: Path) -> None:
    digest = await published(fleet, folder)
    await (await fleet.node("seed")).fetch(digest)
    nodes = await fleet.nodes(2, down=12 * 2**20)
    tasks = [node.fetch(digest) for node in nodes]
    await until(lambda: min(node.swarm.received_bytes.total() for node in nodes) >= 3 * CHUNK_BYTES)
    fleet.sent.clear()
    await fleet.registry.server.stop(0)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        assert same(folder, await task)
    assert fleet.sent.total() == 0


async def test_a_registry_without_its_store_still_sends_chunks(fleet: Fleet, folder: Path) -> None:
    digest = await published(fleet, folder)
    node = await fleet.node("node")
    await node.files.readable(MODEL, digest)

    async def unavailable(*_: object, **__: object) -> ChunkOrders:
        raise StoreUnavailable("no store")

    fleet.registry.service.tracker.exchange = unavailable  # type: ignore[method-assign]
    assert same(folder, await node.fetch(digest))
    assert fleet.copies(digest) == 1.0


async def test_a_registry_that_is_back_learns_what_the_nodes_have(fleet: Fleet, folder: Path) -> None:
    digest = await published(fleet, folder)
    nodes = await fleet.nodes(3)
    tasks = [node.fetch(digest) for node in nodes]
    await until(lambda: min(node.swarm.received_bytes.total() for node in nodes) >= 2 * CHUNK_BYTES)
    fleet.registry.service.tracker._swarms.clear()  # as after a restart
    for task in tasks:
        assert same(folder, await task)
    fleet.registry.service.tracker._swarms[digest, ""].check_integrity()
    assert fleet.copies(digest) <= 1.6, fleet.sent


async def test_a_chunk_that_the_registry_damages_twice_ends_the_fetch(fleet: Fleet, folder: Path) -> None:
    digest = await published(fleet, folder)
    _, manifest = await fleet.registry.client.get_version(MODEL, digest)
    weights = next(file for file in manifest.files if file.path.endswith(".safetensors"))
    get = fleet.origin.get

    async def spoiled(chunk: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        async with aclosing(get(chunk, offset_bytes)) as pieces:
            async for piece in pieces:
                yield piece if chunk != weights.chunks[3] else bytes([piece[0] ^ 1]) + piece[1:]

    fleet.origin.get = spoiled  # type: ignore[method-assign,assignment]
    node = await fleet.node("node")
    with pytest.raises(IntegrityError) as caught:
        await node.fetch(digest)
    assert caught.value.metadata["path"] == weights.path
    assert not node.swarm.shared.versions


@pytest.mark.parametrize("bound", ["up", "down"])
async def test_rates_bound_what_a_node_sends_and_receives(fleet: Fleet, folder: Path, bound: str) -> None:
    digest, rate = await published(fleet, folder), 16 * 2**20
    seed = await fleet.node("seed", up=rate if bound == "up" else 0)
    await seed.fetch(digest)
    other = await fleet.node("other", down=rate if bound == "down" else 0)
    began_s = time.monotonic()
    await other.fetch(digest)
    assert time.monotonic() - began_s >= 0.9 * (CHUNKS * CHUNK_BYTES - rate / 4) / rate


def write_floats(root: Path, weights: np.ndarray[Any, Any], layers: int = 4) -> Path:
    """Write a folder whose weights are these float32 values, in so many tensors."""
    write_model(root)
    header = header_of({f"layer{at}": [len(weights) // layers] for at in range(layers)})
    (root / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights.tobytes())
    return root


def floats(seed: int, chunks: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(chunks * CHUNK_BYTES // 4, np.float32)


def tuned(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return weights of which one element in a hundred is another, and the last tensor is as it was."""
    rng = np.random.default_rng(5)
    where = rng.random(weights.size) < 0.01
    where[weights.size // 4 * 3 :] = False
    found = weights.copy()
    found[where] = rng.standard_normal(int(where.sum()), np.float32)
    return found


@dataclass
class TwoVersions:
    first: str
    second: str
    folder: Path
    size_bytes: int


@pytest_asyncio.fixture
async def versions(fleet: Fleet, tmp_path: Path) -> TwoVersions:
    weights = floats(4, CHUNKS)
    first = await published(fleet, write_floats(tmp_path / "first", weights))
    folder = write_floats(tmp_path / "second", tuned(weights))
    return TwoVersions(first, await published(fleet, folder), folder, weights.nbytes)


async def test_a_next_version_comes_as_deltas_to_those_that_have_the_last(
    fleet: Fleet, versions: TwoVersions
) -> None:
    had, fresh = await fleet.nodes(3), await fleet.node("fresh")
    await asyncio.gather(*(node.fetch(versions.first) for node in had))
    before = [node.swarm.received_bytes.total() for node in had]
    for path in await asyncio.gather(*(node.fetch(versions.second) for node in had)):
        assert same(versions.folder, path)
    for node, received in zip(had, before, strict=True):
        assert 0 < node.swarm.received_bytes.total() - received <= 0.03 * versions.size_bytes
    assert any(node.swarm.received_bytes["from_peer"] for node in had)
    fleet.sent.clear()
    assert same(versions.folder, await fresh.fetch(versions.second))
    assert set(fleet.sent) == {versions.second}, "a chunk left the registry that nodes have"
    assert fresh.swarm.received_bytes.total() >= versions.size_bytes


@pytest.mark.parametrize("is_last", [True, False])
async def test_the_nearest_version_is_the_base(
    fleet: Fleet, versions: TwoVersions, tmp_path: Path, is_last: bool
) -> None:
    far = await published(fleet, write_floats(tmp_path / "far", floats(5, CHUNKS)))
    node = await fleet.node("one")
    for digest in (far, versions.first) if is_last else (versions.first, far):
        await node.fetch(digest)
    before = node.swarm.received_bytes.total()
    assert same(versions.folder, await node.fetch(versions.second))
    assert node.swarm.received_bytes.total() - before <= 0.03 * versions.size_bytes


async def test_nodes_whose_bases_save_nothing_become_one_swarm(fleet: Fleet, tmp_path: Path) -> None:
    digests = [
        await published(fleet, write_floats(tmp_path / f"v{seed}", floats(seed, 32))) for seed in range(3)
    ]
    nodes = await fleet.nodes(3)
    await asyncio.gather(*(node.fetch(digest) for node, digest in zip(nodes, digests[:2], strict=False)))
    fleet.sent.clear()
    for path in await asyncio.gather(*(node.fetch(digests[2]) for node in nodes)):
        assert same(tmp_path / "v2", path)
    assert fleet.copies(digests[2]) <= 2.0, fleet.sent
    assert [len(node.swarm.shared.versions) for node in nodes] == [3, 3, 1]


async def test_a_base_that_is_damaged_costs_its_chunk_alone(fleet: Fleet, versions: TwoVersions) -> None:
    one, other = await fleet.nodes(2)
    folder = await one.fetch(versions.first)
    await other.fetch(versions.first)
    before = one.swarm.received_bytes.total()
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(CHUNK_BYTES + 99)
        stream.write(b"damaged!")
    for path in await asyncio.gather(one.fetch(versions.second), other.fetch(versions.second)):
        assert same(versions.folder, path)
    assert one.swarm.received_bytes.total() - before <= CHUNK_BYTES + 0.03 * versions.size_bytes
    swarm = fleet.registry.service.tracker._swarms[versions.second, versions.first]
    assert not any(node.is_out or node.avoids for node in swarm._nodes.values()), "a peer was blamed"


async def test_without_a_swarm_equal_chunks_are_not_fetched_again(
    fleet: Fleet, versions: TwoVersions, tmp_path: Path
) -> None:
    files = ModelFiles(fleet.registry.client, tmp_path / "alone", CLOCK, max_bytes=10**9)
    await files.fetch(MODEL, versions.first)
    fleet.sent.clear()
    assert same(versions.folder, await files.fetch(MODEL, versions.second))
    assert fleet.sent.total() == 1 + CHUNKS * 3 // 4, fleet.sent  # the manifest, and the changed tensors
    files.close()
