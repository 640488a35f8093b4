"""Shared memory of ended processes is removed; that of others is not."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from services.runtime.process.shared_memory import sweep


def test_what_no_process_maps_is_removed(tmp_path: Path) -> None:
    began_s = time.time()
    names = ("vllm_dist_ab-tp:0-[0-1]-cpushm_0", "torch_12_3_0", "psm_0a1b", "sem.mp-0_ab1c")
    left = [tmp_path / name for name in names]
    used, older, foreign = tmp_path / "psm_ffff", tmp_path / "psm_0000", tmp_path / "sem.mine"
    for path in (*left, used, older, foreign):
        path.write_bytes(b"x" * 4096)
    os.utime(older, (began_s - 3600, began_s - 3600))
    with used.open("r+b") as stream, mmap.mmap(stream.fileno(), 0):
        own = tmp_path.parent / f"{tmp_path.name}-proc"
        own.mkdir()
        (own / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
        assert sweep(began_s, folder=tmp_path, processes=own) == 4
    assert sorted(tmp_path.iterdir()) == sorted([used, older, foreign])


def test_only_segments_of_ranks_are_removed_where_a_process_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    for name in ("psm_0a", "vllm_dist_0a-cpushm_0"):
        (tmp_path / "shm" / name).touch()
    (tmp_path / "proc" / "2" / "maps").mkdir(parents=True)
    assert sweep(0.0, folder=tmp_path / "shm", processes=tmp_path / "proc") == 1
    assert [each.name for each in (tmp_path / "shm").iterdir()] == ["psm_0a"]


def test_a_semaphore_of_a_living_process_stays(tmp_path: Path) -> None:
    """It is mapped by the name that it had before its own."""
    began_s, first = time.time(), tmp_path / "sem.Zx81Qa"
    first.write_bytes(b"x" * 32)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / str(os.getpid())).symlink_to(f"/proc/{os.getpid()}")
    with first.open("r+b") as stream, mmap.mmap(stream.fileno(), 0):
        (tmp_path / "sem.mp-living").hardlink_to(first)
        first.unlink()
        assert sweep(began_s, folder=tmp_path, processes=tmp_path / "proc") == 0
    assert sweep(began_s, folder=tmp_path, processes=tmp_path / "proc") == 1


def test_the_first_process_need_not_be_readable(tmp_path: Path) -> None:
    """Not even the superuser may read it in some containers."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "sem.mp-0a").touch()
    (tmp_path / "proc" / "1" / "maps").mkdir(parents=True)
    assert sweep(0.0, folder=tmp_path / "shm", processes=tmp_path / "proc") == 1
