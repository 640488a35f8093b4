"""The room of a version by a look at each worker: what the seats keep up to date is held against it."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.policy.placement.candidate import Candidate, RoomSummary


def room_of(candidates: Iterable[Candidate]) -> RoomSummary:
    """Return the summary of a version's pools."""
    serving = [candidate for candidate in candidates if candidate.serving]
    if not serving:
        return RoomSummary(serving=False)
    return RoomSummary(
        serving=True,
        room_tokens=max((0, *(found.kv_tokens_room for found in serving if found.slots > 0))),
        smallest_pool_tokens=min(found.kv_tokens_total for found in serving),
        shortest_model_len=min(found.max_model_len or found.kv_tokens_total for found in serving),
        pool_tokens=sum(found.kv_tokens_total for found in serving),
    )
