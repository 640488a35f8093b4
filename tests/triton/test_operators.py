"""The fused elementwise kernels against torch's operators, in float64, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.worker.engine.cuda.operators import TritonOperators
from services.worker.engine.execute.operators import HeadNorms, TorchOperators

pytestmark = pytest.mark.timeout(900)

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 2),
    st.sampled_from([2, 6, 16]),
    dtypes,
    st.booleans(),
)
@settings(max_examples=12, deadline=None, phases=(Phase.generate, Phase.shrink))
def test_heads_are_normalised_and_rotated(
    rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + heads * 10 + dim)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    qkv, cos, sin = draw(rows, heads + 2 * kv_heads, dim), draw(rows, 1, dim), draw(rows, 1, dim)
    weights = (draw(dim), draw(dim))
    norms = HeadNorms(*weights) if has_norms else None
    wide = HeadNorms(*(weight.double() for weight in weights)) if has_norms else None
    plain = TorchOperators(kv_heads=kv_heads, eps=1e-5)
    expected = plain.heads(qkv.double(), wide, cos.double(), sin.double())
    got = TritonOperators(kv_heads=kv_heads, eps=1e-5).heads(qkv.clone(), norms, cos, sin)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [5, 1030])
def test_gate_and_residual(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(2, 8, generator=generator), torch.randn(2 * width, 8, generator=generator)
    residual, bias = (
        torch.randn(2, 2 * width, generator=generator),
        torch.randn(2 * width, generator=generator),
    )
    operators, plain = TritonOperators(kv_heads=1, eps=1e-5), TorchOperators(kv_heads=1, eps=1e-5)
    for offset in (None, bias):
        own_bias = None if offset is None else offset.to(dtype)
        wide_bias = None if own_bias is None else own_bias.double()
        ours, theirs = (
            operators.gated([weight.to(dtype)], own_bias)(x.to(dtype)),
            plain.gated([weight.to(dtype).double()], wide_bias)(x.to(dtype).double()),
        )
        # The product is rounded before the gate: relative to its size, not to the result's.
        torch.testing.assert_close(ours.double(), theirs, atol=20 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        mine = operators.projection([weight.to(dtype)], own_bias)
        added = mine.add_to(residual.to(dtype, copy=True), x.to(dtype))  # it is changed
        wide = plain.projection([weight.to(dtype).double()], wide_bias)
        expected = wide.add_to(residual.to(dtype).double(), x.to(dtype).double())
        torch.testing.assert_close(added.double(), expected, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
