"""Which backend a device has, as far as it can be told without one."""

from __future__ import annotations

import pytest
import torch

from services.worker.engine.cuda.backend import has_kernels
from services.worker.engine.cuda.plan import cutting_for


def test_a_cpu_has_no_kernels() -> None:
    assert not has_kernels(torch.device("cpu"))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("number_bytes", [2, 4])
def test_decodes_are_cut_until_every_multiprocessor_has_work(
    number_bytes: int, head_dim: int, exact: bool
) -> None:
    cutting = cutting_for(number_bytes, head_dim, kv_heads=8, processors=132, exact=exact)
    assert cutting.pieces * 8 >= 2 * 132
    assert cutting.tile >= 16
    assert cutting.rows >= 16
