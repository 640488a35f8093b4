"""How steps are cut into programs: every key of every row once, whatever the lengths; no Triton is needed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.cuda.plan import ALONE_ROWS, Cutting, cut, padded, plan_step
from services.worker.engine.execute.step_rows import Spans

BLOCK_SIZE = 4
cuttings = st.builds(
    Cutting,
    tile=st.sampled_from([4, 16]),
    rows=st.sampled_from([16, 32]),
    pieces=st.integers(1, 40),
    exact=st.booleans(),
    exact_tokens=st.sampled_from([16, 64]),
)
lengths = st.lists(st.integers(0, 300), min_size=1, max_size=12).map(lambda each: np.array(each, np.int32))


def spans_of(shapes: list[tuple[int, int]]) -> Spans:
    """Return spans of (rows, length); sequence n has the blocks 1000 n, 1000 n + 1, and so on."""
    rows = np.array([rows for rows, _ in shapes], np.int64)
    tables = np.arange(200, dtype=np.int32) + 1000 * np.arange(len(shapes), dtype=np.int32)[:, None]
    ends = np.array([length for _, length in shapes], np.int64)
    return Spans([], first_rows=np.cumsum(rows) - rows, rows=rows, lengths=ends, tables=tables)


@given(lengths, cuttings, st.none() | st.integers(1, 100))
def test_pieces_hold_every_visible_key_of_a_row_once(
    length: np.ndarray, cutting: Cutting, window: int | None
) -> None:
    capacity = cutting.capacity(len(length))
    pieces = cut(length, cutting, window=window, capacity=capacity)
    assert cutting.exact or len(pieces.row) <= capacity
    assert pieces.first[0] == 0
    assert pieces.first[-1] == len(pieces.row) == len(pieces.start) == len(pieces.end)
    for row, keys in enumerate(length.tolist()):
        mine = range(pieces.first[row], pieces.first[row + 1])
        assert all(pieces.row[piece] == row for piece in mine)
        lowest = 0 if window is None else max(0, keys - window)
        parts = [(int(pieces.start[piece]), int(pieces.end[piece])) for piece in mine]
        assert bool(parts) == (keys > 0)
        if parts:
            assert parts[0][0] == lowest // cutting.tile * cutting.tile  # no tile without a visible key
            assert parts[-1][1] == keys
        assert all(start < end and start % cutting.tile == 0 for start, end in parts)
        if cutting.exact:
            assert all(end % cutting.exact_tokens == 0 for _, end in parts[:-1])
        assert all(before[1] == after[0] for before, after in pairwise(parts))


@given(lengths, st.integers(0, 11), st.none() | st.integers(1, 100))
def test_fixed_cuts_of_a_row_do_not_depend_on_its_batch(
    length: np.ndarray, chosen: int, window: int | None
) -> None:
    cutting = Cutting(16, 16, pieces=5, exact=True, exact_tokens=64)
    row = chosen % len(length)
    together = cut(length, cutting, window=window, capacity=0)
    alone = cut(length[row : row + 1], cutting, window=window, capacity=0)
    mine = slice(together.first[row], together.first[row + 1])
    assert together.start[mine].tolist() == alone.start.tolist()
    assert together.end[mine].tolist() == alone.end.tolist()


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=6),
    cuttings,
)
def test_every_row_is_a_decode_or_in_one_tile(cut_at: list[tuple[int, int]], cutting: Cutting) -> None:
    shapes = [(rows, rows + before) for rows, before in cut_at]
    plan = plan_step(spans_of(shapes), cutting, block_size=BLOCK_SIZE)
    found: dict[int, tuple[int, int]] = {}  # row -> its position and the first entry of its block table
    for query_row, length, first in zip(
        plan.decodes.query_row, plan.decodes.length, plan.decodes.first_block, strict=True
    ):
        found[int(query_row)] = (int(length) - 1, int(first))
    for row, rows, position, first in zip(
        plan.tiles.row, plan.tiles.rows, plan.tiles.position, plan.tiles.first_block, strict=True
    ):
        assert 1 <= rows <= cutting.rows
        found |= {int(row) + n: (int(position) + n, int(first)) for n in range(rows)}
    expected = [
        (sequence, position)
        for sequence, (rows, length) in enumerate(shapes)
        for position in range(length - rows, length)
    ]
    assert sorted(found) == list(range(len(expected)))
    for row, (sequence, position) in enumerate(expected):
        assert found[row][0] == position
        assert plan.blocks[found[row][1] + position // BLOCK_SIZE] == 1000 * sequence + position // BLOCK_SIZE
    assert len(plan.blocks) == sum(-(-length // BLOCK_SIZE) for _, length in shapes)
    if cutting.exact:
        assert not len(plan.tiles.row)


def test_a_short_span_attends_row_by_row() -> None:
    """A decode with proposals has a few rows: they fill no tile, and a graph has none."""
    cutting = Cutting(16, 16, pieces=5)
    plan = plan_step(spans_of([(ALONE_ROWS, 50), (1, 9)]), cutting, block_size=BLOCK_SIZE)
    assert plan.decodes.length.tolist() == [*range(51 - ALONE_ROWS, 51), 9]
    assert not len(plan.tiles.row)
    assert len(plan_step(spans_of([(ALONE_ROWS + 1, 50)]), cutting, block_size=BLOCK_SIZE).tiles.row) == 1


def test_one_long_row_is_cut_for_the_whole_device() -> None:
    cutting = Cutting(tile=64, rows=128, pieces=33)
    pieces = cut(np.array([4096], np.int32), cutting, window=None, capacity=cutting.capacity(1))
    assert 30 <= len(pieces.row) <= cutting.capacity(1)


def test_rows_of_padding_have_no_pieces() -> None:
    cutting = Cutting(16, 16, pieces=5)
    length = padded(np.array([40, 7], np.int32), 8)
    pieces = cut(length, cutting, window=None, capacity=cutting.capacity(8))
    assert set(pieces.row.tolist()) == {0, 1}
    assert pieces.first.tolist()[2:] == [len(pieces.row)] * 7


def test_a_piece_is_made_of_whole_tiles() -> None:
    with pytest.raises(ValueError, match="tiles of 48"):
        Cutting(tile=48, rows=16, pieces=1)
