"""Links to the leading scheduler: the interface for placements and reports, and the reconnect loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, NoReturn, Protocol, TypeVar

from services.core.backoff import Backoff
from services.core.errors import FairwayError
from services.ports.clock import Clock

OPEN_S: Final = 2.0  # time for each step of opening a link over a network
SILENCE_S: Final = 3.5  # several of the leader's heartbeats

Message_co = TypeVar("Message_co", covariant=True)
Link_co = TypeVar("Link_co", covariant=True)
Link = TypeVar("Link")


class LeaderLink(Protocol[Message_co]):
    """An open stream to a leader. Its opener closes it. One task sends and one task receives."""

    @property
    def epoch(self) -> int: ...

    async def receive(self) -> Message_co:
        """Return the leader's next message, which may be a heartbeat. Raises FairwayError when the link broke
        or the leader was silent for too long."""

    async def close(self) -> None:
        """End the stream; ``receive`` raises from now on. Idempotent."""


class LeaderLinks(Protocol[Link_co]):
    async def open(self) -> Link_co:
        """Return a link whose leader responded, in bounded time. Raises NoLeader or another FairwayError."""

    async def wait_leader_change(self, timeout_s: float) -> None:
        """Return when the leader may differ from that of the last ``open``, or after the timeout."""


async def keep_linked(
    links: LeaderLinks[Link],
    use: Callable[[Link], Awaitable[None]],
    missed: Callable[[FairwayError], None],
    clock: Clock,
    *,
    backoff: Backoff,
    rng: Random,
) -> NoReturn:
    """Reconnect until cancelled. ``use`` returns when its link is lost, and closes it. ``missed`` receives
    the error when no link could be opened.

    Before the next attempt it waits for another leader, at most for the backoff. A link that lasted longer
    than the longest backoff resets the count of failures; opening a link may take longer than that.
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
