from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from services.adapters.model_files.folders import ModelFolders, chunk_is_good, finish_file, place_chunk
from services.core.manifest import CHUNK_BYTES, ManifestFile, sha256_of

ONE, TWO = b"1" * CHUNK_BYTES, b"22"
FILE = ManifestFile(
    "d/a.safetensors", CHUNK_BYTES + 2, sha256_of(ONE + TWO), (sha256_of(ONE), sha256_of(TWO))
)


def test_chunks_come_in_any_order_and_what_lay_behind_the_last_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"torn" * CHUNK_BYTES)
    place_chunk(path, FILE.start(1), TWO)
    assert not finish_file(path, FILE)
    place_chunk(path, 0, ONE)
    assert finish_file(path, FILE)
    assert path.read_bytes() == ONE + TWO


@pytest.mark.parametrize("damage", [b"", b"1", ONE[:-1], ONE[:-1] + b"0"])
def test_short_or_changed_chunk_is_not_good_and_not_hashed(tmp_path: Path, damage: bytes) -> None:
    path, whole = tmp_path / "a", hashlib.sha256()
    path.write_bytes(damage)
    assert not chunk_is_good(path, FILE, 0, whole)
    assert whole.hexdigest() == hashlib.sha256().hexdigest()
    path.write_bytes(ONE + TWO)
    assert chunk_is_good(path, FILE, 0, whole)
    assert chunk_is_good(path, FILE, 1, whole)
    assert "sha256:" + whole.hexdigest() == FILE.digest


def test_promoted_folder_has_the_wanted_files_only(tmp_path: Path) -> None:
    folders = ModelFolders(tmp_path)
    assert folders.open() == {}
    path = folders.begin_file("v", FILE)
    place_chunk(path, 0, ONE)
    place_chunk(path, FILE.start(1), TWO)
    (path.parent / "stray.json").write_text("{}")
    ready = folders.promote("v", [FILE])
    assert [p.relative_to(ready).as_posix() for p in ready.rglob("*") if p.is_file()] == [FILE.path]
    assert folders.present("v", [FILE])
    assert list(folders.inodes("v").values()) == [FILE.size_bytes]
    (ready / FILE.path).write_bytes(ONE)
    assert not folders.present("v", [FILE])
    folders.close()


def test_a_link_in_a_partial_folder_is_not_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("precious")
    link = tmp_path / "link"
    link.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic link"):
        place_chunk(link, 0, TWO)
    assert outside.read_text() == "precious"


def test_eviction_that_was_killed_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    folders = ModelFolders(tmp_path)
    folders.open()
    gone = folders.partial("v.gone")
    gone.mkdir()
    (gone / "config.json").write_text("{}")
    folders.close()
    again = ModelFolders(tmp_path)
    assert again.open() == {}
    assert not gone.exists()
    again.close()
