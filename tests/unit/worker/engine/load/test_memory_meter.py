"""What a step takes for a moment is seen, what is mapped from files is not counted."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np

from services.worker.engine.load.memory_meter import ProcessMeter

MIB = 2**20
NOISE = 6 * MIB


def touch(size: int) -> int:
    """Hold so much for less than a sample takes."""
    return int(np.ones(size, np.uint8)[-1])


def test_a_moments_peak_in_a_step_is_seen() -> None:
    with ProcessMeter() as meter:
        meter.begin()
        meter.run(lambda: touch(80 * MIB))
        assert 80 * MIB - NOISE <= meter.peak_bytes <= 80 * MIB + NOISE


def test_what_loading_leaves_and_a_step_takes_add_up() -> None:
    with ProcessMeter() as meter:
        meter.begin()
        kept = np.ones(40 * MIB, np.uint8)
        meter.run(lambda: touch(40 * MIB))
        meter.run(lambda: touch(10 * MIB))
        assert 80 * MIB - NOISE <= meter.peak_bytes <= 80 * MIB + NOISE
        assert kept[0] == 1


def test_what_is_held_while_loading_is_seen_and_a_mapped_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(bytes(64 * MIB))
    with ProcessMeter() as meter, path.open("rb") as file:
        meter.begin()
        meter.begin()  # the draft's loading begins it too
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            held = np.frombuffer(mapped, np.uint8)[: 32 * MIB].copy()
            assert sum(mapped[:: mmap.PAGESIZE]) == 0, "every page was read"
            deadline_s = time.monotonic() + 20.0
            while meter.peak_bytes < 32 * MIB - NOISE and time.monotonic() < deadline_s:
                time.sleep(0.005)  # a sample is taken each few milliseconds
            assert held[-1] == 0
        del held
        assert 32 * MIB - NOISE <= meter.peak_bytes <= 32 * MIB + NOISE
