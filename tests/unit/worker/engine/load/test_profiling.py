"""The profiling step stays within the limits and reaches them; the pool is what is left."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.execute.executor import Batch
from services.worker.engine.execute.step_rows import Seats
from services.worker.engine.load.loading import MIB, PROFILED_BLOCKS, largest_batches, sized
from services.worker.engine.unsupported import TooLittleMemory
from services.worker.engine_protocol import EngineConfig, Ready

VOCABULARY = 300


def ready(blocks: int, *, block_size: int = 16, max_model_len: int = 4096, block_bytes: int = MIB) -> Ready:
    return Ready(blocks, block_size, max_model_len, VOCABULARY, block_bytes, weight_bytes=100 * MIB)


def rows_of(batch: Batch) -> int:
    return len(batch.decodes) + batch.prefill_tokens + sum(map(len, batch.proposals.values()))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 300),
    st.sampled_from([2, 3, 17, 64, 1000]),
    st.sampled_from(["off", "prompt_lookup"]),
    st.integers(1, 64),
    st.sampled_from([0, 1, 1000]),
)
def test_batches_are_within_the_limits_and_reach_them(
    sequences: int, spare: int, longest: int, speculation: str, proposals: int, contexts_at_once: int
) -> None:
    config = EngineConfig(
        "",
        "",
        token_budget=sequences + spare,
        max_sequences=sequences,
        speculation=speculation,  # type: ignore[arg-type]
        max_proposals=proposals,
    )
    batches = list(
        largest_batches(config, ready(64, max_model_len=longest), contexts_at_once=contexts_at_once)
    )
    for batch in batches:
        assert 0 < rows_of(batch) <= config.token_budget
        rows = Seats(config.block_size).rows(batch)
        assert int(rows.positions.max()) < longest
        assert int(rows.slots.max()) < PROFILED_BLOCKS * config.block_size, "beyond the pool that is there"
    assert rows_of(batches[0]) == min(config.token_budget, sequences * (longest - 1))
    assert len(batches[0].sampled) == sequences
    proposed = min(spare, sequences * min(proposals, longest - 2))
    if speculation != "off" and proposed:
        assert len(batches[1].sampled) == sequences + proposed
    if contexts_at_once:
        decodes = next(batch.decodes for batch in batches if batch.decodes and not batch.proposals)
        assert [len(each.tokens) for each in decodes] == [longest - 1] * min(sequences, contexts_at_once)
    if contexts_at_once and longest > config.token_budget + 1:
        (chunk,) = batches[-1].prefills
        assert (chunk.end, rows_of(batches[-1])) == (longest - 1, config.token_budget)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 500), st.integers(0, 200 * MIB), st.integers(1, 300))
def test_the_pool_is_what_is_left(memory_mib: int, working_bytes: int, most: int) -> None:
    config = EngineConfig("", "", memory_bytes=memory_mib * MIB)
    found: Ready | TooLittleMemory
    try:
        found = sized(config, ready(most), working_bytes)
    except TooLittleMemory as error:
        found = error
    assert 0 <= found.working_bytes - working_bytes < MIB
    if isinstance(found, TooLittleMemory):
        assert found.kv_bytes == min(64, most) * MIB, "1,024 tokens, or the whole of a smaller pool"
        assert found.weight_bytes + found.working_bytes + found.kv_bytes > memory_mib * MIB > 0
        return
    blocks = found.kv_blocks_total
    assert found.max_model_len == min(4096, blocks * 16)
    taken = found.weight_bytes + found.working_bytes + blocks * MIB
    if memory_mib:
        assert taken <= memory_mib * MIB
        assert blocks == most or taken + MIB > memory_mib * MIB, "a block more would fit"
    else:
        assert blocks == most


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(
        TooLittleMemory,
        match=r"of 150 MiB weights take 100 and working memory 21, which leaves 29 for KV; 1024 tokens take "
        "64. Give the worker more memory, or lower token_budget or max_sequences",
    ):
        sized(EngineConfig("", "", memory_bytes=150 * MIB), ready(300), 20 * MIB + 1)
