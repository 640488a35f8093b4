"""One small case of each operator against arithmetic in plain Python, on one thread.

A compiler or a processor that gets an operator wrong altogether is found; sizes, tails and threads are not
tried here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from services.worker.engine.execute.executor import RuledRows
from services.worker.engine.execute.kv_cache import KvShape
from services.worker.engine.execute.operators import HeadNorms, NotFinite
from services.worker.engine.execute.step_rows import Span
from services.worker.engine.native.attention import NativeAttention, NativeKvCache
from services.worker.engine.native.library import Library
from services.worker.engine.native.operators import NativeOperators

Row = list[float]
Rows = list[Row]

EPS: Final = 1e-5
# Largest differences for values of size one: float32 sums have few terms; a bfloat16 norm is rounded twice.
NEAR: Final = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
ROWS: Final = 5
WIDTH: Final = 24  # a vector of lanes and a half
INNER: Final = 20
DIM: Final = 6
HEADS: Final = 2  # heads of queries; keys and values have one
BLOCK_SIZE: Final = 2


def wrong(library: Library, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of the library's functions whose results are not near the expected ones."""
    operators = NativeOperators(library, kv_heads=1, eps=EPS, threads=1)
    cases = {
        "linear": _products_are_right(operators, dtype),
        "norm": _norm(operators, dtype),
        "rotate": _rotate(operators, dtype),
        "attend": _attend(library, dtype),
        "rule_out": _rule_out(operators),
    }
    return tuple(name for name, right in cases.items() if not right)


def _products_are_right(operators: NativeOperators, dtype: torch.dtype) -> bool:
    try:
        return _linear(operators, dtype) and _gated(operators, dtype)
    except NotFinite:  # of weights that are
        return False


def _linear(operators: NativeOperators, dtype: torch.dtype) -> bool:
    x, weight = _values(ROWS, WIDTH, dtype), _values(2 * INNER, WIDTH, dtype, seed=1)
    bias, residual = _values(1, 2 * INNER, dtype, seed=2)[0], _values(ROWS, 2 * INNER, dtype, seed=3)
    products = _products(x, weight, bias)
    added = [
        [a + b for a, b in zip(*rows, strict=True)] for rows in zip(products, _rows(residual), strict=True)
    ]
    projection = operators.projection([weight], bias)
    return _near(projection(x), products) and _near(projection.add_to(residual, x), added)


def _gated(operators: NativeOperators, dtype: torch.dtype) -> bool:
    x, weight = _values(ROWS, WIDTH, dtype), _values(2 * INNER, WIDTH, dtype, seed=1)
    bias = _values(1, 2 * INNER, dtype, seed=2)[0]
    expected = [
        [gate / (1.0 + math.exp(-gate)) * up for gate, up in zip(row[:INNER], row[INNER:], strict=True)]
        for row in _products(x, weight, bias)
    ]
    return _near(operators.gated([weight], bias)(x), expected)


def _norm(operators: NativeOperators, dtype: torch.dtype) -> bool:
    x, weight = _values(ROWS, WIDTH, dtype), _values(1, WIDTH, dtype, seed=1)[0]
    return _near(operators.norm(x, weight), [_normed(row, weight.tolist()) for row in _rows(x)])


def _rotate(operators: NativeOperators, dtype: torch.dtype) -> bool:
    qkv = _values(ROWS, (HEADS + 2) * DIM, dtype).view(ROWS, HEADS + 2, DIM)
    norms = HeadNorms(_values(1, DIM, dtype, seed=1)[0], _values(1, DIM, dtype, seed=2)[0])
    cos, sin = (_values(ROWS, DIM, dtype, seed=seed).view(ROWS, 1, DIM) for seed in (3, 4))
    expected = [
        [
            value
            for head, weight in zip(qkv[row].tolist(), [norms.query] * HEADS + [norms.key], strict=False)
            for value in _turned(_normed(head, weight.tolist()), cos[row, 0].tolist(), sin[row, 0].tolist())
        ]
        + qkv[row, -1].tolist()
        for row in range(ROWS)
    ]
    return _near(torch.cat(operators.heads(qkv, norms, cos, sin), dim=1).flatten(1), expected)


def _attend(library: Library, dtype: torch.dtype) -> bool:
    """The last two tokens of five, then, see the KV of all; a block table that is not in order."""
    pool = NativeKvCache(KvShape(1, 1, DIM, BLOCK_SIZE, dtype), 4)
    attention = NativeAttention(library, pool, windows=[None], threads=1)
    q = _values(ROWS, HEADS * DIM, dtype).view(ROWS, HEADS, DIM)
    k, v = (_values(ROWS, DIM, dtype, seed=seed).view(ROWS, 1, DIM) for seed in (1, 2))
    blocks, parts = [3, 0, 2], []
    for first, last in ((0, 3), (3, ROWS)):
        slots = [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(first, last)]
        attention.begin([Span(0, last - first, last, blocks, False)], torch.tensor(slots))
        parts.append(attention.attend(0, q[first:last], k[first:last], v[first:last]))
    keys, values = _rows(k.flatten(1)), _rows(v.flatten(1))
    expected = [
        [value for head in q[row].tolist() for value in _weighed(head, keys[: row + 1], values[: row + 1])]
        for row in range(ROWS)
    ]
    return _near(torch.cat(parts), expected)


def _rule_out(operators: NativeOperators) -> bool:
    """Of five rows two have masks, of all kinds of bytes."""
    logits = _values(ROWS, WIDTH + 3, torch.float32)
    masks = {1: [0b10110001, 0, 0xFF, 0b101], 4: [0xFF, 0xFF, 0b00011000, 0b010]}
    expected = _rows(logits)
    for row, mask in masks.items():
        allowed = [mask[token // 8] >> token % 8 & 1 for token in range(WIDTH + 3)]
        expected[row] = [x if bit else -math.inf for x, bit in zip(expected[row], allowed, strict=True)]
    operators.rule_out(logits, RuledRows(list(masks), np.array(list(masks.values()), np.uint8)))
    return _rows(logits) == expected


def _values(rows: int, columns: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Return [rows, columns] of eighths between -1 and 1, exact in either type."""
    numbers = torch.arange(rows * columns) * (5 + 2 * seed) + seed
    return ((numbers % 17 - 8) / 8).view(rows, columns).to(dtype)


def _rows(x: torch.Tensor) -> Rows:
    rows: Rows = x.tolist()
    return rows


def _near(got: torch.Tensor, expected: Rows) -> bool:
    near = NEAR[got.dtype]
    pairs = zip(_rows(got), expected, strict=True)
    return all(
        abs(a - b) <= near * (1.0 + abs(b)) for row, other in pairs for a, b in zip(row, other, strict=True)
    )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Rows:
    rows = _rows(weight)
    return [[_dot(row, w) + b for w, b in zip(rows, bias.tolist(), strict=True)] for row in _rows(x)]


def _normed(row: Row, weight: Row) -> Row:
    inverse = 1.0 / math.sqrt(_dot(row, row) / len(row) + EPS)
    return [value * inverse * w for value, w in zip(row, weight, strict=True)]


def _turned(head: Row, cos: Row, sin: Row) -> Row:
    half = len(head) // 2
    swapped = head[half:] + head[:half]  # the signs are in the table
    return [a * c + b * s for a, b, c, s in zip(head, swapped, cos, sin, strict=True)]


def _weighed(query: Row, keys: Rows, values: Rows) -> Row:
    weights = [math.exp(_dot(query, key) * len(query) ** -0.5) for key in keys]
    return [_dot(weights, column) / math.fsum(weights) for column in zip(*values, strict=True)]
