"""Attention against float64, and every row against itself computed token by token, alone.

Scores and sums are float32: errors stay within 1e-5 of values of size one. bfloat16 results are rounded once
more, to 2^-8.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.execute.kv_cache import KvShape
from services.worker.engine.execute.step_rows import Span
from services.worker.engine.native.attention import NativeAttention, NativeKvCache, tiles_of
from services.worker.engine.native.library import Library

Load = Callable[[torch.dtype], Library]
POOL = 64


@dataclass(frozen=True)
class Shape:
    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32


@dataclass
class Tokens:
    """What the layer computed for each token of a sequence, and where the sequence lies."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    blocks: list[int]

    def __len__(self) -> int:
        return len(self.q)


def sequence(shape: Shape, length: int, seed: int, blocks: list[int] | None = None) -> Tokens:
    made = torch.Generator().manual_seed(seed)
    qkv = torch.randn(length, shape.heads + 2 * shape.kv_heads, shape.dim, generator=made).to(shape.dtype)
    q, k, v = qkv.tensor_split([shape.heads, shape.heads + shape.kv_heads], dim=1)
    needed = -(-length // shape.block_size)
    return Tokens(q, k, v, blocks if blocks is not None else list(range(needed)))


class Layer:
    """One layer's attention over a pool in which every slot was used before, by something that failed."""

    def __init__(self, load: Load, shape: Shape, *, threads: int = 1, blocks: int = POOL) -> None:
        self._shape = shape
        pool = NativeKvCache(KvShape(1, shape.kv_heads, shape.dim, shape.block_size, shape.dtype), blocks)
        pool.keys.fill_(float("nan"))
        pool.values.fill_(float("nan"))
        self._attention = NativeAttention(load(shape.dtype), pool, windows=[shape.window], threads=threads)

    def step(self, parts: list[tuple[Tokens, int, int]]) -> list[torch.Tensor]:
        """Compute tokens start to end of each sequence; return the rows of each, [rows, heads * dim]."""
        size = self._shape.block_size
        spans, slots, first = [], [], 0
        for tokens, start, end in parts:
            spans.append(Span(first, end - start, end, tokens.blocks, False))
            slots += [tokens.blocks[p // size] * size + p % size for p in range(start, end)]
            first += end - start
        rows = [torch.cat([getattr(t, name)[a:b] for t, a, b in parts]) for name in "qkv"]
        self._attention.begin(spans, torch.tensor(slots))
        out = self._attention.attend(0, rows[0], rows[1], rows[2])
        ends = np.cumsum([end - start for _, start, end in parts]).tolist()
        return list(out.tensor_split(ends[:-1]))


def reference(shape: Shape, tokens: Tokens) -> torch.Tensor:
    """Return the output of every row in float64, [rows, heads * dim]."""
    group = shape.heads // shape.kv_heads
    q = tokens.q.double()
    k, v = (each.double().repeat_interleave(group, dim=1) for each in (tokens.k, tokens.v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.dim**-0.5
    row, key = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))
    hidden = key > row
    if shape.window is not None:
        hidden |= key <= row - shape.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


SHAPES = [
    Shape(),
    Shape(dim=2, heads=1, kv_heads=1, block_size=4),
    Shape(dim=6, heads=5, kv_heads=1, block_size=4),
    Shape(dim=40, heads=6, kv_heads=2),
    Shape(dim=80, heads=3, kv_heads=3, block_size=32),
    Shape(dim=96, heads=8, kv_heads=1, block_size=8),
    Shape(dim=128, heads=14, kv_heads=2),
    Shape(dim=64, window=1),
    Shape(dim=20, window=9, block_size=5),
    Shape(dim=64, window=64),
    Shape(dim=64, window=100, block_size=64),
    Shape(dim=256, heads=2, kv_heads=1),
    Shape(dim=64, dtype=torch.bfloat16),
    Shape(dim=40, dtype=torch.bfloat16, window=70, block_size=8),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_and_decode_are_right(library: Load, shape: Shape) -> None:
    tokens = sequence(shape, 150, seed=shape.dim)
    expected = reference(shape, tokens)
    within = 1e-5 if shape.dtype is torch.float32 else 2.0**-7
    for cuts in ([0, 150], [0, 97, 149, 150], [0, 1, 65, 150]):
        layer = Layer(library, shape, threads=2)
        parts = [layer.step([(tokens, a, b)])[0] for a, b in pairwise(cuts)]
        assert float((torch.cat(parts).double() - expected).abs().max()) < within


def test_large_scores_do_not_overflow(library: Load) -> None:
    shape = Shape(dim=16)
    tokens = sequence(shape, 130, seed=5)
    tokens.q *= 300.0
    (got,) = Layer(library, shape).step([(tokens, 0, 130)])
    assert float((got.double() - reference(shape, tokens)).abs().max()) < 1e-3


shapes = st.builds(
    Shape,
    dim=st.sampled_from([4, 10, 16, 40, 64, 80]),
    heads=st.sampled_from([2, 4, 6]),
    kv_heads=st.sampled_from([1, 2]),
    block_size=st.sampled_from([4, 6, 16, 32]),
    window=st.sampled_from([None, None, 3, 50, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)


def schedule(rng: random.Random, length: int) -> list[int]:
    """Return the sizes of the chunks in which a sequence is computed: decodes, verifications, prefills."""
    sizes = []
    while length:
        sizes.append(min(length, rng.choice([1, 1, rng.randint(2, 8), rng.randint(1, 90)])))
        length -= sizes[-1]
    return sizes


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    shape=shapes, seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4)
)
def test_a_row_is_the_same_in_any_schedule(
    library: Load, shape: Shape, seed: int, lengths: list[int]
) -> None:
    """Chunks cut anywhere, neighbours, blocks anywhere, any threads: every bit as token by token."""
    rng = random.Random(seed)
    needed = [-(-length // shape.block_size) for length in lengths]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    placed = [
        sequence(shape, length, seed + i, [free.pop() for _ in range(needed[i])])
        for i, length in enumerate(lengths)
    ]
    canonical = []
    for i, length in enumerate(lengths):
        alone, layer = sequence(shape, length, seed + i), Layer(library, shape, blocks=needed[i])
        canonical.append(torch.cat([layer.step([(alone, p, p + 1)])[0] for p in range(length)]))
    layer = Layer(library, shape, threads=rng.choice([2, 3, 7]), blocks=sum(needed) + 3)
    done, cuts = [0] * len(placed), [schedule(rng, length) for length in lengths]
    while any(cuts):
        live = [i for i in range(len(placed)) if cuts[i]]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        parts = [(placed[i], done[i], done[i] + cuts[i].pop(0)) for i in chosen]
        for i, (_, start, end), rows in zip(chosen, parts, layer.step(parts), strict=True):
            assert torch.equal(rows, canonical[i][start:end]), (i, start, end)
            done[i] = end


def test_what_a_later_row_holds_does_not_reach_an_earlier_one(library: Load) -> None:
    shape = Shape(dim=40)
    tokens, broken = sequence(shape, 70, seed=1), sequence(shape, 70, seed=1)
    broken.k[60:] = float("nan")
    broken.v[60:] = float("inf")
    (whole,), (part,) = (Layer(library, shape).step([(each, 0, 70)]) for each in (tokens, broken))
    assert torch.equal(whole[:60], part[:60])
    assert not bool(part[60:].isfinite().any())


@given(st.lists(st.integers(1, 40), max_size=6), st.integers(1, 16))
def test_tiles_cover_every_row_once(counts: list[int], most: int) -> None:
    rows = np.array(counts, np.int64)
    first = np.cumsum(rows) - rows
    seen: list[int] = []
    for span, start, size in tiles_of(first, rows, most).tolist():
        assert 0 < size <= most
        assert first[span] <= start
        assert start + size <= first[span] + rows[span]
        seen += range(start, start + size)
    assert sorted(seen) == list(range(sum(counts)))


def test_blocks_are_copied_in_all_layers() -> None:
    pool = NativeKvCache(KvShape(2, 1, 2, 4, torch.float32), 3)
    pool.keys[:, 0], pool.values[:, 0] = 1.0, 2.0
    pool.copy([(0, 2), (1, 0)])
    assert bool((pool.keys[:, 2] == 1.0).all())
    assert bool((pool.values[:, 2] == 2.0).all())
    assert not bool(pool.keys[:, :2].any())
