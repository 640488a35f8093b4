"""Port of a gateway's stream at the scheduler, independent of gRPC: for the servicer and the in-process
client.

The scheduler merges all pending outcomes into one frame per ``take``, so that a slow reader gets fewer and
larger frames. The gateway's pending placements bound the size of a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from services.core.errors import FairwayError
from services.core.fixed_cost.explained import RowsExplanation
from services.core.fixed_cost.slots import SlotDemand, SlotReturn
from services.core.fleet import PlacementFrame
from services.core.generation import PlaceSpec


class PlacementStream(Protocol):
    """Owned by one caller in the scheduler's event loop. The caller chooses the placement ids."""

    @property
    def epoch(self) -> int:
        """The epoch of the leader that serves this stream."""

    def submit(self, places: Sequence[tuple[int, PlaceSpec]]) -> None:
        """Queue placements. Each ends in one outcome of a later frame, unless it is cancelled before."""

    def cancel(self, placement_ids: Sequence[int]) -> None:
        """Withdraw placements: queued ones are dropped, grants are returned, unknown ids are ignored.

        An outcome that crosses the call may still arrive.
        """

    def demand(self, demands: Sequence[SlotDemand], returned: Sequence[SlotReturn]) -> None:
        """Replace the demands of these versions and tenants, and free what these leases no longer allow.

        Later frames have the leases: they follow the demands until these are 0 or the stream ends.
        """

    def explained(self, request_id: str, found: RowsExplanation | None) -> None:
        """Answer a question of an earlier frame: how the gateway ran the request; None: it has no record."""

    def refuse(self, placement_id: int, error: FairwayError) -> None:
        """Refuse a placement that is not submitted; a later frame has the error."""

    def take(self) -> PlacementFrame | None:
        """Return and clear the pending outcomes; None when there are none. Raises the error that ended the
        stream: NoLeader when the scheduler no longer leads, Conflict when the gateway opened another stream.
        """

    def close(self) -> None:
        """Withdraw queued placements and return the grants that were not taken. Idempotent."""


class PlacementStreams(Protocol):
    def open(self, gateway_id: str, wake: Callable[[], None], *, zone: str = "") -> PlacementStream:
        """Return a new stream. ``wake`` is called, in the event loop, when ``take`` has something.

        ``zone`` is where the gateway is.

        Raises NoLeader while this scheduler does not lead, OverQuota when there are too many streams.
        """
