"""Prefill by torch's own attention: what is known without a device, which alone has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fairway.formats.decoder_config import ModelConfig, parse_config
from services.worker.engine.cuda.varlen_prefill import plain, segments_of, takes_block_tables
from services.worker.engine.execute.step_rows import Spans

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


# --- the probe, of versions that take block tables -----------------------------------------------------


def model_of(window: int | None) -> ModelConfig:
    return parse_config(
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 256,
            "sliding_window": window,
        }
    )


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    no_starts: None,
    most_rows: int,
    longest: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """What torch documents, by the formula."""
    assert enable_gqa
    assert no_starts is None
    assert q.shape[1:] == (6, 8), "the model's own heads"
    assert most_rows == int(starts.diff().max())
    assert longest == int(seqused_k.max())
    back, ahead = window_size
    assert ahead == 0
    spans = Spans(
        [],
        first_rows=starts[:-1].numpy().astype(np.int64),
        rows=starts.diff().numpy().astype(np.int64),
        lengths=seqused_k.numpy().astype(np.int64),
        tables=block_table.numpy(),
    )
    return plain(q, keys, values, spans, None if back < 0 else back + 1).to(q.dtype)


def without_windows(*args: Any, window_size: tuple[int, int], block_table: Any, **others: Any) -> Any:
    return attention(*args, window_size=(-1, 0), block_table=block_table, **others)


def with_blocks_in_order(*args: Any, block_table: torch.Tensor, **others: Any) -> Any:
    return attention(*args, block_table=block_table.sort(dim=1).values, **others)


def refusing(*args: Any, block_table: torch.Tensor, **others: Any) -> Any:
    raise RuntimeError("head_dim 8 is not supported")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("window", [None, 3, 200])
@pytest.mark.parametrize(
    ("version", "used"),
    [
        (attention, lambda window: True),
        (without_windows, lambda window: window is None),
        (with_blocks_in_order, lambda window: False),
        (refusing, lambda window: False),
    ],
)
def test_it_is_used_where_it_computes_the_right_thing(
    monkeypatch: pytest.MonkeyPatch,
    version: Callable[..., Any],
    used: Callable[[int | None], bool],
    window: int | None,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", version)
    torch.manual_seed(1)
    assert takes_block_tables(model_of(window), CPU, block_size, dtype) == used(window)


def test_where_it_cannot_run_it_is_not_used() -> None:
    assert not takes_block_tables(model_of(None), CPU, 16, torch.bfloat16)
