"""torch's linears: what they compute, and that float32 rows are independent of how many there are, on
processors for which that was observed."""

from __future__ import annotations

import pytest
import torch

from services.worker.engine.execute.operators import Linear


@pytest.mark.parametrize(("columns", "k"), [(5, 3), (48, 48), (100, 1408), (33, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(columns: int, k: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(k)
    x = torch.randn(40, k, generator=random).to(dtype)
    weight = torch.randn(columns, k, generator=random).to(dtype) / k**0.5
    bias = torch.randn(columns, generator=random).to(dtype)
    linear = Linear(weight, bias)
    whole = linear(x)
    expected = x.double() @ weight.double().T + bias.double()
    assert float((whole.double() - expected).abs().max()) < (1e-4 if dtype is torch.float32 else 0.1)
    assert torch.equal(linear.add_to(x.new_ones(40, columns), x), whole + 1)
    if dtype is torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        for rows in (1, 2, 3, 7, 16, 33):
            assert torch.equal(linear(x[:rows]), whole[:rows])
