"""Shared memory of ended processes is removed; that of others is not."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from services.runtime.process.shared_memory import sweep


def test_what_no_process_maps_is_removed(tmp_path: Path) -> None:
    began_s = time.time()
    left = [tmp_path / name for name in ("vllm_dist_ab-tp:0-[0-1]-cpushm_0", "torch_12_3_0", "psm_0a1b")]
    used, older, foreign = tmp_path / "psm_ffff", tmp_path / "psm_0000", tmp_path / "sem.mine"
    for path in (*left, used, older, foreign):
        path.write_bytes(b"x" * 4096)
    os.utime(older, (began_s - 3600, began_s - 3600))
    with used.open("r+b") as stream, mmap.mmap(stream.fileno(), 0):
        assert sweep(began_s, folder=tmp_path) == 3
    assert sorted(tmp_path.iterdir()) == sorted([used, older, foreign])


def test_nothing_is_removed_where_a_process_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "psm_0a").touch()
    (tmp_path / "proc" / "1" / "maps").mkdir(parents=True)
    assert sweep(0.0, folder=tmp_path / "shm", processes=tmp_path / "proc") == 0
    assert (tmp_path / "shm" / "psm_0a").exists()
