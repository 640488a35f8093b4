"""Memory in huge pages: where it lies, and what the system is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.engine.native.operators import HUGE_PAGE, NativeOperators, _Packed, huge_tensor

SMAPS = Path("/proc/self/smaps")
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([a-z0-9 ]+)$", re.MULTILINE | re.DOTALL)


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="the kernel has no transparent huge pages",
)


def flags_at(address: int) -> list[str]:
    for begin, end, flags in MAPPING.findall(SMAPS.read_text()):
        if int(begin, 16) <= address < int(end, 16):
            return str(flags).split()
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, HUGE_PAGE - 4, HUGE_PAGE, 3 * HUGE_PAGE + 4096 + 4])
def test_it_is_all_there_and_zero(size: int, dtype: torch.dtype) -> None:
    tensor = huge_tensor(size // dtype.itemsize, dtype)
    assert tensor.dtype == dtype
    assert tensor.shape == (size // dtype.itemsize,)
    assert not tensor.any()
    tensor.fill_(1.0)
    assert bool((tensor == 1.0).all())


@needs_huge_pages
def test_whole_huge_pages_are_asked_for_and_the_rest_is_small() -> None:
    tensor = huge_tensor((2 * HUGE_PAGE + 4096) // 4, torch.float32)
    begin = tensor.data_ptr()
    assert begin % HUGE_PAGE == 0
    assert "hg" in flags_at(begin)
    assert "hg" in flags_at(begin + 2 * HUGE_PAGE - 1)
    assert "nh" in flags_at(begin + 2 * HUGE_PAGE)


@needs_huge_pages
def test_a_packed_weight_is_in_huge_pages(operators: Callable[..., NativeOperators]) -> None:
    weight = torch.ones(HUGE_PAGE // 4 // 64 + 32, 64)
    for packed in (operators().projection([weight], None), operators().gated([weight], None)):
        assert isinstance(packed, _Packed)
        assert "hg" in flags_at(packed._weight.data_ptr())


def test_it_lives_as_long_as_its_last_view() -> None:
    view = huge_tensor(HUGE_PAGE, torch.float32)[7:9]
    others = [huge_tensor(HUGE_PAGE, torch.float32).fill_(3.0) for _ in range(4)]
    assert view.tolist() == [0.0, 0.0]
    assert len(others) == 4
