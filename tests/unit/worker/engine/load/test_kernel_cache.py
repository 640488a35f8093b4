"""Where Triton is told to keep its kernels: a private folder within a bound, or what it chooses itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog

from services.worker.engine.load import torch_loading
from services.worker.engine.load.torch_loading import KERNELS_VARIABLE, keep_kernels_in


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing names a place, before and after."""
    monkeypatch.setenv(KERNELS_VARIABLE, "")
    monkeypatch.delenv(KERNELS_VARIABLE)


def test_they_are_in_a_private_folder_from_now_on(tmp_path: Path) -> None:
    keep_kernels_in(tmp_path / "compiled")
    kernels = tmp_path / "compiled" / "triton"
    assert os.environ[KERNELS_VARIABLE] == str(kernels)
    assert kernels.stat().st_mode & 0o777 == 0o700


def test_the_environment_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "/chosen")
    keep_kernels_in(tmp_path)
    assert os.environ[KERNELS_VARIABLE] == "/chosen"


def test_a_place_that_others_write_to_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton").chmod(0o777)
    with structlog.testing.capture_logs() as logs:
        keep_kernels_in(tmp_path)
    assert KERNELS_VARIABLE not in os.environ
    assert [line["event"] for line in logs] == ["kernels.cache_not_used"]


def test_old_kernels_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tmp_path / "triton"
    kernels.mkdir(mode=0o700)
    for age, name in enumerate(("new", "old")):
        (kernels / name).mkdir()
        (kernels / name / "kernel.cubin").write_bytes(bytes(100))
        os.utime(kernels / name, (1000 - age, 1000 - age))
    monkeypatch.setattr(torch_loading, "MAX_KERNEL_BYTES", 150)
    keep_kernels_in(tmp_path)
    assert [path.name for path in kernels.iterdir()] == ["new"]
