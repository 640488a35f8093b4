"""Compiling at first use: found again, complete or not there, private, and never without a reason."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.engine.load.torch_loading import load_library
from services.worker.engine.native import build as building
from services.worker.engine.native.build import BuildFailed, Toolchain, build

MakeCompiler = Callable[..., Toolchain]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def uses(tmp_path: Path) -> int:
    """Return how often the compiler compiled."""
    log = tmp_path / "log"
    return sum(" -c " in line for line in log.read_text().splitlines()) if log.exists() else 0


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
    child = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; touch {tmp_path}/survived"
    toolchain = compiler(f"({child}) & sleep 60", timeout_s=2.0)
    began_s = time.monotonic()
    with pytest.raises(BuildFailed, match=r"longer than|no time is left"):
        build(cache, toolchain)
    assert time.monotonic() - began_s < 50
    (tmp_path / "go").touch()
    time.sleep(0.5)
    assert not (tmp_path / "survived").exists()


def test_compilers_share_one_deadline(compiler: MakeCompiler, cache: Path, tmp_path: Path) -> None:
    """One that hangs takes the time of all that follow."""
    names = [compiler("sleep 60", name=f"hangs{number}").compilers[0] for number in range(3)]
    began_s = time.monotonic()
    with pytest.raises(BuildFailed) as failed:
        build(cache, Toolchain(names, timeout_s=1.0))
    assert time.monotonic() - began_s < 50
    first, *others = str(failed.value).split("; ")
    assert "longer than" in first or "no time is left for it" in first
    assert [other.rpartition(": ")[2] for other in others] == ["no time is left for it"] * 2
    assert uses(tmp_path) <= 1
    assert list(cache.iterdir()) == []


def test_another_name_of_a_compiler_that_failed_is_not_tried(
    compiler: MakeCompiler, cache: Path, tmp_path: Path
) -> None:
    broken, good = compiler("exit 1", name="broken"), compiler(name="good")
    (tmp_path / "alias").symlink_to(broken.compilers[0])
    names = (*broken.compilers, str(tmp_path / "alias"))
    with pytest.raises(BuildFailed):
        build(cache, Toolchain(names))
    assert uses(tmp_path) == 1
    assert build(cache, Toolchain((*names, *good.compilers))).exists()
    assert uses(tmp_path) == 3


def test_what_a_compiler_leaves_running_is_left_alone_once_it_is_reaped(
    compiler: MakeCompiler, cache: Path, tmp_path: Path
) -> None:
    """Its process group's number may be another's by then."""
    build(cache, compiler(f"(sleep 0.5; touch {tmp_path}/survived) > /dev/null 2>&1 &"))
    ends_s = time.monotonic() + 20
    while not (tmp_path / "survived").exists():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@pytest.mark.parametrize("body", [":", "exit 1"])
def test_folders_of_builds_that_were_killed_go(compiler: MakeCompiler, cache: Path, body: str) -> None:
    cache.mkdir(mode=0o700)
    for name, age_s in (("build-killed", building.ABANDONED_S + 60), ("build-under-way", 60)):
        (cache / name).mkdir()
        (cache / name / "operators.o").touch()
        os.utime(cache / name, (time.time() - age_s,) * 2)
    with contextlib.suppress(BuildFailed):
        build(cache, compiler(body))
    assert [path.name for path in cache.glob("build-*")] == ["build-under-way"]


def test_a_compiler_sees_nothing_else_of_the_environment(
    compiler: MakeCompiler, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX", "CCACHE_DIR", "LC_ALL", "LANG"):
        monkeypatch.setenv(name, str(tmp_path))
    build(cache, compiler(f"env > {tmp_path}/env"))
    lines = (tmp_path / "env").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines)
    assert seen["PATH"] == os.environ["PATH"]
    assert seen["LANG"] == "C"
    of_the_shell = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert seen.keys() - of_the_shell <= {"PATH", "HOME", "TMPDIR", "LANG"}


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
