"""KV blocks reserved for a sequence at its start: those of its prompt and of a predicted output.

Prompt blocks that live sequences of a worker share need no new room (``shared_prefix``).

Reserving the worst case would leave most of the memory unused, because few outputs reach their limit. A
sequence that exceeds its prediction takes more blocks on its worker, which preempts when none are free
(PagedAttention, SOSP'23).
"""

from __future__ import annotations

from msgspec import Struct


class Demand(Struct, frozen=True, gc=False):
    """Tokens that a sequence needs from a pool.

    ``prompt_tokens``: to be prefilled. ``reserved_tokens``: the prompt and the predicted output.
    ``worst_case_tokens``: the prompt and the maximum output.
    """

    prompt_tokens: int
    reserved_tokens: int
    worst_case_tokens: int


def demand_of(prompt_tokens: int, max_output_tokens: int, predicted_output_tokens: int) -> Demand:
    """Return the demand; the reservation is at most the request's own worst case."""
    predicted = min(max_output_tokens, max(1, predicted_output_tokens))
    return Demand(prompt_tokens, prompt_tokens + predicted, prompt_tokens + max_output_tokens)


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks for that many tokens."""
    return -(-tokens // block_size)


def can_ever_fit(demand: Demand, *, kv_tokens_total: int, max_model_len: int) -> bool:
    """Whether an empty pool can run the sequence. ``max_model_len`` bounds prompt and output together, as the
    engine does; 0 means no such bound."""
    if max_model_len and demand.worst_case_tokens > max_model_len:
        return False
    return demand.reserved_tokens <= kv_tokens_total


class RoomSummary(Struct, frozen=True, gc=False):
    """Over the serving workers, in tokens: the largest room with a sequence slot, the smallest pool, the
    shortest model length, and the sum of all pools.

    It decides most unsuccessful placements without evaluating each worker.
    """

    serving: bool
    room_tokens: int = 0
    smallest_pool_tokens: int = 0
    shortest_model_len: int = 0
    pool_tokens: int = 0

    def is_short_for(self, demand: Demand, *, shared_tokens: int = 0) -> bool:
        """True when no serving worker has room now and every one of them would have it when empty.

        ``shared_tokens``: prompt tokens that workers may share at best. False decides nothing: evaluate each
        worker.
        """
        return (
            self.room_tokens < demand.reserved_tokens - shared_tokens
            and demand.reserved_tokens <= self.smallest_pool_tokens
            and demand.worst_case_tokens <= self.shortest_model_len
        )
