"""What every invariant is, and the plan that checks all of them while a fleet runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from simulator.fleet.assembly import SimFleet

SAMPLE_S: Final = 0.25


class Invariant(Protocol):
    """Adds what does not hold to the fleet's violations, under its own name."""

    def watch(self, fleet: SimFleet) -> None:
        """The fleet started: subscribe to the events that are checked."""

    def sample(self, fleet: SimFleet) -> None:
        """Look at the fleet between two events."""

    def touched(self, fleet: SimFleet, names: Iterable[str]) -> None:
        """Check these workers and schedulers: each had an event in the instant that ends."""

    def at_rest(self, fleet: SimFleet) -> None:
        """Check a fleet in which nothing runs or waits."""


class Sampling:
    """A plan of a run: samples every invariant again and again."""

    def __init__(self, invariants: Sequence[Invariant], *, every_s: float = SAMPLE_S) -> None:
        self._invariants = invariants
        self._every_s = every_s

    async def run(self, fleet: SimFleet) -> None:
        while True:
            await fleet.wait(self._every_s)
            for invariant in self._invariants:
                invariant.sample(fleet)
