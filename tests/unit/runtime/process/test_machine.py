"""The quota of a container, as both versions of control groups write it down."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.process.machine import (
    available_cpus,
    cpu_quota,
    default_engine_threads,
    device_type,
    memory_kills,
)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
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


def test_kills_for_memory_are_those_that_the_kernel_counts(tmp_path: Path) -> None:
    write(tmp_path, {"vmstat": "pgfault 9\noom_kill 3\noom_killed 7\n", "old": "pgfault 9\n"})
    assert [memory_kills(tmp_path / name) for name in ("vmstat", "old", "none")] == [3, 0, 0]
    assert memory_kills() >= 0


def test_there_is_always_a_processor_and_a_thread() -> None:
    assert 1 <= default_engine_threads() <= available_cpus()


@pytest.mark.parametrize(
    ("device", "files", "found"),
    [
        ("cpu", {}, "cpu"),
        ("cuda:0", {}, "cuda"),
        ("cuda", {"0000:01/information": "Model: \t\t NVIDIA H200\nIRQ: 1\n"}, "nvidia-h200"),
        (
            "cuda:1",
            {"0000:01/information": "IRQ: 1\n", "0000:02/information": "Model: A 100 (PCIe)\n"},
            "a-100-pcie",
        ),
        ("mps", {"0000:01/information": "Model: NVIDIA H200\n"}, "mps"),
    ],
)
def test_a_device_has_the_name_of_its_gpu(
    tmp_path: Path, device: str, files: dict[str, str], found: str
) -> None:
    assert device_type(device, write(tmp_path, files)) == found
