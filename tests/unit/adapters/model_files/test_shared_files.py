"""Versions with equal files have them once on the disk; what damages one version is not repaired in place."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from services.adapters.model_files.cache import ModelFiles
from services.core.manifest import (
    CHUNK_BYTES,
    Manifest,
    ManifestFile,
    digest_of,
    sha256_of,
    weights_digest_of,
)
from services.core.records import VersionRecord
from services.ports.registry import VersionSource
from tests.support.clocks import HandClock

WEIGHTS = bytes(range(256)) * (CHUNK_BYTES // 256) + b"the second chunk"
NAME = "model.safetensors"


class Source(VersionSource):
    """Versions in memory; counts the chunks that were sent."""

    def __init__(self) -> None:
        self.chunks: dict[str, bytes] = {}
        self.manifests: dict[str, Manifest] = {}
        self.sent = 0

    def add(self, **contents: bytes) -> str:
        """Return the digest of a version with these files; the last ``_`` is the dot."""
        files = []
        for name, content in sorted(contents.items()):
            parts = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
            self.chunks |= {sha256_of(part): part for part in parts}
            chunks = tuple(map(sha256_of, parts))
            files.append(
                ManifestFile(".".join(name.rsplit("_", 1)), len(content), sha256_of(content), chunks)
            )
        template = next((file.digest for file in files if file.path == "chat_template.jinja"), "")
        manifest = Manifest(
            tuple(files), weights_digest=weights_digest_of(files), chat_template_digest=template
        )
        self.manifests[digest_of(manifest)] = manifest
        return digest_of(manifest)

    async def get_version(self, model: str, version: str) -> tuple[VersionRecord, Manifest]:
        return VersionRecord(model, version, 0, 0.0), self.manifests[version]

    async def download(self, digest: str, offset_bytes: int = 0) -> AsyncGenerator[bytes, None]:
        self.sent += 1
        yield self.chunks[digest][offset_bytes:]


def cache(source: Source, root: Path, max_bytes: int = 3 * len(WEIGHTS)) -> ModelFiles:
    return ModelFiles(source, root, HandClock(), max_bytes=max_bytes)


def two(source: Source) -> tuple[str, str]:
    """Two versions that differ in their template."""
    first, second = (
        source.add(config_json=b"{}", model_safetensors=WEIGHTS, chat_template_jinja=text)
        for text in (b"first", b"other")
    )
    return first, second


async def test_equal_weights_are_fetched_and_kept_once(tmp_path: Path) -> None:
    source = Source()
    first, second = two(source)
    files = cache(source, tmp_path, max_bytes=len(WEIGHTS) + 100)  # both only fit if they share
    one = await files.fetch("m", first)
    sent = source.sent
    files.pin(one)
    two_ = await files.fetch("m", second)
    assert source.sent == sent + 1, "more than the template was fetched"
    assert (one / NAME).samefile(two_ / NAME)
    assert (two_ / "chat_template.jinja").read_bytes() == b"other"
    assert files.kept_bytes == len(WEIGHTS) + len(b"{}") + 10
    files.check_integrity()
    files.close()
    again = cache(source, tmp_path)
    assert await again.fetch("m", second) == two_
    assert again.kept_bytes == len(WEIGHTS) + len(b"{}") + 10, "after a restart"
    again.close()


async def test_weights_of_one_size_and_name_are_not_mixed_up(tmp_path: Path) -> None:
    source = Source()
    first = source.add(config_json=b"{}", model_safetensors=WEIGHTS)
    second = source.add(config_json=b"{}", model_safetensors=WEIGHTS[:-1] + b"!")
    files = cache(source, tmp_path)
    await files.fetch("m", first)
    folder = await files.fetch("m", second)
    assert (folder / NAME).read_bytes()[-1:] == b"!"


async def test_a_damaged_file_is_replaced_and_the_other_version_s_is_not_written_to(tmp_path: Path) -> None:
    source = Source()
    first, second = two(source)
    files = cache(source, tmp_path)
    one, two_ = await files.fetch("m", first), await files.fetch("m", second)
    damaged = WEIGHTS[:-1] + b"x"
    (one / NAME).write_bytes(damaged)
    assert (await files.fetch("m", second, recheck=True) / NAME).read_bytes() == WEIGHTS
    assert (one / NAME).read_bytes() == damaged, "an engine may read it"
    assert (await files.fetch("m", first, recheck=True) / NAME).read_bytes() == WEIGHTS
    assert (one / NAME).samefile(two_ / NAME), "they share again"
    files.check_integrity()


async def test_a_download_that_links_files_is_not_dropped_as_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    shared = {f"f{number:03d}_json": f"{number}".encode() for number in range(20)}
    first, second = (source.add(**shared, config_json=text) for text in (b"{}", b"[]"))
    files = cache(source, tmp_path)
    await files.fetch("m", first)
    third = source.add(config_json=b"{ }")
    others: list[asyncio.Task[Path]] = []
    came, link = threading.Event(), os.link

    def note(done_ratio: float) -> None:
        if not others:  # its folder is the oldest of more than are kept
            for number in range(10):
                (stale := tmp_path / "partial" / f"{number:064d}").mkdir()
                os.utime(stale, (2e9, 2e9 + number))
            others.append(asyncio.create_task(files.fetch("m", third)))
            others[0].add_done_callback(lambda _: came.set())

    def link_once_the_third_came(*arguments: Any) -> None:
        if others:
            assert came.wait(60.0), "the third waits for the second"
        link(*arguments)

    monkeypatch.setattr(os, "link", link_once_the_third_came)
    folder = await files.fetch("m", second, progress=note)
    assert came.is_set()
    assert len(list(folder.iterdir())) == len(shared) + 1, "files were dropped with the folder"
    assert len(list((tmp_path / "partial").iterdir())) == 8


async def test_the_files_of_an_evicted_version_stay_the_other_s(tmp_path: Path) -> None:
    source = Source()
    first, second = two(source)
    files = cache(source, tmp_path, max_bytes=2 * len(WEIGHTS) + 10)
    await files.fetch("m", first)
    files.pin(folder := await files.fetch("m", second))
    await files.fetch("m", source.add(config_json=b"{}", model_safetensors=WEIGHTS[::-1]))
    assert (folder / NAME).read_bytes() == WEIGHTS
    assert files.kept_bytes == 2 * len(WEIGHTS) + 7
    files.check_integrity()
