"""How long the wait for the next link is, by how long the ones before lasted."""

from __future__ import annotations

from random import Random

import pytest

from services.adapters.links.leader_links import keep_linked
from services.core.backoff import Backoff
from services.core.errors import FairwayError, NoLeader
from tests.support.clocks import HandClock

BACKOFF = Backoff(first_s=0.5, max_s=8.0)


class Enough(Exception):
    """The test saw all that it wants to see."""


class Life(HandClock):
    """A clock that stands still but for what the links take. Implements ``LeaderLinks`` too.

    ``links``: how long each takes to open and then lasts, None for one that does not open.
    """

    def __init__(self, links: list[tuple[float, float | None]]) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.missed: list[FairwayError] = []
        self._links = links

    async def open(self) -> float:
        if not self._links:
            raise Enough
        opening_s, lasting_s = self._links.pop(0)
        self.now_s += opening_s
        if lasting_s is None:
            raise NoLeader("nobody leads")
        return lasting_s

    async def close(self) -> None: ...

    async def wait_leader_change(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self.now_s += timeout_s

    async def use(self, link: float) -> None:
        self.now_s += link


async def ceilings(*links: tuple[float, float | None]) -> list[float]:
    """Return the most that each wait may have been, as the backoff draws from its upper half."""
    life = Life(list(links))
    with pytest.raises(Enough):
        await keep_linked(life, life.use, life.missed.append, life, backoff=BACKOFF, rng=Random(1))
    assert len(life.missed) == sum(lasting_s is None for _, lasting_s in links)
    found = []
    for wait_s in life.waits:
        [ceiling_s] = [one for one in (1.0, 2.0, 4.0, 8.0) if one / 2 < wait_s <= one]
        found.append(ceiling_s)
    return found


async def test_each_link_that_is_lost_soon_doubles_the_wait() -> None:
    lasting_s = (0.0, 7.9, 1.0, 0.0, 0.0, 0.0)
    assert await ceilings(*((0.0, one) for one in lasting_s)) == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


async def test_a_link_that_lasted_begins_anew() -> None:
    assert await ceilings((0.0, 0.0), (0.0, 0.0), (0.0, 8.1), (0.0, 0.0)) == [1.0, 2.0, 1.0, 2.0]


async def test_to_wait_in_vain_for_one_is_no_link_that_lasted() -> None:
    """An open that nobody answers takes longer than the longest wait, and so may one that is lost at once."""
    assert await ceilings((9.0, None), (9.0, None), (9.0, 0.1), (9.0, None)) == [1.0, 2.0, 4.0, 8.0]
    assert await ceilings((9.0, None), (9.0, 8.1), (9.0, None)) == [1.0, 1.0, 2.0]
