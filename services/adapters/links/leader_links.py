"""Links to whichever scheduler leads: what placements and reports ask of them, and how one is kept open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, NoReturn, Protocol, TypeVar

from services.core.backoff import Backoff
from services.core.errors import FairwayError
from services.ports.clock import Clock

OPEN_S: Final = 2.0  # for each step of opening a link over a wire
SILENCE_S: Final = 3.5  # several of the leader's heartbeats

Heard_co = TypeVar("Heard_co", covariant=True)
Link_co = TypeVar("Link_co", covariant=True)
Link = TypeVar("Link")


class LeaderLink(Protocol[Heard_co]):
    """An open stream to a leader. Closed by who opened it; sent to and received from by one task each."""

    @property
    def epoch(self) -> int: ...

    async def receive(self) -> Heard_co:
        """Return what the leader says next, be it a heartbeat. Raises FairwayError when the link broke or
        the leader was not heard for too long."""

    async def close(self) -> None:
        """End the stream; ``receive`` raises from now on. Idempotent."""


class LeaderLinks(Protocol[Link_co]):
    async def open(self) -> Link_co:
        """Return a link that heard its leader, in bounded time. Raises NoLeader or another FairwayError."""

    async def wait_leader_change(self, timeout_s: float) -> None:
        """Return when another leader than that of the last ``open`` may be there, or after the timeout."""

    async def close(self) -> None: ...


async def keep_linked(
    links: LeaderLinks[Link],
    use: Callable[[Link], Awaitable[None]],
    missed: Callable[[FairwayError], None],
    clock: Clock,
    *,
    backoff: Backoff,
    rng: Random,
) -> NoReturn:
    """Have a link at all times, until cancelled: ``use`` closes the one that it is given, and returns when it
    is lost; ``missed`` hears why there is none.

    Before the next it waits for another leader, at most as long as the backoff says. A link that lasted
    longer than the longest of those waits ends the row of failures. To open one may take longer than that.
    """
    failures = 0
    while True:
        try:
            link = await links.open()
        except FairwayError as error:
            missed(error)
        else:
            opened_s = clock.monotonic_s()
            await use(link)
            if clock.monotonic_s() - opened_s > backoff.max_s:
                failures = 0
        failures += 1
        await links.wait_leader_change(backoff.wait_s(failures, rng))
