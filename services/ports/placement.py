"""Port of placement: a gateway gets a worker for a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.core.fleet import PoolMember
from services.core.generation import AnyGrant, FallbackGrant, NotAdmittedReason, PlaceSpec


class PlacementClient(Protocol):
    async def place(self, spec: PlaceSpec) -> AnyGrant:
        """Return a grant, waiting in the scheduler's queue for at most ``spec.queue_ttl_s``.

        Cancelling the call withdraws the placement. After a change of leader the client resubmits the
        placement with its original arrival time. While no leader answers, the result may be a FallbackGrant.
        Raises QueueFull, QueueTimeout, NoWorkerAvailable, NoLeader, PromptTooLong (the request can never
        fit).
        """

    def give_back(self, grant: AnyGrant) -> None:
        """Return a grant that will not be used."""

    def over(self, grant: AnyGrant, refusal: NotAdmittedReason | None = None) -> None:
        """Report that nothing runs under the grant any more; with ``refusal``, that nothing ever ran."""


class FallbackPlacer(Protocol):
    """Places sequences for one gateway while there is no leader. Times are monotonic seconds of the caller's
    clock."""

    def leader_answered(self, now_s: float) -> None:
        """Record a message from a leader."""

    def replace_snapshot(self, epoch: int, members: Sequence[PoolMember], now_s: float) -> None:
        """Replace the worker list by the one that the leader of ``epoch`` sent."""

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until ``place`` may return a grant, unless a leader answers meanwhile; 0:
        now."""

    def place(self, spec: PlaceSpec, now_s: float) -> FallbackGrant | None:
        """Return a grant, or None when no worker has room now."""

    def ended(self, grant: FallbackGrant, refusal: NotAdmittedReason | None, now_s: float) -> None:
        """See ``PlacementClient.over``."""
