"""The room of the cache: the bytes of its bound, and those that the disk keeps in reserve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from services.adapters.memory.store import MemoryStore
from services.adapters.model_files.cache import ModelFiles
from services.adapters.model_files.folders import ModelFolders
from services.app.roles import shared
from services.core.errors import NotFound, StoreUnavailable
from services.core.manifest import ADAPTER_SCHEMA, CHUNK_BYTES, Manifest, digest_of
from services.core.records import AssignedVersion, VersionRecord
from services.runtime.version_trust import VersionTrust
from services.worker.agent.prefetcher import Prefetcher
from services.worker.slots.version_files import VersionFiles
from tests.support.clocks import HandClock, QuickClock
from tests.support.waiting import until
from tests.unit.adapters.model_files.test_shared_files import Source

SIZE = 4 * CHUNK_BYTES  # size of the weights of a version
RESERVE = CHUNK_BYTES
SMALL = 64 * 1024  # what a version has beside its weights, at most


class Lossy(Source):
    """The chunks in ``lost`` are gone, and no manifest is sent while it is offline."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()
        self.offline = False

    def version(self, letter: str, config: bytes = b"{}") -> str:
        """Return a version whose chunks are four different ones."""
        weights = b"".join((letter + str(at)).encode() * (CHUNK_BYTES // 2) for at in range(4))
        return self.add(config_json=config, model_safetensors=weights)

    def lose(self, version: str, at: int) -> None:
        file = next(one for one in self.manifests[version].files if one.path == "model.safetensors")
        self.lost = {file.chunks[at]}

    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        if self.offline:
            raise StoreUnavailable("the registry is gone")
        return await super().get_version(model, version)

    async def download(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        if digest in self.lost:
            raise NotFound("it is gone")
        async for piece in super().download(digest, offset_bytes):
            await asyncio.sleep(0)
            yield piece


def on_disk(root: Path) -> int:
    stats = {}
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                stats[path.stat().st_ino] = path.stat().st_blocks * 512
    return sum(stats.values())


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give the disk a size; the fetches of ``tmp_path`` are alone on it."""

    def give(size_bytes: int) -> None:
        monkeypatch.setattr(ModelFolders, "free_bytes", lambda _: size_bytes - on_disk(tmp_path))

    return give


def cache(source: Source, root: Path, max_bytes: int = 10**9) -> ModelFiles:
    return ModelFiles(source, root, HandClock(), max_bytes=max_bytes, reserve_bytes=RESERVE)


async def test_the_reserve_holds_for_a_version_that_shares_a_file(
    tmp_path: Path, disk: Callable[[int], None]
) -> None:
    source = Lossy()
    first, second = source.version("a"), source.version("b")
    files = cache(source, tmp_path)
    disk(2 * SIZE + RESERVE - 1)
    files.pin(await files.fetch("m", first))
    sent = source.sent
    with pytest.raises(StoreUnavailable, match=f"is full: .* {SIZE} needed beside {RESERVE} reserved"):
        await files.fetch("m", second)
    assert source.sent == sent
    disk(2 * SIZE + RESERVE + SMALL)
    await files.fetch("m", second)


async def test_a_fetch_that_goes_on_needs_room_for_the_rest_alone(
    tmp_path: Path, disk: Callable[[int], None]
) -> None:
    source = Lossy()
    version = source.version("a")
    files = cache(source, tmp_path)
    disk(SIZE + RESERVE + SMALL)
    source.lose(version, 3)
    with pytest.raises(NotFound):
        await files.fetch("m", version)
    source.lost.clear()
    disk(SIZE + RESERVE - 1)
    with pytest.raises(StoreUnavailable, match=f"is full: .* {CHUNK_BYTES} needed"):
        await files.fetch("m", version)
    disk(SIZE + RESERVE + SMALL)
    await files.fetch("m", version)


async def test_two_fetches_do_not_count_on_the_same_bytes(
    tmp_path: Path, disk: Callable[[int], None]
) -> None:
    source = Lossy()
    versions = source.version("a", b"[1]"), source.version("b", b"[2]")
    files = cache(source, tmp_path)
    disk(2 * SIZE + RESERVE - 1)
    outcomes = await asyncio.gather(*(files.fetch("m", one) for one in versions), return_exceptions=True)
    assert [type(one) for one in outcomes if isinstance(one, BaseException)] == [StoreUnavailable]
    disk(2 * SIZE + RESERVE + SMALL)
    for one in versions:
        await files.fetch("m", one)


async def test_what_a_revert_needs_yields_to_a_version_that_is_to_run(tmp_path: Path) -> None:
    source, clock = Lossy(), QuickClock()
    old, serving, new = (
        AssignedVersion("chat", "m", source.version(letter), executor="torch") for letter in "abc"
    )
    files = cache(source, tmp_path, max_bytes=2 * SIZE + SMALL)  # two versions

    def of(version: AssignedVersion) -> VersionFiles:
        return VersionFiles(version, files, None, clock, VersionTrust(MemoryStore(clock), clock))

    prefetcher = Prefetcher(of, clock, lambda: None)
    task = asyncio.create_task(prefetcher.run())
    slots = [of(serving), of(new)]
    try:
        await slots[0].fetch(lambda _: None)
        prefetcher.want((new,), (old,))
        await until(lambda: prefetcher.present == (old.version_digest,))
        assert not ready(tmp_path, new), "what is merely likely evicts nothing that is pinned"
        await slots[1].fetch(lambda _: None)
        assert (ready(tmp_path, serving), ready(tmp_path, new)) == (True, True)
        assert not ready(tmp_path, old)
        prefetcher.want((), (old, serving))  # it is fetched again, but without room
        prefetcher.want((), (serving,))
        await until(lambda: prefetcher.present == (serving.version_digest,))
        files.check_integrity()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    with pytest.raises(StoreUnavailable, match="no room"):
        await of(old).fetch(lambda _: None, spare=True)
    with pytest.raises(StoreUnavailable, match="no room"):
        await of(old).fetch(lambda _: None)
    slots[0].unpin()
    await of(old).fetch(lambda _: None)
    assert ready(tmp_path, new), "what runs stays"


def ready(root: Path, version: AssignedVersion) -> bool:
    return (root / "ready" / version.version_digest.removeprefix("sha256:")).is_dir()


async def test_an_unfinished_download_counts_and_goes_before_complete_folders(tmp_path: Path) -> None:
    source = Lossy()
    left, kept, new = (source.version(letter, letter.encode()) for letter in "abc")
    files = cache(source, tmp_path, max_bytes=2 * SIZE + SMALL)
    source.lose(left, 3)
    with pytest.raises(NotFound):
        await files.fetch("m", left)
    assert 3 * CHUNK_BYTES <= files.kept_bytes < SIZE, "three chunks of it are written"
    files.close()
    files = cache(source, tmp_path, max_bytes=2 * SIZE + SMALL)
    await files.fetch("m", kept)
    assert files.kept_bytes > SIZE + 3 * CHUNK_BYTES, "it counts after a restart"
    with pytest.raises(StoreUnavailable, match="no room"):
        files.pin(await files.fetch("m", kept))
        await files.fetch("m", new, spare=True)
    assert list((tmp_path / "partial").iterdir()), "a version that is to run may need it"
    files.unpin(tmp_path / "ready" / kept.removeprefix("sha256:"))
    await files.fetch("m", new)
    assert not list((tmp_path / "partial").iterdir())
    assert len(list((tmp_path / "ready").iterdir())) == 2
    files.check_integrity()


async def test_an_adapter_starts_without_the_registry_once_its_base_was_evicted(tmp_path: Path) -> None:
    source = Lossy()
    base, other = source.version("a"), source.version("b")
    bare = source.manifests[source.add(adapter_config_json=b"{}", adapter_model_safetensors=b"0" * 100)]
    manifest = replace(bare, schema=ADAPTER_SCHEMA, base_model="m", base_digest=base)
    adapter = digest_of(manifest)
    source.manifests[adapter] = manifest
    files = cache(source, tmp_path, max_bytes=2 * SIZE + SMALL)
    await files.fetch("m", base)
    files.pin(await files.fetch("m", adapter))
    for version in (other, source.version("c")):
        await files.fetch("m", version)
    assert not (tmp_path / "ready" / base.removeprefix("sha256:")).exists()
    files.close()
    source.offline = True
    files = cache(source, tmp_path, max_bytes=2 * SIZE + SMALL)
    await files.fetch("m", adapter)
    source.offline = False
    for letter in "de":
        await files.fetch("m", source.version(letter))
    names = {path.stem for path in (tmp_path / "manifests").iterdir()}
    assert names == {path.name for path in (tmp_path / "ready").iterdir()}, "they went with the adapter"


@pytest.mark.parametrize(
    ("role", "reserve"), [("gateway", 64 << 20), ("worker", 1 << 30), ("follower", 1 << 30)]
)
def test_only_a_gateway_uses_the_reserve(
    role: str, reserve: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, Any] = {}
    monkeypatch.setattr(shared, "ModelFiles", lambda *_, **options: built.update(options))
    monkeypatch.setattr(shared, "RoleChannel", MagicMock())
    environment = MagicMock(role=role)
    environment.settings = SimpleNamespace(
        state_dir=tmp_path,
        model_cache_bytes=1,
        disk_reserve_bytes=1 << 30,
        registry="127.0.0.1:1",
    )
    shared.open_model_files(environment)
    assert built["reserve_bytes"] == reserve
