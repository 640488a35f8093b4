"""Mode "exact" under Triton's interpreter: a row's bits are its own, and near those of float64.

The interpreter rounds to bfloat16 and multiplies what was rounded in float32, a tile at a time; how tensor
cores add within a tile is not shown.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from bench.gpus.random_model import SHAPES
from fairway.formats.decoder_config import parse_config
from services.worker.engine.cuda.backend import fused_operators
from services.worker.engine.cuda.exact import TILES, ExactOperators, TritonReductions
from services.worker.engine.cuda.operators import TritonOperators
from services.worker.engine.execute.operators import HeadNorms, TorchOperators
from services.worker.engine.sample.sampler import TorchReductions, invert_cdf
from services.worker.engine_protocol import EngineConfig

pytestmark = pytest.mark.timeout(900)

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
RELATIVE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}  # of the result
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
MOST_ROWS = 2 * max(tile.rows for tile in TILES.values()) + 2
ROWS = (4, 17, MOST_ROWS)

Forms = dict[str, Callable[[torch.Tensor], torch.Tensor]]


def drawn(seed: int, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def named(name: str) -> Callable[[str], str]:
    """Return what puts the name before the message of a comparison."""
    return lambda text: f"{name}: {text}"


def forms(columns: int, depth: int, dtype: torch.dtype, has_bias: bool) -> Forms:
    """Return all that is computed by row from a row's ``depth`` numbers; a residual is a function of them.

    "unrounded" is float32 also of bfloat16, which would hide most of what its sums are off by.
    """
    exact = ExactOperators(kv_heads=1, eps=1e-5)
    weight, pair = drawn(1, columns, depth, dtype=dtype), drawn(2, 2 * columns, depth, dtype=dtype)
    bias = drawn(3, 2 * columns, dtype=dtype) if has_bias else None
    own_bias = None if bias is None else bias[:columns]
    projection, gated = exact.projection([weight], own_bias), exact.gated([pair], bias)
    scale = drawn(4, depth, dtype=dtype)
    return {
        "plain": projection,
        "unrounded": lambda x: projection.into(x, torch.empty(len(x), columns)),
        "added": lambda x: projection.add_to(x[:, :1].repeat(1, columns), x),
        "gated": gated,
        "norm": lambda x: exact.norm(x, scale),
    }


def expected(columns: int, depth: int, dtype: torch.dtype, has_bias: bool) -> Forms:
    """Return the same in float64."""
    plain = TorchOperators(kv_heads=1, eps=1e-5)
    weight, pair = (
        drawn(seed, count, depth, dtype=dtype).double() for seed, count in ((1, columns), (2, 2 * columns))
    )
    bias = drawn(3, 2 * columns, dtype=dtype).double() if has_bias else None
    projection = plain.projection([weight], None if bias is None else bias[:columns])
    scale = drawn(4, depth, dtype=dtype).double()
    return {
        "plain": projection,
        "unrounded": projection,
        "added": lambda x: projection.add_to(x[:, :1].repeat(1, columns), x),
        "gated": plain.gated([pair], bias),
        "norm": lambda x: plain.norm(x, scale),
    }


@given(st.sampled_from([1, 3, 33]), st.integers(1, 100), st.integers(1, 150), DTYPES, st.booleans())
@example(rows=5, columns=101, depth=60, dtype=torch.bfloat16, has_bias=True)
@example(rows=2, columns=64, depth=128, dtype=torch.float32, has_bias=False)
@settings(max_examples=8, deadline=None, phases=PHASES)
def test_products_and_norms_are_those_of_float64(
    rows: int, columns: int, depth: int, dtype: torch.dtype, has_bias: bool
) -> None:
    x = drawn(rows, rows, depth, dtype=dtype)
    right = expected(columns, depth, dtype, has_bias)
    for name, form in forms(columns, depth, dtype, has_bias).items():
        got, wanted = form(x), right[name](x.double())
        assert got.dtype == (torch.float32 if name == "unrounded" else dtype)
        # A sum of many may be near zero: its error is relative to what was added.
        size = 1.0 if name == "norm" else depth
        torch.testing.assert_close(
            got.double(),
            wanted,
            atol=3e-6 * size,
            rtol=RELATIVE[dtype],
            msg=named(name),
        )


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "depth"), [(70, 300), (101, 60), (64, 128)])
def test_a_row_is_the_same_alone_and_in_any_batch_at_any_place(
    columns: int, depth: int, dtype: torch.dtype
) -> None:
    """Bit for bit, for tiles that divide the weight and others, beside large numbers and NaN."""
    own = drawn(7, 4, depth, dtype=dtype)
    for name, form in forms(columns, depth, dtype, has_bias=True).items():
        alone = torch.cat([form(own[row : row + 1]) for row in range(len(own))])
        for rows in ROWS:
            places = [0, rows // 3, rows // 2, rows - 1]
            beside = drawn(rows, rows, depth, dtype=dtype) * 1e4
            beside[::3] = torch.nan
            beside[places] = own
            assert torch.equal(form(beside)[places], alone), (name, rows)


@pytest.mark.parametrize("width", [300, 1100])
def test_the_norm_of_a_row_is_the_same_in_any_batch(width: int) -> None:
    """Many rows: what another order of additions changes in a sum is often lost in its root."""
    exact = ExactOperators(kv_heads=1, eps=1e-5)
    rows, weight = drawn(1, 40, width), drawn(2, width)
    alone = torch.cat([exact.norm(rows[row : row + 1], weight) for row in range(len(rows))])
    assert torch.equal(exact.norm(rows, weight), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_a_row_are_the_same_in_any_batch(dtype: torch.dtype) -> None:
    exact = ExactOperators(kv_heads=1, eps=1e-5)
    norms = HeadNorms(drawn(1, 6, dtype=dtype), drawn(2, 6, dtype=dtype))
    qkv, cos, sin = (drawn(seed, 9, count, 6, dtype=dtype) for seed, count in ((3, 4), (4, 1), (5, 1)))
    together = exact.heads(qkv.clone(), norms, cos, sin)
    for row in (0, 4, 8):
        part = slice(row, row + 1)
        alone = exact.heads(qkv[part].clone(), norms, cos[part], sin[part])
        assert all(torch.equal(a, b[part]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("width", [5, 101, 1024, 2050])
def test_reductions_are_torchs_and_a_row_is_its_own(width: int) -> None:
    ours, torchs = TritonReductions(), TorchReductions()
    rows = drawn(width, 7, width) * 4
    rows[:, width // 2 :] = rows[:, width // 2 : width // 2 + 1]  # equal ones
    rows[2, 0] = -torch.inf
    results = {
        "log_softmax": (ours.log_softmax(rows), torchs.log_softmax(rows)),
        "sums": (ours.sums(rows.exp()), torchs.sums(rows.exp())),
        "running_sums": (ours.running_sums(rows.exp().double()), torchs.running_sums(rows.exp().double())),
        "greatest": (ours.greatest(rows, 4)[0], torchs.greatest(rows, 4)[0]),
    }
    for name, (mine, theirs) in results.items():
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6, msg=named(name))
    values, places = ours.greatest(rows, 4)
    assert torch.equal(rows.gather(1, places), values)
    tied = values[:, 1:] == values[:, :-1]
    assert bool((places[:, 1:] > places[:, :-1])[tied].all())
    for row in range(7):
        alone = rows[row : row + 1]
        assert torch.equal(ours.log_softmax(alone)[0], results["log_softmax"][0][row])
        assert torch.equal(ours.sums(alone.exp())[0], results["sums"][0][row])
        assert torch.equal(ours.running_sums(alone.exp().double())[0], results["running_sums"][0][row])


def test_the_mode_chooses_the_operators() -> None:
    model, config = parse_config(SHAPES["tiny"]), EngineConfig(socket_path="", model_dir="", device="cuda")
    kinds = {
        mode: type(fused_operators(model, msgspec.structs.replace(config, mode=mode)))
        for mode in ("auto", "free", "exact")
    }
    assert kinds == {"auto": TritonOperators, "free": TritonOperators, "exact": ExactOperators}


def test_a_draw_is_the_same_alone_and_among_others() -> None:
    weights = drawn(1, 6, 300).exp()
    weights[:, ::7] = 0.0
    u = torch.rand(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    together = invert_cdf(weights, u, TritonReductions())
    assert torch.equal(together, invert_cdf(weights, u))
    alone = [invert_cdf(weights[row : row + 1], u[row : row + 1], TritonReductions()) for row in range(6)]
    assert torch.equal(torch.cat(alone), together)
