"""Where the user's caches are, and that they stay within a bound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.runtime.process.folders import cache_folder, compile_folder, folder_variables, keep_newest

ROOT = Path(__file__).parents[4]


def test_the_environment_may_name_it() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere")


def test_a_relative_name_counts_as_none() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "somewhere"}) == cache_folder({}) == Path.home() / ".cache"


def test_of_the_environment_only_what_names_folders_is_handed_on() -> None:
    assert folder_variables({"PATH": "/bin", "HOME": "", "CPATH": "/x"}) == {"PATH": "/bin", "HOME": ""}


def test_what_is_compiled_is_in_the_users_cache(tmp_path: Path) -> None:
    """Whether that is there already or not."""
    for name in (".", "not/there/yet"):
        cache = tmp_path / name
        assert compile_folder(tmp_path / "state", {"XDG_CACHE_HOME": str(cache)}) == cache / "fairway"
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_may_be_run_it_is_below_the_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path] = []

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_flag=os.ST_NOSUID | os.ST_NOEXEC)

    monkeypatch.setattr(os, "statvfs", statvfs)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert compile_folder(tmp_path / "state", cache) == tmp_path / "state" / "compiled"
    assert asked == [tmp_path]


def test_where_nothing_can_be_written_it_is_below_the_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Root may write everywhere, so the answer is given here."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert compile_folder(tmp_path, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "compiled"


@pytest.mark.usefixtures("homeless")
def test_without_a_home_it_is_below_the_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert compile_folder(Path("state"), {}) == tmp_path / "state" / "compiled"


def test_the_oldest_go_until_the_rest_is_within_the_bound(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "middle", "oldest")):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "file").write_bytes(bytes(1000))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    size_bytes = sum(path.stat().st_size for path in (tmp_path / "newest").rglob("*"))
    keep_newest(tmp_path, 3 * size_bytes)
    assert len(list(tmp_path.iterdir())) == 3
    keep_newest(tmp_path, 3 * size_bytes - 1)
    assert {path.name for path in tmp_path.iterdir()} == {"newest", "middle"}
    keep_newest(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def hold_folder(prefix: str, temporary: Path) -> subprocess.Popen[str]:
    """Start a process that holds a temporary folder until its input ends, and prints where it is."""
    program = (
        "import sys; from services.runtime.process.folders import temporary_folder\n"
        "with temporary_folder(sys.argv[1]) as at: print(at, flush=True); sys.stdin.read()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, prefix],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_temporary_folder_of_a_killed_process_is_removed_and_one_in_use_stays(tmp_path: Path) -> None:
    def folder_of(process: subprocess.Popen[str]) -> Path:
        assert process.stdout is not None
        return Path(process.stdout.readline().strip())

    with (
        hold_folder("fw-e-", tmp_path) as killed,
        hold_folder("fw-e-", tmp_path) as living,
        hold_folder("fw-other-", tmp_path) as other,
    ):
        folders = [folder_of(each) for each in (killed, living, other)]
        assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
        for each in (killed, other):
            each.kill()
            each.wait()
        with hold_folder("fw-e-", tmp_path) as last:
            found = folder_of(last)
            assert sorted(tmp_path.iterdir()) == sorted([*folders[1:], found])
        living.communicate(timeout=30)
        assert living.returncode == 0
    assert sorted(tmp_path.iterdir()) == [folders[2]]
