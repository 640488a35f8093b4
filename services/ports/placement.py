"""How a gateway gets a worker for a sequence."""

from __future__ import annotations

from typing import Protocol

from services.core.generation import Grant, PlaceSpec


class PlacementClient(Protocol):
    async def place(self, spec: PlaceSpec) -> Grant:
        """Return a grant, waiting in the scheduler's queue for at most ``spec.queue_ttl_s``.

        Cancelling the call withdraws the placement. A new leader is asked again, with the original
        arrival, without the caller's doing. Raises QueueFull, QueueTimeout, NoWorkerAvailable,
        NoLeader, PromptTooLong (it can never fit).
        """

    def give_back(self, grant: Grant) -> None:
        """Return a grant that will not be used."""
