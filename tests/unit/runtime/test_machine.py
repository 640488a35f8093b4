"""The quota of a container, as both versions of control groups write it down."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.machine import available_cpus, cpu_quota, default_engine_threads


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, 1e9),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1e9),
        ({"cpu/cpu.cfs_quota_us": "400000\n"}, 1e9),
        ({"cpu.max": "what\n"}, 1e9),
        ({"cpu.max": "100000 0\n"}, 1e9),
        ({}, 1e9),
    ],
)
def test_quota_of_a_control_group(tmp_path: Path, files: dict[str, str], granted: float) -> None:
    assert cpu_quota(write(tmp_path, files)) == granted


def test_there_is_always_a_processor_and_a_thread() -> None:
    assert 1 <= default_engine_threads() <= available_cpus()
