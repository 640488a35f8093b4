"""The best that any serving worker offers: decides most hopeless placements without a look at each worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.scheduler.policy.kv_admission import Demand
from services.scheduler.policy.placement import Candidate, NoWorker

NO_ROOM: Final = NoWorker((), never_fits=False, waits_for_room=True)


@dataclass(frozen=True, slots=True)
class RoomSummary:
    """Of the serving workers: the largest room with a sequence slot, the smallest pool, the shortest model
    length, all in tokens."""

    serving: bool
    room_tokens: int = 0
    smallest_pool_tokens: int = 0
    shortest_model_len: int = 0

    def is_short_for(self, demand: Demand) -> bool:
        """True when no serving worker has room now and every one of them would when empty.

        False decides nothing: look at each.
        """
        return (
            self.room_tokens < demand.reserved_tokens <= self.smallest_pool_tokens
            and demand.worst_case_tokens <= self.shortest_model_len
        )


def room_of(candidates: Iterable[Candidate]) -> RoomSummary:
    """Return the summary of a version's pools."""
    serving = [candidate for candidate in candidates if candidate.serving]
    if not serving:
        return RoomSummary(serving=False)
    return RoomSummary(
        serving=True,
        room_tokens=max((found.kv_tokens_room for found in serving if found.slots > 0), default=0),
        smallest_pool_tokens=min(found.kv_tokens_total for found in serving),
        shortest_model_len=min(found.max_model_len or found.kv_tokens_total for found in serving),
    )
