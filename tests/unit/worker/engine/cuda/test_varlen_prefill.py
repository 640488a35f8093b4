"""Prefill by torch's own attention: what is known without a device, which alone has it."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.engine.cuda.varlen_prefill import segments_of, takes_block_tables
from services.worker.engine.spans import Spans

CPU = torch.device("cpu")


def spans_of(rows: list[int], lengths: list[int]) -> Spans:
    counts = np.array(rows, np.int64)
    tables = np.arange(len(rows) * 4, dtype=np.int32).reshape(len(rows), 4)
    ends = np.array(lengths, np.int64)
    return Spans([], first_rows=np.cumsum(counts) - counts, rows=counts, lengths=ends, tables=tables)


def test_only_prefills_are_handed_over() -> None:
    segments = segments_of(spans_of([1, 20, 3, 9], [7, 50, 9, 9]), CPU)
    assert segments is not None
    assert segments.rows.tolist() == [*range(1, 21), *range(24, 33)]
    assert segments.starts.tolist() == [0, 20, 29]
    assert segments.lengths.tolist() == [50, 9]
    assert segments.tables.tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert (segments.most_rows, segments.longest) == (20, 50)


def test_a_step_of_decodes_has_none() -> None:
    assert segments_of(spans_of([1, 2], [7, 5]), CPU) is None


def test_where_it_cannot_run_it_is_not_used() -> None:
    assert not takes_block_tables(CPU, 16, torch.bfloat16)
