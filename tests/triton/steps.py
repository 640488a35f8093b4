"""Drawn steps of attention, and what they should compute, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from services.worker.engine.cuda.attention import TritonAttention
from services.worker.engine.cuda.plan import Cutting, Padding
from services.worker.engine.execute.kv_cache import KvCache, KvShape
from services.worker.engine.execute.step_rows import Spans

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, and how the pool is cut into blocks."""

    kv_heads: int = 2
    group: int = 2
    dim: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    window: int | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True, slots=True)
class Step:
    """``spans`` are (rows, length) of the sequences. Their blocks lie anywhere in a pool of ``blocks``."""

    shape: Shape
    spans: tuple[tuple[int, int], ...]
    seed: int
    tables: list[list[int]] = field(default_factory=list)
    blocks: int = 0

    def __post_init__(self) -> None:
        needed = [-(-length // self.shape.block_size) for _, length in self.spans]
        object.__setattr__(self, "blocks", sum(needed) + 3)
        order: list[int] = np.random.default_rng(self.seed).permutation(self.blocks).tolist()
        for count in needed:
            self.tables.append(order[:count])
            del order[:count]

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.spans)

    @property
    def columns(self) -> Spans:
        """Return the spans as the executor gives them; entries beyond a table are any block."""
        rows = np.array([rows for rows, _ in self.spans], np.int64)
        width = max(map(len, self.tables)) + 2
        tables = np.full((len(rows), width), self.blocks - 1, np.int32)
        for row, table in zip(tables, self.tables, strict=True):
            row[: len(table)] = table
        lengths = np.array([length for _, length in self.spans], np.int64)
        return Spans([], first_rows=np.cumsum(rows) - rows, rows=rows, lengths=lengths, tables=tables)

    @property
    def positions(self) -> list[tuple[int, int]]:
        """Return the sequence and position of each row."""
        return [
            (index, position)
            for index, (rows, length) in enumerate(self.spans)
            for position in range(length - rows, length)
        ]

    def slot(self, sequence: int, position: int) -> int:
        size = self.shape.block_size
        return self.tables[sequence][position // size] * size + position % size

    def slots(self) -> torch.Tensor:
        return torch.tensor([self.slot(*place) for place in self.positions])


@dataclass(frozen=True, slots=True)
class Tensors:
    """Keys and values by sequence [length, kv_heads, dim], and the queries of the step's rows."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def tensors_of(step: Step) -> Tensors:
    shape = step.shape
    generator = torch.Generator().manual_seed(step.seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(shape.dtype)

    keys = [draw(length, shape.kv_heads, shape.dim) for _, length in step.spans]
    values = [draw(length, shape.kv_heads, shape.dim) for _, length in step.spans]
    return Tensors(draw(step.rows, shape.heads, shape.dim), keys, values)


def expected(step: Step, tensors: Tensors) -> torch.Tensor:
    """Return the attention of every row, float64 [rows, heads * dim]."""
    shape = step.shape
    out = []
    for q, (sequence, position) in zip(tensors.q.double(), step.positions, strict=True):
        start = 0 if shape.window is None else max(0, position - shape.window + 1)
        for head in range(shape.heads):
            keys = tensors.keys[sequence][start : position + 1, head // shape.group].double()
            values = tensors.values[sequence][start : position + 1, head // shape.group].double()
            out.append((keys @ q[head] / math.sqrt(shape.dim)).softmax(0) @ values)
    return torch.stack(out).view(step.rows, -1)


def attention_of(step: Step, cutting: Cutting, padding: Padding | None = None) -> TritonAttention:
    """Return a backend whose pool holds the keys and values before the step's rows, and noise elsewhere."""
    return filled(step, tensors_of(step), cutting, padding)


def filled(step: Step, tensors: Tensors, cutting: Cutting, padding: Padding | None = None) -> TritonAttention:
    shape = step.shape
    cache = KvCache(
        KvShape(1, shape.kv_heads, shape.dim, shape.block_size, shape.dtype), step.blocks + 1, CPU
    )
    keys, values = cache.pool(0)
    keys.fill_(50.0)  # what nobody may read would be seen
    values.fill_(1000.0)
    for sequence, (rows, length) in enumerate(step.spans):
        for position in range(length - rows):
            slot = step.slot(sequence, position)
            keys[slot] = tensors.keys[sequence][position]
            values[slot] = tensors.values[sequence][position]
    return TritonAttention(cache, windows=[shape.window], device=CPU, cutting=cutting, padding=padding)


def new_rows(step: Step, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values [rows, kv_heads, dim] that the step writes."""
    keys = [tensors.keys[sequence][position] for sequence, position in step.positions]
    values = [tensors.values[sequence][position] for sequence, position in step.positions]
    return torch.stack(keys), torch.stack(values)


def run(attention: TritonAttention, step: Step, tensors: Tensors) -> torch.Tensor:
    """Return what the backend computes for the step."""
    attention.begin(step.columns, step.slots())
    return attention.attend(0, tensors.q, *new_rows(step, tensors))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    return Shape(
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3])),
        dim=draw(st.sampled_from([4, 6, 16, 20])),
        block_size=draw(st.sampled_from([1, 3, 4, 16])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        window=draw(st.none() | st.integers(1, 40)),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Decodes, proposals, whole prompts and later chunks, in any mix."""
    spans = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 50))
        rows = draw(st.one_of(st.just(1), st.integers(1, min(length, 30)), st.just(min(length, 20))))
        spans.append((rows, length))
    return Step(draw(shapes()), tuple(spans), draw(st.integers(0, 1 << 16)))
