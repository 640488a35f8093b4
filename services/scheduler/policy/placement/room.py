"""Maximum room over all serving workers: it decides most unsuccessful placements without evaluating each
worker."""

from __future__ import annotations

from msgspec import Struct

from services.scheduler.policy.placement.kv_admission import Demand


class RoomSummary(Struct, frozen=True, gc=False):
    """Over the serving workers, in tokens: the largest room with a sequence slot, the smallest pool, the
    shortest model length, and the sum of all pools."""

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
