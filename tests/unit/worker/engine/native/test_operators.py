"""The operators against float64, and each row against itself alone.

A float32 sum of k products may be off by (k + 1) * 2^-24 of the sum of their magnitudes. A bfloat16 result
is rounded once more, by at most 2^-8 of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.execute.executor import RuledRows
from services.worker.engine.execute.operators import HeadNorms
from services.worker.engine.native.operators import NativeOperators
from services.worker.engine.sample.sampler import torch_rule_out

Make = Callable[..., NativeOperators]
DTYPES = (torch.float32, torch.bfloat16)
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
few = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_near(got: torch.Tensor, expected: torch.Tensor, slack: torch.Tensor) -> None:
    error = (got.double() - expected).abs()
    assert bool((error <= slack + 4 * HALF_ULP[got.dtype] * expected.abs()).all()), float(error.max())


def slack_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double().abs() @ weight.double().abs().T + 1) * (x.shape[1] + 4) * 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "k"),
    [(1, 1, 1), (2, 33, 7), (13, 31, 64), (14, 32, 40), (15, 100, 17), (47, 16, 1100), (300, 70, 600)],
)
def test_projection(operators: Make, dtype: torch.dtype, rows: int, columns: int, k: int) -> None:
    x, weight = random(rows, k, dtype=dtype), random(columns, k, dtype=dtype, seed=1)
    bias, residual = random(columns, dtype=dtype, seed=2), random(rows, columns, dtype=dtype, seed=3)
    expected, slack = x.double() @ weight.double().T, slack_of(x, weight)
    make = operators(dtype)
    assert_near(make.projection([weight], None)(x), expected, slack)
    assert_near(make.projection([weight], bias)(x), expected + bias.double(), slack)
    added = make.projection([weight], bias).add_to(residual.clone(), x)
    assert_near(added, residual.double() + expected + bias.double(), slack)
    assert make.projection([weight], bias).bytes == weight.nbytes + bias.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner", "k"), [(1, 1, 3), (5, 17, 24), (16, 40, 600), (29, 32, 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_gated(operators: Make, dtype: torch.dtype, rows: int, inner: int, k: int, biased: bool) -> None:
    x, weight = random(rows, k, dtype=dtype), random(2 * inner, k, dtype=dtype, seed=1) / k**0.5
    bias = random(2 * inner, dtype=dtype, seed=2) if biased else None
    both = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    slack = slack_of(x, weight)
    gate, up = both.chunk(2, dim=-1)
    off = slack[:, :inner] * up.abs() + slack[:, inner:] * (gate.abs() + 1)
    assert_near(operators(dtype).gated([weight], bias)(x), F.silu(gate) * up, 2 * off)


@pytest.mark.parametrize("sizes", [(96, 32, 32), (40, 7, 1), (17,), (1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_in_parts_is_the_weight_in_one(
    operators: Make, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """Parts end within a group of lanes as well as at its end, and are longer than what is packed at once."""
    weight, x = random(sum(sizes), 300, dtype=dtype, seed=4), random(3, 300, dtype=dtype)
    make, parts = operators(dtype), torch.split(weight, [*sizes])
    assert torch.equal(make.projection(parts, None)(x), make.projection([weight], None)(x))
    double = torch.cat((weight, weight.flip(0)))
    assert torch.equal(make.gated([*parts, weight.flip(0)], None)(x), make.gated([double], None)(x))


def test_gate_at_its_ends(operators: Make) -> None:
    values = torch.tensor([[-1e4], [-88.0], [-87.0], [-20.0], [0.0], [20.0], [88.0], [1e4]])
    got = operators().gated([torch.ones(2, 1)], None)(values)[:, 0]
    expected = F.silu(values.double()) * values.double()
    assert torch.allclose(got.double(), expected[:, 0], rtol=1e-6, atol=1e-28)
    assert bool(operators().gated([torch.ones(2, 1)], None)(torch.tensor([[float("nan")]])).isnan())


@few
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 80),
    k=st.sampled_from([5, 64, 530]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_row_of_a_linear_is_the_same_in_any_company(
    operators: Make, rows: int, columns: int, k: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    x, weight = random(rows, k, dtype=dtype), random(2 * columns, k, dtype=dtype, seed=1)
    x[data.draw(st.integers(0, rows - 1))] = float("nan")  # a neighbour that fails touches nobody
    start = data.draw(st.integers(0, rows - 1))
    part = x[start : data.draw(st.integers(start + 1, rows))]
    for one, two in ((1, 2), (3, 1), (2, 7)):  # more threads than parts of the weight, too
        whole = operators(dtype, threads=one)
        alone = operators(dtype, threads=two)
        residual = random(rows, 2 * columns, dtype=dtype, seed=2)
        for name in ("projection", "gated", "add_to"):
            make = "projection" if name == "add_to" else name
            mine, theirs = getattr(whole, make)([weight], None), getattr(alone, make)([weight], None)
            if name == "add_to":
                everything = mine.add_to(residual.clone(), x)
                some = theirs.add_to(residual[start : start + len(part)].clone(), part)
            else:
                everything, some = mine(x), theirs(part)
            assert torch.equal(everything[start : start + len(part)].isnan(), some.isnan())
            assert torch.equal(everything[start : start + len(part)].nan_to_num(), some.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 6, 16, 48, 100, 512])
def test_norm(operators: Make, dtype: torch.dtype, width: int) -> None:
    x, weight = random(9, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    got = operators(dtype).norm(x, weight)
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    assert_near(got, expected, torch.tensor(width * 2.0**-24))
    assert torch.equal(operators(dtype, threads=1).norm(x[4:5], weight)[0], got[4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 6, 10, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_heads(operators: Make, dtype: torch.dtype, dim: int, normed: bool) -> None:
    rows, heads, kv_heads = 7, 3, 1
    qkv = random(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    norms = HeadNorms(random(dim, dtype=dtype, seed=1), random(dim, dtype=dtype, seed=2))
    cos, sin = random(rows, 1, dim, dtype=dtype, seed=3), random(rows, 1, dim, dtype=dtype, seed=4)

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.double()
        if normed:
            x = F.rms_norm(x, (dim,), weight.double(), 1e-5).to(dtype).double()
        return x * cos.double() + x.roll(dim // 2, dims=-1) * sin.double()

    make = operators(dtype, kv_heads=kv_heads)
    q, k, v = make.heads(qkv.clone(), norms if normed else None, cos, sin)
    # The norm's own rounding may fall to the other side of a tie.
    slack = torch.tensor(2.0**-5 if normed and dtype is torch.bfloat16 else 1e-5)
    assert_near(q, expected(qkv[:, :heads], norms.query), slack)
    assert_near(k, expected(qkv[:, heads : heads + kv_heads], norms.key), slack)
    assert torch.equal(v, qkv[:, heads + kv_heads :])


@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 16, 100, 512, 1003])
@pytest.mark.parametrize("ruled", [[3], [5, 0, 3], [0, 1, 2, 3, 4, 5]])
def test_what_constraints_forbid_is_ruled_out(operators: Make, vocabulary: int, ruled: list[int]) -> None:
    """Bytes of zeros, of ones and mixed ones; masks as wide as the vocabulary, or wider. A logit that is no
    number, or infinite, stays visible."""
    drawn = np.random.default_rng(vocabulary)
    allowed = drawn.choice(
        np.array([0, 0xFF, *range(256)], np.uint8), (len(ruled), -(-vocabulary // 8) + vocabulary % 2)
    )
    allowed[:, ::3] = drawn.choice(np.array([0, 0xFF], np.uint8), allowed[:, ::3].shape)
    logits = random(6, vocabulary)
    logits[0, ::5], logits[3, ::7] = torch.nan, torch.inf
    expected = logits.clone()
    for row, bits in zip(ruled, allowed, strict=True):
        for token in range(vocabulary):
            if not bits[token // 8] >> token % 8 & 1:
                expected[row, token] += -torch.inf
    for rule_out in (operators().rule_out, operators(threads=1).rule_out, torch_rule_out):
        got = logits.clone()
        rule_out(got, RuledRows(ruled, allowed))
        assert torch.equal(got.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))
