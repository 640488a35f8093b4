"""How many KV blocks a sequence is given at the start: those of its prompt and of a predicted output.

What of the prompt live sequences of a worker share costs it nothing (``policy.shared_prefix``).

Reserving the worst case would leave most of the memory unused, since few outputs reach their limit. A
sequence that outgrows its prediction takes more blocks on its worker, which preempts when there are none
(PagedAttention, SOSP'23).
"""

from __future__ import annotations

from msgspec import Struct


class Demand(Struct, frozen=True, gc=False):
    """What a sequence asks of a pool, in tokens.

    ``prompt_tokens`` are to be prefilled, ``reserved_tokens`` are the prompt and the predicted output,
    ``worst_case_tokens`` the prompt and the whole output allowed.
    """

    prompt_tokens: int
    reserved_tokens: int
    worst_case_tokens: int


def demand_of(prompt_tokens: int, max_output_tokens: int, predicted_output_tokens: int) -> Demand:
    """Return the demand; the reservation never exceeds the request's own worst case."""
    predicted = max(1, min(max_output_tokens, predicted_output_tokens))
    return Demand(prompt_tokens, prompt_tokens + predicted, prompt_tokens + max(1, max_output_tokens))


def blocks_for(tokens: int, block_size: int) -> int:
    """Return how many blocks hold that many tokens."""
    return -(-tokens // block_size)


def can_ever_fit(demand: Demand, *, kv_tokens_total: int, max_model_len: int) -> bool:
    """Whether an empty pool takes the sequence. ``max_model_len`` bounds prompt and output together: the
    engine refuses what exceeds it; 0 means no such bound."""
    if max_model_len and demand.worst_case_tokens > max_model_len:
        return False
    return demand.reserved_tokens <= kv_tokens_total
