"""How many requests per second a worker can serve at most, from its cost model: what loads are sized by.

In a steady state with ``b`` sequences in decode, every step produces ``b`` tokens and prefills
``b * prompt / output``, so that a step of ``s(b)`` seconds serves ``b / (output * s(b))`` requests per
second. The best ``b`` within the KV that fits is the capacity. Prompts are taken at their mean length.
"""

from __future__ import annotations

from simulator.engine.cost_model import CostModel


def requests_per_s(
    model: CostModel, *, prompt_tokens: float, output_tokens: float, kv_tokens: int, max_sequences: int
) -> float:
    """Return the highest sustained rate of one worker, with nothing cached.

    ``kv_tokens`` is what its cache holds. Raises ValueError where not one sequence fits.
    """
    held_tokens = prompt_tokens + output_tokens / 2
    most = min(max_sequences, int(kv_tokens / (prompt_tokens + output_tokens)))
    if most < 1:
        raise ValueError(f"{prompt_tokens + output_tokens:g} tokens do not fit into {kv_tokens} of KV")
    best = 0.0
    for decodes in range(1, most + 1):
        prefill = decodes * prompt_tokens / output_tokens
        step_s = model.step_s(
            round(prefill), decodes, round(decodes * held_tokens), round(prefill * prompt_tokens / 2)
        )
        best = max(best, decodes / (output_tokens * step_s))
    return best
