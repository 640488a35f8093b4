"""The attention of one layer by itself: which backend prefills faster on this device."""

from __future__ import annotations

import numpy as np
import torch

from bench.gpus.roofline import median_s
from fairway.formats.decoder_config import ModelConfig
from services.worker.engine.cuda.attention import TritonAttention
from services.worker.engine.cuda.plan import Cutting
from services.worker.engine.cuda.varlen_prefill import takes_block_tables
from services.worker.engine.execute.kv_cache import KvCache, KvShape
from services.worker.engine.execute.step_rows import Spans


def torch_over_triton(
    model: ModelConfig, device: torch.device, cutting: Cutting, *, spans: Spans, block_size: int
) -> float | None:
    """Return the time of prefills with torch's attention over that with ours, None where torch has none."""
    dtype = torch.bfloat16
    if not takes_block_tables(model, device, block_size, dtype):
        return None
    theirs, ours = (
        prefill_s(model, device, cutting, spans=spans, block_size=block_size, torch_prefills=each)
        for each in (True, False)
    )
    return theirs / ours


def prefill_s(
    model: ModelConfig,
    device: torch.device,
    cutting: Cutting,
    *,
    spans: Spans,
    block_size: int,
    torch_prefills: bool = False,
) -> float:
    """Return the time of one layer's attention, the write of keys and values included."""
    dtype, blocks = torch.bfloat16, int(spans.tables.max()) + 1
    shape = KvShape(1, model.kv_heads, model.head_dim, block_size, dtype)
    attention = TritonAttention(
        KvCache(shape, blocks, device),
        windows=[None],
        device=device,
        cutting=cutting,
        torch_prefills=torch_prefills,
    )
    rows = int(spans.rows.sum())
    q = torch.randn(rows, model.heads, model.head_dim, dtype=dtype, device=device)
    k, v = (torch.randn(rows, model.kv_heads, model.head_dim, dtype=dtype, device=device) for _ in range(2))
    attention.begin(spans, torch.from_numpy(slots_of(spans, block_size)))
    return median_s(device, lambda: attention.attend(0, q, k, v))


def whole_prompts(prompts: int, tokens: int, block_size: int) -> Spans:
    """Return the spans of prompts that are prefilled at once, their blocks in a drawn order."""
    width = -(-tokens // block_size)
    tables = np.random.default_rng(0).permutation(prompts * width).astype(np.int32).reshape(prompts, width)
    rows = np.full(prompts, tokens, np.int64)
    return Spans([], first_rows=np.arange(prompts) * tokens, rows=rows, lengths=rows, tables=tables)


def slots_of(spans: Spans, block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the slot of each row."""
    parts = [
        table[np.arange(length - rows, length) // block_size].astype(np.int64) * block_size
        + np.arange(length - rows, length) % block_size
        for rows, length, table in zip(spans.rows, spans.lengths, spans.tables, strict=True)
    ]
    return np.concatenate(parts)
