"""The profiling step: the largest steps that the limits allow, and the pool that is left besides them.

The batches are made up: their sequences share one block, whose KV means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine.execute.executor import Batch, PrefillChunk
from services.worker.engine.sequence import SequenceState, sequence_of
from services.worker.engine.unsupported import TooLittleMemory
from services.worker.engine.validation import MAX_LOGPROBS
from services.worker.engine_protocol import EngineConfig, Ready, Submit

MIB: Final = 1 << 20
PROFILED_BLOCKS: Final = 1  # size of the pool that the profiling step runs on
LEAST_CONTEXT: Final = 1024  # tokens; a pool that holds less is of no use
_LIMITS: Final = OutputLimits(max_tokens=1 << 20, min_tokens=1 << 20, stop_token_ids=(0,))
# Most pairs of queries and keys in a chunk that torch attends with: more take long on a CPU.
MOST_PAIRS: Final = 1 << 24


def largest_batches(config: EngineConfig, ready: Ready, *, contexts_at_once: int) -> Iterator[Batch]:
    """Yield batches that take as much memory as any within the limits, each row with every sampling feature.

    They have as many tokens as the budget, and as many sampling rows as there are sequences; with
    speculation, as many as proposals make. Where attention holds memory that grows with the contexts of
    ``contexts_at_once`` sequences, so many decodes, and a chunk, stand at the end of a context.
    """
    sampling = _costliest(ready.vocab_size)
    rows, sequences, longest = config.token_budget, config.max_sequences, max(1, ready.max_model_len - 1)
    shares = [min(longest, rows // sequences + (place < rows % sequences)) for place in range(sequences)]
    yield Batch([], [PrefillChunk(_sequence(size, sampling, config), 0, size) for size in shares])
    spare = rows - sequences
    most = min(config.max_proposals, longest - 1)
    counts = [min(most, spare // sequences + (place < spare % sequences)) for place in range(sequences)]
    if config.speculation != "off" and any(counts):
        decodes = [_sequence(1, sampling, config, spare=count) for count in counts]
        yield Batch(decodes, [], {place: [0] * count for place, count in enumerate(counts) if count})
    if contexts_at_once:
        count = min(sequences, contexts_at_once)
        yield Batch([_sequence(longest, sampling, config) for _ in range(count)], [])
    if contexts_at_once and longest > rows:
        whole = _sequence(longest, sampling, config)
        chunk = rows if contexts_at_once > 1 else max(1, min(rows, MOST_PAIRS // longest))
        yield Batch([], [PrefillChunk(whole, longest - chunk, longest)])


def sized(config: EngineConfig, ready: Ready, working_bytes: int) -> Ready:
    """Return what is left for KV, of a pool that may have ``ready.kv_blocks_total`` blocks at most.

    Raises TooLittleMemory if that is less than LEAST_CONTEXT tokens, or than the whole of a smaller pool.
    """
    working_bytes = max(0, math.ceil(working_bytes / MIB)) * MIB
    most, block_bytes = ready.kv_blocks_total, ready.kv_bytes_per_block
    blocks, left = most, 0
    if config.memory_bytes:
        left = config.memory_bytes - ready.weight_bytes - working_bytes
        blocks = min(most, max(0, left) // block_bytes)
    least = min(most, -(-min(ready.max_model_len, LEAST_CONTEXT) // config.block_size))
    if blocks < least:
        raise TooLittleMemory(
            f"of {_mib(config.memory_bytes)} MiB weights take {_mib(ready.weight_bytes)} and working memory "
            f"{_mib(working_bytes)}, which leaves {max(0, left) // MIB} for KV; {least * config.block_size} "
            f"tokens take {_mib(least * block_bytes)}. Give the worker more memory, or lower token_budget or "
            "max_sequences",
            weight_bytes=ready.weight_bytes,
            working_bytes=working_bytes,
            kv_bytes=least * block_bytes,
        )
    return msgspec.structs.replace(
        ready,
        kv_blocks_total=blocks,
        max_model_len=min(ready.max_model_len, blocks * config.block_size),
        working_bytes=working_bytes,
    )


def _costliest(vocab_size: int) -> Sampling:
    """Return sampling with everything that a row may ask for."""
    return Sampling(
        seed=0,
        top_p=0.99,
        top_k=max(1, vocab_size - 1),
        min_p=0.001,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias=((0, 1.0),),
        logprobs=min(MAX_LOGPROBS, vocab_size),
        prompt_logprobs=min(MAX_LOGPROBS, vocab_size),
    )


def _sequence(tokens: int, sampling: Sampling, config: EngineConfig, *, spare: int = 0) -> SequenceState:
    """Return a sequence with all but the last token computed, or nothing; half of it is output."""
    prompt = max(1, tokens // 2)
    submit = Submit(0, Prompt([0] * prompt), sampling, _LIMITS, 1 << 30, produced_ids=[0] * (tokens - prompt))
    sequence = sequence_of(submit, arrival=0, eos_ids=frozenset())
    sequence.blocks = [0] * -(-(tokens + spare) // config.block_size)
    sequence.capacity = len(sequence.blocks) * config.block_size
    sequence.contiguous = len(sequence.blocks) == 1
    return sequence


def _mib(size_bytes: int) -> int:
    return math.ceil(size_bytes / MIB)
