"""Publish a folder, register its version, fetch it: once more, after a loss, past a registry that falters."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from fairway.client.publish.publish import PublishProgress, PublishRefused
from services.core.errors import InvalidInput
from services.core.manifest import digest_of, sha256_of
from services.core.records import VersionRecord, load, version_key
from services.core.rollouts.computation import READ
from tests.integration.registry.harness import Registry, file_of, files, manifest_of, publish_any, same
from tests.support.registry import ADMIN


async def test_publish_register_fetch(registry: Registry, folder: Path, tmp_path: Path) -> None:
    told: list[PublishProgress] = []
    first = await publish_any(registry.channel, folder, "tiny", "latest", told.append, metadata=ADMIN)
    assert first.created
    assert first.uploaded_chunks == 7
    size = first.size_bytes
    assert told[-1] == PublishProgress(
        "done", size, size, to_send_bytes=size, sent_bytes=size, chunks=7, skipped_chunks=0
    )
    phases = [each.phase for each in told]
    assert phases == sorted(phases, key=["hash", "upload", "create", "done"].index)
    assert all(0 <= each.done_ratio <= 1 for each in told)
    again = await publish_any(registry.channel, folder, "tiny", "latest", metadata=ADMIN)
    assert (again.digest, again.created, again.uploaded_chunks) == (first.digest, False, 0)

    record, manifest = await registry.client.get_version("tiny", "latest")
    assert record.digest == first.digest == digest_of(manifest)
    assert manifest.tokenizer_digest == sha256_of((folder / "tokenizer.json").read_bytes())
    assert manifest.chat_template_digest == sha256_of((folder / "tokenizer_config.json").read_bytes())
    assert all(not file.path.startswith(".") for file in manifest.files)

    models = files(registry.client, tmp_path / "cache")
    ratios: list[float] = []
    path = await models.fetch("tiny", first.digest, progress=ratios.append)
    assert same(folder, path)
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0
    models.check_integrity()
    entry = await registry.store.get(version_key("tiny", first.digest))
    assert entry is not None
    contents = {name: (path / name).read_bytes() for name in READ if (path / name).exists()}
    computation = await models.computation("tiny", first.digest, contents=contents)
    assert load(entry.value, VersionRecord).engine == computation, "the planner has what workers compute"


async def test_folder_that_may_not_be_a_version_is_refused_before_anything_is_uploaded(
    registry: Registry, folder: Path
) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(PublishRefused, match="may contain pickled objects"):
        await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    assert [path for path in (registry.blobs_root / "sha256").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "modeling.py", "weights.msgpack", "x.npz"])
async def test_names_of_pickles_and_code_are_refused_by_both_sides(
    registry: Registry, folder: Path, name: str
) -> None:
    (folder / name).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(PublishRefused, match=name):
        await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    manifest = manifest_of(file_of("config.json", b"{}"), file_of(name, b"\x80\x04K\x01."))
    with pytest.raises(InvalidInput, match=name):
        await registry.service.create_version("tiny", manifest)


async def test_publishing_again_brings_back_a_lost_chunk(registry: Registry, folder: Path) -> None:
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    blob = registry.blob(sha256_of((folder / "tokenizer.json").read_bytes()))
    blob.unlink()
    again = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    assert (again.digest, again.created, again.uploaded_chunks) == (done.digest, False, 1)
    assert blob.exists()


async def test_publish_outlasts_a_registry_that_falters(registry: Registry, folder: Path) -> None:
    registry.servicer.falters = 2
    done = await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)
    assert (done.created, registry.servicer.falters) == (True, 0)


async def test_publish_gives_up_with_the_registrys_error_and_goes_on_later(
    registry: Registry, folder: Path
) -> None:
    registry.servicer.falters = 10**6
    with pytest.raises(grpc.aio.AioRpcError, match="a moment"):
        await publish_any(registry.channel, folder, "tiny", metadata=ADMIN, patience_s=0.5)
    assert await registry.service.list_models() == ((), "")
    registry.servicer.falters = 0
    assert (await publish_any(registry.channel, folder, "tiny", metadata=ADMIN)).created
