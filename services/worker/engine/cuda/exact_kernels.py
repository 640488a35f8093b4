"""Triton kernels of mode "exact": rows times a weight, and reductions of rows.

Every element of a product is one chain of additions that no other row changes: the sum over tiles along the
weight's depth, one after the other, in a float32 accumulator; all of it is one program's. Its tile is the
same whatever the number of rows, as is the compiled kernel: ``rows`` is a plain integer, for which Triton
compiles nothing special, and rows that a tile has too many are zeros. What is fixed by the weight alone
(depth, columns, whether tiles divide them) is constant.

A reduction is one program per row, whose sums go in an order that the row's width fixes: torch chooses among
several orders by the number of rows, or by where a row begins in memory. A row is read in parts of COLUMNS
numbers; each of their places has a running sum, and these are joined at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.engine.cuda.kernels import dot


@triton.jit(do_not_specialize=("rows",))
def product(
    x, weight, bias, out, rows,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of columns): out [rows, COLUMNS] gets x [rows, DEPTH] times the weight.

    ``weight`` is [COLUMNS, DEPTH]; where GATED it is followed by as many rows again, and out gets the SiLU of
    the first product times the second. ADD adds to what out holds. All of it is rounded once. GROUP tiles of
    rows go over the columns together, so that a weight is read from memory once for them.
    """
    tiles: tl.constexpr = (COLUMNS + COLUMN_TILE - 1) // COLUMN_TILE
    group = tl.program_id(0) // (GROUP * tiles)
    of_group = tl.program_id(0) % (GROUP * tiles)
    height = tl.minimum(tl.cdiv(rows, ROW_TILE) - group * GROUP, GROUP)
    row = (group * GROUP + of_group % height) * ROW_TILE + tl.arange(0, ROW_TILE)
    column = of_group // height * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    depth = tl.arange(0, DEPTH_TILE)
    of_x, of_weight = (row < rows)[:, None], (column < COLUMNS)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    weight_at = weight + column.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    sums = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    gated = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    for start in range(0, DEPTH, DEPTH_TILE):
        x_there, weight_there = of_x, of_weight
        if DEPTH % DEPTH_TILE != 0:
            inside = (depth < DEPTH - start)[None, :]
            x_there, weight_there = of_x & inside, of_weight & inside
        part = tl.load(x_at + start, mask=x_there, other=0.0)
        factor = tl.load(weight_at + start, mask=weight_there, other=0.0)
        sums += dot(part, tl.trans(factor), WIDEN)
        if GATED:
            factor = tl.load(weight_at + COLUMNS * DEPTH + start, mask=weight_there, other=0.0)
            gated += dot(part, tl.trans(factor), WIDEN)
    if BIAS:
        sums += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            gated += tl.load(bias + COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[
                None, :
            ]
        sums = sums / (1.0 + tl.exp(-sums)) * gated
    place = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    there = of_x & (column < COLUMNS)[None, :]
    if ADD:
        sums += tl.load(place, mask=there, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def norm_rows(x, weight, out, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row): out [rows, WIDTH] is the RMS norm of x times the weight, rounded once."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        part = tl.load(x + row * WIDTH + start + column, mask=start + column < WIDTH, other=0.0).to(
            tl.float32
        )
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    for start in range(0, WIDTH, COLUMNS):
        inside = start + column < WIDTH
        part = tl.load(x + row * WIDTH + start + column, mask=inside, other=0.0).to(tl.float32)
        part *= scale * tl.load(weight + start + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * WIDTH + start + column, part.to(out.dtype.element_ty), mask=inside)


@triton.jit
def log_softmax_rows(x, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row): out [rows, WIDTH] float32 is the logarithm of the softmax of x."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    most = tl.full([COLUMNS], float("-inf"), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        inside = start + column < WIDTH
        most = tl.maximum(most, tl.load(x + row * WIDTH + start + column, mask=inside, other=float("-inf")))
    greatest = tl.max(most, 0)
    weights = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        inside = start + column < WIDTH
        part = tl.load(x + row * WIDTH + start + column, mask=inside, other=float("-inf"))
        weights += tl.exp(part - greatest)
    total = tl.log(tl.sum(weights, 0))
    for start in range(0, WIDTH, COLUMNS):
        inside = start + column < WIDTH
        part = tl.load(x + row * WIDTH + start + column, mask=inside, other=0.0)
        tl.store(out + row * WIDTH + start + column, part - greatest - total, mask=inside)


@triton.jit
def sum_rows(x, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row): out [rows] float64 is the sum of x [rows, WIDTH]."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float64)
    for start in range(0, WIDTH, COLUMNS):
        inside = start + column < WIDTH
        sums += tl.load(x + row * WIDTH + start + column, mask=inside, other=0.0).to(tl.float64)
    tl.store(out + row, tl.sum(sums, 0))


@triton.jit
def running_sum_rows(x, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row): out [rows, WIDTH] are the running sums of x, both float64."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    before = tl.sum(tl.zeros([COLUMNS], tl.float64), 0)
    for start in range(0, WIDTH, COLUMNS):
        inside = start + column < WIDTH
        part = tl.load(x + row * WIDTH + start + column, mask=inside, other=0.0)
        tl.store(out + row * WIDTH + start + column, before + tl.cumsum(part, 0), mask=inside)
        before += tl.sum(part, 0)
