"""transformers' continuous batching on the same random weights, in the same process."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any, Final

from bench.engines.load import Request

WAIT_S: Final = 60.0


def tokens_per_s(model: Any, requests: Sequence[Request], *, blocks: int, step_tokens: int) -> float:
    """Return output tokens per second of requests that arrive at once.

    ``blocks`` of its own page size hold the KV, a step has at most ``step_tokens``; all else is as it
    chooses by itself. Starting the manager is not counted.
    """
    transformers: Any = importlib.import_module("transformers")
    settings: Any = importlib.import_module("transformers.generation.configuration_utils")
    generation = transformers.GenerationConfig(
        max_new_tokens=max(request.output_tokens for request in requests),
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    batching = settings.ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=step_tokens)
    produced = finished = 0
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=WAIT_S
    ) as manager:
        began_s = time.perf_counter()
        for request in requests:
            manager.add_request(input_ids=request.prompt, max_new_tokens=request.output_tokens)
        while finished < len(requests):
            result = manager.get_result(timeout=WAIT_S)
            if result is None:
                raise RuntimeError(f"{finished} of {len(requests)} requests came back in time")
            if result.is_finished():
                finished += 1
                produced += len(result.generated_tokens)
        wall_s = time.perf_counter() - began_s
    if produced != sum(request.output_tokens for request in requests):
        raise RuntimeError(f"{produced} tokens came, not all that were due")
    return produced / wall_s
