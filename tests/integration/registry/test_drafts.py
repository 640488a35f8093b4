"""A version with a draft: published, pinned by the version's digest, fetched with or without its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairway.client.publish.publish import PublishRefused
from services.core.errors import InvalidInput
from services.core.manifest import canonical_json, digest_of, parse, weights_digest_of
from services.worker.slots.version_files import without_weights
from tests.integration.registry.harness import (
    Counting,
    Registry,
    file_of,
    files,
    manifest_of,
    publish_any,
    same,
    store_blobs,
)
from tests.support.model_folder import safetensors
from tests.support.registry import ADMIN

CONFIG = b'{"model_type": "llama"}'


@pytest.fixture
def drafted(folder: Path) -> Path:
    """A model with a draft."""
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_bytes(CONFIG)
    (folder / "draft" / "model.safetensors").write_bytes(safetensors(5000, seed=1))
    return folder


async def test_it_is_published_and_fetched_with_its_version(
    registry: Registry, drafted: Path, tmp_path: Path
) -> None:
    done = await publish_any(registry.channel, drafted, "tiny", metadata=ADMIN)
    path = await files(registry.client, tmp_path / "cache").fetch("tiny", done.digest)
    assert same(drafted, path)
    assert (path / "draft" / "model.safetensors").stat().st_size == 5000


async def test_another_draft_is_another_version_with_other_weights(registry: Registry, drafted: Path) -> None:
    digests, weights = set(), set()
    for seed in (1, 2, 1):
        (drafted / "draft" / "model.safetensors").write_bytes(safetensors(5000, seed))
        done = await publish_any(registry.channel, drafted, "tiny", metadata=ADMIN)
        digests.add(done.digest)
        weights.add((await registry.client.get_version("tiny", done.digest))[1].weights_digest)
    assert (len(digests), len(weights)) == (2, 2)


async def test_an_engine_without_weights_fetches_none_of_the_draft(
    registry: Registry, drafted: Path, tmp_path: Path
) -> None:
    done = await publish_any(registry.channel, drafted, "tiny", metadata=ADMIN)
    source = Counting(registry.client)
    models = files(source, tmp_path / "cache")
    path = await models.fetch("tiny", done.digest, only=without_weights)
    assert list(path.rglob("*.safetensors")) == []
    assert (path / "draft" / "config.json").exists()
    assert models.kept_bytes < 1000


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("pytorch_model.bin", b"\x80\x04K\x01.", "pickled objects"),
        ("modeling.py", b"import os", "program code"),
        ("README.md", b"\x80\x04\x95\x05\x00", "pickled objects"),
        ("config.json", b"PK\x03\x04", "zip archive"),
        ("model.safetensors", safetensors(5000)[:-1], "truncated"),
        ("tokenizer.json", b"{}", "does not belong in a draft"),
    ],
)
async def test_what_is_no_draft_is_refused_before_anything_is_sent(
    registry: Registry, drafted: Path, name: str, data: bytes, problem: str
) -> None:
    (drafted / "draft" / name).write_bytes(data)
    with pytest.raises(PublishRefused, match=problem):
        await publish_any(registry.channel, drafted, "tiny", metadata=ADMIN)
    assert [path for path in (registry.blobs_root / "sha256").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("draft/pytorch_model.bin", b"\x80\x04K\x01.", "pickled objects"),
        ("draft/README.md", b"\x80\x04\x95\x05\x00", "pickled objects"),
        ("draft/tokenizer.json", b"{}", "does not belong in a draft"),
        ("draft/model.safetensors", b"no header", "safetensors"),
    ],
)
async def test_the_registry_trusts_no_publisher(
    registry: Registry, name: str, data: bytes, problem: str
) -> None:
    found = {
        "config.json": CONFIG,
        "draft/config.json": CONFIG,
        "draft/model.safetensors": safetensors(500),
        name: data,
    }
    await store_blobs(registry, *set(found.values()))
    entries = [file_of(path, content) for path, content in found.items()]
    whole = manifest_of(*entries)
    manifest = manifest_of(*entries, weights_digest=weights_digest_of(whole.files))
    with pytest.raises(InvalidInput, match=problem):
        await registry.service.create_version("tiny", manifest)


async def test_half_a_draft_makes_no_version(registry: Registry) -> None:
    await store_blobs(registry, CONFIG)
    manifest = manifest_of(file_of("config.json", CONFIG), file_of("draft/config.json", CONFIG))
    with pytest.raises(InvalidInput, match=r"needs draft/model\.safetensors"):
        await registry.service.create_version("tiny", manifest)


def test_a_stored_version_with_such_a_folder_of_old_stays_readable() -> None:
    manifest = manifest_of(file_of("config.json", CONFIG), file_of("draft/notes.txt", b"x"))
    assert parse(canonical_json(manifest), digest_of(manifest)) == manifest
