"""How a gateway gets a worker for a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.core.fleet import PoolMember
from services.core.generation import AnyGrant, FallbackGrant, NotAdmittedReason, PlaceSpec


class PlacementClient(Protocol):
    async def place(self, spec: PlaceSpec) -> AnyGrant:
        """Return a grant, waiting in the scheduler's queue for at most ``spec.queue_ttl_s``.

        Cancelling the call withdraws the placement. A new leader is asked again, with the original
        arrival, without the caller's doing. While no leader is heard, the answer may be a FallbackGrant.
        Raises QueueFull, QueueTimeout, NoWorkerAvailable,
        NoLeader, PromptTooLong (it can never fit).
        """

    def give_back(self, grant: AnyGrant) -> None:
        """Return a grant that will not be used."""

    def over(self, grant: AnyGrant, refusal: NotAdmittedReason | None = None) -> None:
        """Tell that nothing runs under the grant any more; with ``refusal``, that nothing ever did."""


class FallbackPlacer(Protocol):
    """Places for one gateway while nobody leads. Times are monotonic seconds of the caller's clock."""

    def heard(self, now_s: float) -> None:
        """A leader was heard."""

    def learn(self, epoch: int, members: Sequence[PoolMember], now_s: float) -> None:
        """That leader told of the fleet; it replaces what was told before."""

    def wait_s(self, now_s: float) -> float:
        """Return in how many seconds ``place`` may answer, unless a leader is heard meanwhile; 0: now."""

    def place(self, spec: PlaceSpec, now_s: float) -> FallbackGrant | None:
        """Return where it goes, None when nowhere for now."""

    def over(self, grant: FallbackGrant, refusal: NotAdmittedReason | None, now_s: float) -> None:
        """See ``PlacementClient.over``."""
