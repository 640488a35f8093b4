"""Prefill by torch's own attention over a block table, where its version and the device have that.

torch 2.13 takes block tables, 2.11 does not; which shapes and devices it takes them for is not written down.
So it is tried: with the model's heads and windows on a small pool, against the plain formula. What fails or
differs is not used.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from fairway.formats.decoder_config import ModelConfig
from services.worker.engine.cuda.plan import ALONE_ROWS
from services.worker.engine.execute.step_rows import Spans

PROBE_TOLERANCE: Final = 3e-2  # largest difference that bfloat16 explains
PROBE: Final = ((11, 30), (20, 20))  # rows and length of its sequences
PROBE_WINDOW: Final = 7


@dataclass(frozen=True, slots=True)
class Segments:
    """The spans of a step that are prefills, on the device. ``rows`` are those of the step."""

    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    most_rows: int
    longest: int


def segments_of(spans: Spans, device: torch.device) -> Segments | None:
    """Return the spans that ``cuda/plan`` makes tiles of, or None where there are none."""
    chosen = np.flatnonzero(spans.rows > ALONE_ROWS)
    if not len(chosen):
        return None
    rows, lengths = spans.rows[chosen], spans.lengths[chosen]
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows))).astype(np.int32)
    owner = np.repeat(np.arange(len(rows)), rows)
    of_step = np.arange(starts[-1]) - starts[owner] + spans.first_rows[chosen][owner]
    columns = (of_step, starts, lengths.astype(np.int32), np.ascontiguousarray(spans.tables[chosen]))
    places, firsts, ends, tables = (torch.from_numpy(each).to(device, non_blocking=True) for each in columns)
    return Segments(places, firsts, ends, tables, int(rows.max()), int(lengths.max()))


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segments: Segments, window: int | None
) -> torch.Tensor:
    """Return [rows, heads, dim] for q [rows, heads, dim] and pools [blocks, block_size, kv_heads, dim]."""
    from torch.nn.attention import varlen

    run: Any = varlen.varlen_attn  # block tables are not in every version that is supported
    result: torch.Tensor = run(
        q,
        keys,
        values,
        segments.starts,
        None,
        segments.most_rows,
        segments.longest,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=segments.lengths,
        block_table=segments.tables,
    )
    return result


def takes_block_tables(model: ModelConfig, device: torch.device, block_size: int, dtype: torch.dtype) -> bool:
    """Whether this version computes the right thing for such a model on this device, by trying."""
    try:
        from torch.nn.attention import varlen

        if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
            return False
        return all(_probe(model, window, device, block_size, dtype) for window in set(model.windows))
    except (ImportError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return False


def _probe(
    model: ModelConfig, window: int | None, device: torch.device, block_size: int, dtype: torch.dtype
) -> bool:
    blocks = [-(-length // block_size) for _, length in PROBE]
    width, rows = max(blocks), np.array([rows for rows, _ in PROBE], np.int64)
    tables = np.zeros((len(PROBE), width), np.int32)
    for index, count in enumerate(blocks):  # backwards, so that the order of a table matters
        tables[index, :count] = sum(blocks[:index]) + np.arange(count)[::-1]
    spans = Spans(
        [],
        first_rows=np.cumsum(rows) - rows,
        rows=rows,
        lengths=np.array([length for _, length in PROBE], np.int64),
        tables=tables,
    )
    segments = segments_of(spans, device)
    assert segments is not None
    q = torch.randn(int(rows.sum()), model.heads, model.head_dim, device=device, dtype=dtype)
    pool = (sum(blocks), block_size, model.kv_heads, model.head_dim)
    keys, values = (torch.randn(pool, device=device, dtype=dtype) for _ in range(2))
    # A window that the probe's few keys all fit into would show nothing.
    seen = None if window is None else min(window, PROBE_WINDOW)
    got, expected = attend(q, keys, values, segments, seen), plain(q, keys, values, spans, seen)
    return torch.allclose(got.float(), expected, atol=PROBE_TOLERANCE, rtol=PROBE_TOLERANCE)


def plain(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: Spans, window: int | None
) -> torch.Tensor:
    """Return what ``attend`` should, by the formula: float32, and a sequence at a time."""
    out = []
    group = q.shape[1] // keys.shape[2]
    for first, rows, length, table in zip(
        spans.first_rows.tolist(), spans.rows.tolist(), spans.lengths.tolist(), spans.tables, strict=True
    ):
        blocks = torch.from_numpy(table.astype(np.int64)).to(q.device)
        k, v = (
            pool[blocks].flatten(0, 1)[:length].repeat_interleave(group, dim=1).float()
            for pool in (keys, values)
        )
        at = torch.arange(length - rows, length, device=q.device)[:, None]
        of = torch.arange(length, device=q.device)
        seen = of <= at if window is None else (of <= at) & (of > at - window)
        scores = torch.einsum("qhd,khd->hqk", q[first : first + rows].float(), k) / q.shape[2] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)
