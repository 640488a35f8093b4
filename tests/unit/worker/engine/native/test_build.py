"""Compiling at first use: found again, complete or not there, private, and never without a reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.engine.native import build as building
from services.worker.engine.native.build import BuildFailed, Toolchain, build
from services.worker.engine.native.loading import load_library

MakeCompiler = Callable[..., Toolchain]

# A compiler that notes each use; what it makes is its source's text.
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
case "$1" in --version) echo "fake {version}"; exit 0;; esac
{body}
while [ $# -gt 0 ]; do case "$1" in -o) out="$2"; shift;; esac; shift; done
echo compiled > "$out"
"""


@pytest.fixture
def compiler(tmp_path: Path) -> MakeCompiler:
    """Return a toolchain of one scripted compiler; ``log`` beside it has a line per use."""

    def make(
        body: str = ":", *, version: int = 1, name: str = "compiler", timeout_s: float = 20.0
    ) -> Toolchain:
        script = tmp_path / name
        script.write_text(COMPILER.format(log=tmp_path / "log", version=version, body=body))
        script.chmod(0o755)
        return Toolchain((str(script),), timeout_s=timeout_s)

    return make


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def uses(tmp_path: Path) -> int:
    """Return how often the compiler compiled."""
    return sum(" -c " in line for line in (tmp_path / "log").read_text().splitlines())


def test_the_second_time_it_is_found(compiler: MakeCompiler, cache: Path, tmp_path: Path) -> None:
    first = build(cache, compiler())
    assert build(cache, compiler()) == first
    assert uses(tmp_path) == 1
    assert first.read_bytes().startswith(b"compiled\n")
    assert cache.stat().st_mode & 0o777 == 0o700
    assert first.stat().st_mode & 0o777 == 0o500


def test_whatever_the_code_depends_on_is_in_the_name(
    compiler: MakeCompiler, cache: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "operators.cc").write_text("int a;")
    first = build(cache, compiler(), source)
    (source / "operators.cc").write_text("int b;")
    second = build(cache, compiler(), source)
    third = build(cache, compiler(version=2), source)
    runtime = tmp_path / "libgomp.so"
    runtime.touch()
    fourth = build(cache, Toolchain(compiler(version=2).compilers, openmp=runtime), source)
    assert len({first, second, third, fourth}) == 4


def test_processes_that_build_at_once_agree(compiler: MakeCompiler, cache: Path) -> None:
    toolchain = compiler("sleep 0.2")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build(cache, toolchain))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [path.name for path in cache.iterdir()] == [found[0].name]


def test_old_libraries_go(compiler: MakeCompiler, cache: Path) -> None:
    made = [build(cache, compiler(version=version)) for version in range(building.KEPT + 3)]
    left = set(cache.iterdir())
    assert len(left) == building.KEPT
    assert made[-1] in left


@pytest.mark.parametrize(
    ("body", "message"),
    [("echo no such header >&2; exit 3", "no such header"), ("kill -9 $$", "exit status -9")],
)
def test_a_compiler_that_fails_says_why(compiler: MakeCompiler, cache: Path, body: str, message: str) -> None:
    with pytest.raises(BuildFailed, match=message):
        build(cache, compiler(body))
    assert list(cache.iterdir()) == []


def test_a_compiler_that_hangs_is_ended_with_its_children(
    compiler: MakeCompiler, cache: Path, tmp_path: Path
) -> None:
    toolchain = compiler(f"(sleep 2; touch {tmp_path}/survived) & sleep 60", timeout_s=0.5)
    began_s = time.monotonic()
    with pytest.raises(BuildFailed, match=r"longer than 0\.5 s"):
        build(cache, toolchain)
    assert time.monotonic() - began_s < 20
    time.sleep(2.2)
    assert not (tmp_path / "survived").exists()


def test_the_next_compiler_is_tried(compiler: MakeCompiler, cache: Path) -> None:
    broken, good = compiler("exit 1", name="broken"), compiler(name="good")
    assert build(cache, Toolchain((*broken.compilers, *good.compilers))).exists()


def test_no_compiler(cache: Path) -> None:
    with pytest.raises(BuildFailed, match="no-such-compiler is not installed"):
        build(cache, Toolchain(("no-such-compiler",)))


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755, 0o777])
def test_a_folder_that_others_enter_is_refused(compiler: MakeCompiler, cache: Path, mode: int) -> None:
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(BuildFailed, match="not private"):
        build(cache, compiler())


def test_a_folder_that_others_can_replace_is_refused(compiler: MakeCompiler, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(BuildFailed, match="others can replace"):
        build(shared / "cache", compiler())
    shared.chmod(0o1777)  # sticky: entries belong to who made them
    assert build(shared / "cache", compiler()).exists()


def test_a_library_that_others_write_is_refused(compiler: MakeCompiler, cache: Path) -> None:
    build(cache, compiler()).chmod(0o522)
    with pytest.raises(BuildFailed, match="only this user"):
        build(cache, compiler())


def test_a_link_in_place_of_the_library_is_refused(
    compiler: MakeCompiler, cache: Path, tmp_path: Path
) -> None:
    library = build(cache, compiler())
    library.unlink()
    (tmp_path / "other").touch()
    library.symlink_to(tmp_path / "other")
    with pytest.raises(BuildFailed, match="only this user"):
        build(cache, compiler())


def test_a_cache_that_cannot_be_made(compiler: MakeCompiler, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildFailed, match="Not a directory"):
        build(tmp_path / "file" / "cache", compiler())


@pytest.mark.parametrize("left", [0, 3, 20, 40])
def test_a_library_cut_short_is_made_again(
    compiler: MakeCompiler, cache: Path, tmp_path: Path, left: int
) -> None:
    """A full disk or a lost write: mapping such a file would end the process."""
    library = build(cache, compiler())
    whole = library.read_bytes()
    library.chmod(0o700)
    library.write_bytes(whole[:left])
    assert build(cache, compiler()).read_bytes() == whole
    assert uses(tmp_path) == 2


def test_there_are_operators_for_two_types(library_file: Path) -> None:
    with pytest.raises(BuildFailed, match="float16"):
        load_library(library_file.parent, torch.float16)
    for dtype in (torch.float32, torch.bfloat16):
        load_library(library_file.parent, dtype)
