"""Triton kernels: attention over a block table.

Online softmax over tiles of keys (FlashAttention, NeurIPS'22); a decode row is cut along its keys and the
pieces are put together by a second kernel (Flash-Decoding, 2023); keys are found through a block table
(PagedAttention, SOSP'23). Products take the inputs' type and add up in float32; float32 inputs are
multiplied in full precision, not in tf32.

A *slot* is a row of the pool: block * BLOCK_SIZE + offset. The block tables of all sequences lie behind one
another in ``blocks``; a sequence's begins at its ``first_block``. Head dimensions and group sizes that are no
power of two are padded by masks. ``scale`` includes log2(e): exponentials are to the base 2.

WIDEN makes float32 of a product's inputs first. Triton's interpreter needs it, which multiplies the bits of
bfloat16 as integers; the products are the same, since those of two bfloat16 numbers are exact in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slots(blocks, positions, inside, BLOCK_SIZE: tl.constexpr):
    """Return the slots [TILE] int64 of positions; ``blocks`` points at the sequence's block table."""
    block = tl.load(blocks + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    return block * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def dot(a, b, WIDEN: tl.constexpr):
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _fold(q, k, v, scale, visible, most, total, sums, MASKED: tl.constexpr, WIDEN: tl.constexpr):
    """Return the running maximum, sum of weights and weighted values with one more tile of keys.

    A row that has seen no key yet keeps a maximum of -inf; 0 stands for it in the differences.
    """
    scores = dot(q, tl.trans(k), WIDEN) * scale
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    greatest = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(greatest == float("-inf"), 0.0, greatest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    sums = sums * shrink[:, None] + dot(weights.to(v.dtype), v, WIDEN)
    return greatest, total * shrink + tl.sum(weights, 1), sums


@triton.jit
def decode_pieces(
    q, keys, values, blocks, query_row, first_block, length, piece_row, piece_start, piece_end,
    partial, partial_lse, scale, q_stride, slot_stride,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (piece, KV head): attend one token's group of query heads to the keys of one piece.

    ``partial`` [pieces, heads, DIM] float32 gets the normalised result, ``partial_lse`` [pieces, heads] the
    base-2 logarithm of its sum of weights. A piece that ends where it starts is padding and writes nothing.
    """
    piece, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    start, end = tl.load(piece_start + piece), tl.load(piece_end + piece)
    if start >= end:
        return
    row = tl.load(piece_row + piece)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.load(length + row) - WINDOW
    table = blocks + tl.load(first_block + row)
    member, column = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    of_group, of_head = member < GROUP, column < DIM
    heads = kv_head * GROUP + member
    place = tl.load(query_row + row).to(tl.int64) * q_stride + heads[:, None] * DIM + column[None, :]
    queries = tl.load(q + place, mask=of_group[:, None] & of_head[None, :], other=0.0)
    most = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for tile in range(start, end, TILE):
        positions = tile + tl.arange(0, TILE)
        inside = (positions < end) & (positions >= lowest)
        slots = _slots(table, positions, inside, BLOCK_SIZE)
        places = slots[:, None] * slot_stride + kv_head * DIM + column[None, :]
        there = inside[:, None] & of_head[None, :]
        k = tl.load(keys + places, mask=there, other=0.0)
        v = tl.load(values + places, mask=there, other=0.0)
        most, total, sums = _fold(queries, k, v, scale, inside[None, :], most, total, sums, True, WIDEN)
    head = piece.to(tl.int64) * (KV_HEADS * GROUP) + heads
    tl.store(partial_lse + head, most + tl.log2(total), mask=of_group)
    result = sums / total[:, None]
    tl.store(
        partial + head[:, None] * DIM + column[None, :], result, mask=of_group[:, None] & of_head[None, :]
    )


@triton.jit
def join_pieces(
    partial,
    partial_lse,
    query_row,
    first_piece,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Program (row, head): write the row's result in ``out`` [rows, heads, DIM] from its pieces.

    A row without pieces is padding and gets zeros.
    """
    row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    first, last = tl.load(first_piece + row), tl.load(first_piece + row + 1)
    member, column = tl.arange(0, PIECES), tl.arange(0, DIM_PAD)
    of_head = column < DIM
    most = float("-inf")
    for piece in range(first, last, PIECES):
        there = piece + member < last
        lse = tl.load(partial_lse + (piece + member) * HEADS + head, mask=there, other=float("-inf"))
        most = tl.maximum(most, tl.max(lse, 0))
    total = 0.0
    sums = tl.zeros([DIM_PAD], tl.float32)
    for piece in range(first, last, PIECES):
        there = piece + member < last
        place = (piece + member).to(tl.int64) * HEADS + head
        lse = tl.load(partial_lse + place, mask=there, other=float("-inf"))
        weight = tl.exp2(lse - most)
        values = tl.load(
            partial + place[:, None] * DIM + column[None, :],
            mask=there[:, None] & of_head[None, :],
            other=0.0,
        )
        total += tl.sum(weight, 0)
        sums += tl.sum(weight[:, None] * values, 0)
    if last > first:
        sums = sums / total
    place = (tl.load(query_row + row).to(tl.int64) * HEADS + head) * DIM + column
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=of_head)


@triton.jit
def _walk(
    state,
    tensors,
    bounds,
    scale,
    queries_at,
    slot_stride,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Fold the keys in ``bounds`` into ``state``; without MASKED every query sees all of them."""
    most, total, sums = state
    q, keys, values, table = tensors
    start, end = bounds
    column = tl.arange(0, DIM_PAD)
    for tile in range(start, end, TILE):
        positions = tile + tl.arange(0, TILE)
        inside = positions < end
        places = _slots(table, positions, inside, BLOCK_SIZE)[:, None] * slot_stride + column[None, :]
        there = inside[:, None] & (column < DIM)[None, :]
        k = tl.load(keys + places, mask=there, other=0.0)
        v = tl.load(values + places, mask=there, other=0.0)
        visible = (positions[None, :] <= queries_at[:, None]) & inside[None, :]
        if WINDOW > 0:
            visible &= positions[None, :] > queries_at[:, None] - WINDOW
        most, total, sums = _fold(q, k, v, scale, visible, most, total, sums, MASKED, WIDEN)
    return most, total, sums


@triton.jit
def prefill(
    q, keys, values, blocks, tile_row, tile_rows, tile_position, tile_first_block, out,
    scale, q_stride, slot_stride,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (tile, head): attend up to ROWS consecutive tokens of one sequence to all before them.

    The tile's first token is row ``tile_row`` of q, at ``tile_position`` of its sequence.
    """
    tile, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    rows, position = tl.load(tile_rows + tile), tl.load(tile_position + tile)
    member, column = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    there = (member < rows)[:, None] & (column < DIM)[None, :]
    row = tl.load(tile_row + tile).to(tl.int64) + member
    queries = tl.load(q + row[:, None] * q_stride + head * DIM + column[None, :], mask=there, other=0.0)
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, DIM_PAD], tl.float32),
    )
    shift = (head // GROUP) * DIM
    tensors = (queries, keys + shift, values + shift, blocks + tl.load(tile_first_block + tile))
    queries_at = position + member
    if WINDOW > 0:
        plain = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE
    else:
        plain = (position + 1) // TILE * TILE  # keys that every query of the tile sees
        state = _walk(
            state, tensors, (0, plain), scale, queries_at, slot_stride,
            WINDOW, BLOCK_SIZE, DIM, DIM_PAD, TILE, False, WIDEN,
        )  # fmt: skip
    _, total, sums = _walk(
        state, tensors, (plain, position + rows), scale, queries_at, slot_stride,
        WINDOW, BLOCK_SIZE, DIM, DIM_PAD, TILE, True, WIDEN,
    )  # fmt: skip
    result = sums / tl.where(total > 0, total, 1.0)[:, None]  # rows of padding may have seen no key
    place = row[:, None] * HEADS * DIM + head * DIM + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=there)
