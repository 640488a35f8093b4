"""Triton kernels that reduce rows: one program per row, whose sums go in an order that its width fixes.

torch's own choose among several orders by the number of rows, or by where a row begins in memory. Here a row
is read in parts of COLUMNS numbers; each of their places has a running sum, and these are joined at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
