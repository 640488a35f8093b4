"""One gateway's stream at the scheduler, without a wire: for the gRPC servicer and the in-process client.

The scheduler gathers everything that ended into one frame per ``take``, so that a reader that lags gets
fewer and larger frames; what can gather is bounded by what the gateway has pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from services.core.fleet import PlacementFrame
from services.core.generation import PlaceSpec


class PlacementStream(Protocol):
    """Owned by one caller in the scheduler's event loop. A placement id is the caller's number."""

    @property
    def epoch(self) -> int:
        """The leadership that this stream belongs to."""

    def submit(self, places: Sequence[tuple[int, PlaceSpec]]) -> None:
        """Ask for grants. Each ends in one outcome of a later frame, unless it is cancelled before."""

    def cancel(self, placement_ids: Sequence[int]) -> None:
        """Withdraw placements: queued ones are dropped, granted ones given back, unknown ones ignored.

        An outcome that crosses the call may still come.
        """

    def take(self) -> PlacementFrame | None:
        """Return what ended and forget it; None when nothing did. Raises the error that ended the stream:
        NoLeader when the scheduler leads no longer, Conflict when the gateway opened another stream."""

    def close(self) -> None:
        """Withdraw what is queued; grants that were not taken are given back. Idempotent."""


class PlacementStreams(Protocol):
    def open(self, gateway_id: str, wake: Callable[[], None], *, zone: str = "") -> PlacementStream:
        """Return a new stream. ``wake`` is called, in the event loop, when ``take`` has something.

        ``zone`` is where the gateway is.

        Raises NoLeader while this scheduler does not lead, OverQuota when there are too many streams.
        """
