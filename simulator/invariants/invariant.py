"""What every invariant is, and the plan that checks all of them while a fleet runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

MAX_KEPT: Final = 50


@dataclass(frozen=True, slots=True)
class Violation:
    """``invariant`` is the stable name of what did not hold; ``at_s`` is the simulation's time."""

    invariant: str
    at_s: float
    text: str

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at_s:.6f} s: {self.text}"


class Violations:
    """The first ``MAX_KEPT`` in full, the rest as counts."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.found: list[Violation] = []
        self.counts: Counter[str] = Counter()

    def add(self, invariant: str, text: str) -> None:
        self.counts[invariant] += 1
        if len(self.found) < MAX_KEPT:
            self.found.append(Violation(invariant, self._now_s(), text))

    def expect(self, holds: bool, invariant: str, text: Callable[[], str]) -> None:
        """Add a violation unless it holds. ``text`` is called only then."""
        if not holds:
            self.add(invariant, text())

    def integrity(self, invariant: str, name: str, check: Callable[[], None]) -> None:
        """Run a ``check_integrity``; what it asserts becomes a violation of ``name``."""
        try:
            check()
        except AssertionError as error:
            self.add(invariant, f"{name}: {error}")


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
