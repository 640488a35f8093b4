"""What every invariant is, and when invariants check a running fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Final

from services.core.fleet import SequenceUsage
from services.core.generation import PlaceSpec, StartSpec
from services.core.records import Priority
from services.scheduler.term import Term
from simulator.fleet.assembly import SimFleet
from simulator.fleet.grant_watch import ComputedTokens, GrantListener

SAMPLE_S: Final = 0.25


class Invariant:
    """Adds what does not hold to the fleet's violations, under its own name. Each method does nothing by
    default; ``watch`` remembers the fleet."""

    def watch(self, fleet: SimFleet) -> None:
        """The fleet started: subscribe to the events that are checked."""
        self._fleet = fleet

    def sample(self, fleet: SimFleet) -> None:
        """Look at the fleet between two events."""

    def touched(self, fleet: SimFleet, names: Iterable[str]) -> None:
        """Check these workers and schedulers: each had an event in the instant that ends."""

    def at_rest(self, fleet: SimFleet) -> None:
        """Check a fleet in which nothing runs or waits."""

    def _add(self, invariant: str, text: str) -> None:
        self._fleet.violations.add(invariant, text)


class InvariantSampling:
    """A plan of a run: samples every invariant again and again."""

    def __init__(self, invariants: Sequence[Invariant], *, every_s: float = SAMPLE_S) -> None:
        self._invariants = invariants
        self._every_s = every_s

    async def run(self, fleet: SimFleet) -> None:
        while True:
            await fleet.wait(self._every_s)
            for invariant in self._invariants:
                invariant.sample(fleet)


class Looks(Enum):
    """``SAMPLES``: every quarter of a second only. ``TOUCHED``: besides, at the end of each instant, at the
    workers on which a sequence started, was charged for or ended, and at the leader when a placement came to
    wait or went. ``ALL``: at the end of each instant everything, for small fleets."""

    SAMPLES = auto()
    TOUCHED = auto()
    ALL = auto()


class Instants(GrantListener):
    """Checks all invariants at the end of instants. Changes nothing: a run with it has the same trace."""

    def __init__(self, fleet: SimFleet, invariants: Sequence[Invariant], looks: Looks) -> None:
        """Listen to the fleet from now on."""
        self._fleet = fleet
        self._invariants = invariants
        self._touched: dict[str, None] = {}
        self._leader_touched = False
        if looks is Looks.ALL:
            fleet.loop.after_instant = self._check_all
        elif looks is Looks.TOUCHED:
            fleet.grants.listeners.append(self)
            fleet.loop.after_instant = self._check_touched

    def entered(self, spec: PlaceSpec) -> None:
        self._leader_touched = True

    def left(self, spec: PlaceSpec) -> None:
        self._leader_touched = True

    def granted(self, term: Term, spec: PlaceSpec, worker_id: str) -> None:
        self._leader_touched = True

    def started(self, worker_id: str, spec: StartSpec) -> None:
        self._touched[worker_id] = None

    def produced(self, worker_id: str, tenant: str, priority: Priority, work: ComputedTokens) -> None:
        self._touched[worker_id] = None

    def ended(self, worker_id: str, usage: SequenceUsage) -> None:
        self._touched[worker_id] = None

    def _check_all(self) -> None:
        for invariant in self._invariants:
            invariant.sample(self._fleet)

    def _check_touched(self) -> None:
        if self._leader_touched:
            self._leader_touched = False
            self._touched |= dict.fromkeys(self._fleet.schedulers)
        if self._touched:
            touched, self._touched = self._touched, {}
            for invariant in self._invariants:
                invariant.touched(self._fleet, touched)
