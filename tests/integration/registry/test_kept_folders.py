"""The folders that a worker keeps: verified at its start, used without a registry, the longest idle goes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from services.adapters.grpc.registry_client import RegistryClient
from services.core.errors import FailedPrecondition, NotFound, StoreUnavailable
from services.core.manifest import CHUNK_BYTES
from services.rpc.channel import open_channel
from tests.integration.registry.harness import Counting, Registry, files, publish_any, same
from tests.support.registry import ADMIN, TOKEN


async def publish_versions(registry: Registry, tmp_path: Path, count: int) -> list[str]:
    """Return the digests of so many versions of 1000 bytes each."""
    digests = []
    for number in range(count):
        root = tmp_path / f"m{number}"
        root.mkdir()
        (root / "config.json").write_text(json.dumps(chr(65 + number) * 998))
        digests.append((await publish_any(registry.channel, root, "tiny", metadata=ADMIN)).digest)
    return digests


async def test_damaged_kept_folder_is_found_at_the_next_start(
    registry: Registry, folder: Path, tmp_path: Path
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    path = await models.fetch("tiny", done.digest)
    models.close()
    with (path / "model.safetensors").open("r+b") as stream:
        stream.seek(CHUNK_BYTES + 5)
        stream.write(b"\x00\x01\x02")
    source = Counting(registry.client)
    again = files(source, tmp_path / "cache")
    assert same(folder, await again.fetch("tiny", done.digest))
    assert len(source.downloads) == 1, "more than the damaged chunk was fetched"
    source.downloads.clear()
    assert same(folder, await again.fetch("tiny", done.digest))
    assert source.downloads == []


async def test_kept_version_needs_no_registry(registry: Registry, folder: Path, tmp_path: Path) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    await models.fetch("tiny", done.digest)
    models.close()
    nowhere = open_channel("127.0.0.1:1")
    try:
        path = await files(RegistryClient(lambda: nowhere, TOKEN), tmp_path / "cache").fetch(
            "tiny", done.digest
        )
        assert same(folder, path)
    finally:
        await nowhere.close()


async def test_least_recently_used_goes_first_and_never_a_pinned_one(
    registry: Registry, tmp_path: Path
) -> None:
    digests = await publish_versions(registry, tmp_path, 4)
    models = files(registry.client, tmp_path / "cache", max_bytes=2500)
    first = await models.fetch("tiny", digests[0])
    models.pin(first)
    second = await models.fetch("tiny", digests[1])
    third = await models.fetch("tiny", digests[2])
    assert first.exists()
    assert not second.exists()
    kept = {path.name for path in (tmp_path / "cache" / "ready").iterdir()}
    manifests = {path.stem for path in (tmp_path / "cache" / "manifests").iterdir()}
    assert manifests == kept, "an evicted version's manifest goes with it"
    models.pin(third)
    with pytest.raises(StoreUnavailable, match="in use"):
        await models.fetch("tiny", digests[3])
    models.unpin(first)
    fourth = await models.fetch("tiny", digests[3])
    assert fourth.exists()
    assert not first.exists()
    with pytest.raises(NotFound):
        models.pin(first)
    models.check_integrity()
    models.close()
    tight = files(registry.client, tmp_path / "tight", max_bytes=999)
    with pytest.raises(FailedPrecondition, match="holds 999"):
        await tight.fetch("tiny", digests[0])


async def test_a_used_folder_outlives_an_older_use_also_across_a_restart(
    registry: Registry, tmp_path: Path
) -> None:
    digests = await publish_versions(registry, tmp_path, 4)
    models = files(registry.client, tmp_path / "cache", max_bytes=2500)
    first = await models.fetch("tiny", digests[0])
    second = await models.fetch("tiny", digests[1])
    await models.fetch("tiny", digests[0])
    third = await models.fetch("tiny", digests[2])
    assert (first.exists(), second.exists()) == (True, False)
    await models.fetch("tiny", digests[0])
    models.close()
    models = files(registry.client, tmp_path / "cache", max_bytes=2500)
    await models.fetch("tiny", digests[3])
    assert (first.exists(), third.exists()) == (True, False)


async def test_what_the_disk_does_not_let_go_counts_and_serves_on(registry: Registry, tmp_path: Path) -> None:
    digests = await publish_versions(registry, tmp_path, 2)
    models = files(registry.client, tmp_path / "cache", max_bytes=1500)
    first = await models.fetch("tiny", digests[0])
    obstacle = tmp_path / "cache" / "partial" / f"{first.name}.gone"
    obstacle.write_bytes(b"")  # a file where the folder has to go: the system refuses the rename
    with pytest.raises(StoreUnavailable):
        await models.fetch("tiny", digests[1])
    assert models.kept_bytes == 1000
    assert await models.fetch("tiny", digests[0]) == first
    obstacle.unlink()
    second = await models.fetch("tiny", digests[1])
    assert (first.exists(), second.exists()) == (False, True)
    models.check_integrity()


async def test_full_disk_is_clear_and_leaves_nothing(
    registry: Registry, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    real, written = os.write, 0

    def full(target: int, data: memoryview) -> int:
        nonlocal written
        written += 1
        if written == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(target, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreUnavailable, match="full"):
        await models.fetch("tiny", done.digest)
    assert list((tmp_path / "cache" / "partial").iterdir()) == []
    assert list((tmp_path / "cache" / "ready").iterdir()) == []
    assert models.kept_bytes == 0
    assert same(folder, await models.fetch("tiny", done.digest))


async def test_root_has_one_owner(registry: Registry, folder: Path, tmp_path: Path) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    owner = files(registry.client, tmp_path / "cache")
    await owner.fetch("tiny", done.digest)
    with pytest.raises(StoreUnavailable, match="another process"):
        await files(registry.client, tmp_path / "cache").fetch("tiny", done.digest)
    owner.close()
    await files(registry.client, tmp_path / "cache").fetch("tiny", done.digest)


@pytest.mark.parametrize(
    "deleted", ["cache/ready", "cache/ready/*", "cache/manifests", "cache/partial", "cache"]
)
async def test_what_was_deleted_of_the_cache_is_fetched_again(
    registry: Registry, folder: Path, tmp_path: Path, deleted: str
) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    models = files(registry.client, tmp_path / "cache")
    await models.fetch("tiny", done.digest)
    for path in list(tmp_path.glob(deleted)):
        shutil.rmtree(path)
    assert (await models.readable("tiny", done.digest)).files, "the manifest alone, before any folder is made"
    for _ in range(2):
        assert same(folder, await models.fetch("tiny", done.digest))
    models.check_integrity()


async def test_a_deleted_folder_is_evicted_as_any_other(registry: Registry, tmp_path: Path) -> None:
    digests = await publish_versions(registry, tmp_path, 3)
    models = files(registry.client, tmp_path / "cache", max_bytes=2500)
    for digest in digests[:2]:
        await models.fetch("tiny", digest)
    shutil.rmtree(tmp_path / "cache" / "ready")
    assert (await models.fetch("tiny", digests[2])).is_dir()
    models.check_integrity()
