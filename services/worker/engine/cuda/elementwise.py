"""Triton kernels of the steps between a layer's products, and of the write of keys and values.

Sums are in float32, rounded once. A *slot* is a row of the KV pool.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kv(
    k,
    v,
    slots,
    keys,
    values,
    k_stride,
    v_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Program (row): copy the row's key and value, WIDTH numbers each, into its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    key = tl.load(k + row * k_stride + column, mask=inside)
    value = tl.load(v + row * v_stride + column, mask=inside)
    tl.store(keys + slot * slot_stride + column, key, mask=inside)
    tl.store(values + slot * slot_stride + column, value, mask=inside)


@triton.jit
def turn_heads(
    qkv,
    query_norm,
    key_norm,
    cos,
    sin,
    eps,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    ALL: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Program (row, head): normalise and rotate a query or key head of qkv [rows, ALL, 2 * HALF] in place.

    The first HEADS are queries, those up to TURNED keys; cos and sin are [rows, 2 * HALF], as in ``rope``.
    """
    row, head = (tl.program_id(0) // TURNED).to(tl.int64), tl.program_id(0) % TURNED
    column = tl.arange(0, HALF_PAD)
    inside = column < HALF
    low = qkv + (row * ALL + head) * (2 * HALF) + column
    x = tl.load(low, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(low + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        weight = query_norm + column
        if head >= HEADS:
            weight = key_norm + column
        scale = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * HALF) + eps)
        x *= scale * tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        y *= scale * tl.load(weight + HALF, mask=inside, other=0.0).to(tl.float32)
    turn = row * (2 * HALF) + column
    a = x * tl.load(cos + turn, mask=inside, other=0.0) + y * tl.load(sin + turn, mask=inside, other=0.0)
    turn += HALF
    b = y * tl.load(cos + turn, mask=inside, other=0.0) + x * tl.load(sin + turn, mask=inside, other=0.0)
    tl.store(low, a.to(qkv.dtype.element_ty), mask=inside)
    tl.store(low + HALF, b.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def gate(both, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Program (row, part): out [rows, WIDTH] is silu of both's first half times its second half."""
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    column = (tl.program_id(0) % PROGRAMS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    x = tl.load(both + row * (2 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(both + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    result = x / (1.0 + tl.exp(-x)) * y
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)
