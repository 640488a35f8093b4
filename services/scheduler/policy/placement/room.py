"""The best that any serving worker offers: decides most hopeless placements without a look at each worker."""

from __future__ import annotations

from msgspec import Struct

from services.scheduler.policy.placement.kv_admission import Demand


class RoomSummary(Struct, frozen=True, gc=False):
    """Of the serving workers: the largest room with a sequence slot, the smallest pool, the shortest model
    length, all pools together, in tokens."""

    serving: bool
    room_tokens: int = 0
    smallest_pool_tokens: int = 0
    shortest_model_len: int = 0
    pool_tokens: int = 0

    def is_short_for(self, demand: Demand, *, shared_tokens: int = 0) -> bool:
        """True when no serving worker has room now and every one of them would when empty.

        ``shared_tokens``: of the prompt, what workers may share at best. False decides nothing: look at each.
        """
        return (
            self.room_tokens < demand.reserved_tokens - shared_tokens
            and demand.reserved_tokens <= self.smallest_pool_tokens
            and demand.worst_case_tokens <= self.shortest_model_len
        )
