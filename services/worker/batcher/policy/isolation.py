"""Which rows of a failed batch run next, and where, until each is answered or condemned. Pure.

A batch that raises is searched in the process that serves. One that ends its process, or hangs, is searched
in a *sacrificial* process, while the serving one goes on with healthy rows: a suspect returns to it never.
Where no sacrificial process can run, it is searched in the serving one once that is up again. A search
divides its suspects. The part that runs decides for both: if it fails, it has a cause and the other
part is set aside; if it succeeds, its rows are answered and the other part has a cause, without a run. A row
that fails alone runs alone until it failed as often as condemning takes (``core.poison.suspicion``: faults
and kills differ). Then what was set aside runs as one batch, and is searched if that fails.

While failures leave the process up, the parts are halves. A process takes seconds to start, a successful run
milliseconds: where failures end it, a search of ``ceil(log2(n)) + SPARE_RUNS`` runs divides so that the
fewest of them fail. With ``f`` failures in ``r`` runs one cause is found among ``sum(C(r, i), i = 0..f)``
rows: the part that runs has as many as ``f - 1`` failures in ``r - 1`` runs find (the puzzle of two eggs, for
``f``).

One cause among 100 rows takes at most 9 runs, 3 of the row alone, and one of the rest: 13, of which at most 5
fail, instead of 9 by halves. ``d`` causes take at most ``d`` times as many. Beyond ``most_runs`` the rows
that are left are returned unresolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import comb
from typing import Final

from services.core.poison.suspicion import FATAL_FAULTS, FATAL_KILLS

MOST_RUNS: Final = 64
SPARE_RUNS: Final = 2  # more than halves would take, so that fewer of them fail


class RunFailure(StrEnum):
    """How a run ended without answers."""

    RAISED = "raised"  # an exception; the process goes on
    DIED = "died"  # the process ended by a fault of its own
    KILLED = "killed"  # out of memory, or by a signal from outside
    HUNG = "hung"  # cut at the limit of the cost curve


class RunPlace(StrEnum):
    SERVING = "serving"
    SACRIFICIAL = "sacrificial"


# How often a row must fail alone before it is condemned.
LONE_FAILURES: Final = {
    RunFailure.RAISED: 1,
    RunFailure.DIED: FATAL_FAULTS,
    RunFailure.KILLED: FATAL_KILLS,
    RunFailure.HUNG: FATAL_KILLS,
}


@dataclass(frozen=True, slots=True)
class IsolationRun:
    """Run these rows as one batch."""

    rows: tuple[int, ...]
    place: RunPlace


@dataclass(frozen=True, slots=True)
class Isolation:
    """The state of a search over the rows of one failed batch; each field is sorted as the batch was."""

    suspects: tuple[int, ...]  # rows that contain at least one cause
    aside: tuple[int, ...] = ()  # rows that no run has cleared or condemned
    answered: tuple[int, ...] = ()
    condemned: tuple[int, ...] = ()
    unresolved: tuple[int, ...] = ()
    deaths: tuple[int, ...] = ()  # processes that each condemned row ended by itself
    deadly: bool = False  # its failures end the process
    has_sacrificial: bool = True  # a sacrificial process can run
    lone_failures: int = 0  # failures of the only suspect
    lone_deaths: int = 0  # failures of the only suspect that ended the process
    runs: int = 0
    left: int = 0  # runs of a deadly search
    most_runs: int = MOST_RUNS

    @staticmethod
    def begin(rows: Sequence[int], failure: RunFailure, *, most_runs: int = MOST_RUNS) -> Isolation:
        """Return the search after a batch of these rows failed."""
        deadly = failure is not RunFailure.RAISED
        state = Isolation(tuple(rows), deadly=deadly, left=_runs_of(len(rows)), most_runs=most_runs)
        return state._failed_alone(failure) if len(rows) == 1 else state

    @property
    def next_run(self) -> IsolationRun | None:
        """The next run; None: the search is over."""
        if self.suspects:
            count = len(self.suspects)
            part = _part(count, self.left) if self.deadly else count // 2
            return IsolationRun(self.suspects[: max(1, part)], self._place)
        return IsolationRun(self.aside, self._place) if self.aside else None

    @property
    def _place(self) -> RunPlace:
        return RunPlace.SACRIFICIAL if self.deadly and self.has_sacrificial else RunPlace.SERVING

    def in_serving(self) -> Isolation:
        """Return the state in which every run takes place in the process that serves."""
        return replace(self, has_sacrificial=False)

    def after(self, failure: RunFailure | None) -> Isolation:
        """Return the state after the next run; ``failure`` is None if its rows were answered."""
        run = self.next_run
        assert run is not None, "the search is over"
        ran, others = run.rows, self.suspects[len(run.rows) :]
        state = replace(self, runs=self.runs + 1, left=self.left - 1)
        if failure is None:
            state = replace(
                state,
                answered=self.answered + ran,
                suspects=others,
                aside=self.aside if self.suspects else (),
                lone_failures=0,
                lone_deaths=0,
            )
        else:
            deadly = self.deadly or failure is not RunFailure.RAISED
            state = replace(state, deadly=deadly, suspects=ran)
            if not self.suspects or deadly is not self.deadly:  # another search begins
                state = replace(state, left=_runs_of(len(ran)))
            state = replace(state, aside=self.aside + others if self.suspects else ())
            if len(ran) == 1:
                state = state._failed_alone(failure)
        return state._stopped() if state.runs >= state.most_runs else state

    def _failed_alone(self, failure: RunFailure) -> Isolation:
        failures = self.lone_failures + 1
        deaths = self.lone_deaths + (failure is not RunFailure.RAISED)
        if failures < LONE_FAILURES[failure]:
            return replace(self, lone_failures=failures, lone_deaths=deaths)
        return replace(
            self,
            condemned=self.condemned + self.suspects,
            deaths=(*self.deaths, deaths),
            suspects=(),
            lone_failures=0,
            lone_deaths=0,
        )

    def _stopped(self) -> Isolation:
        return replace(self, unresolved=self.suspects + self.aside, suspects=(), aside=())


def _runs_of(rows: int) -> int:
    """Return how many runs a search among so many rows may take until the cause is known."""
    return max(0, rows - 1).bit_length() + SPARE_RUNS


def _reach(failures: int, runs: int) -> int:
    """Return among how many rows one cause is found with so many failures in so many runs."""
    return sum(comb(runs, count) for count in range(failures + 1))


def _part(rows: int, runs: int) -> int:
    """Return how many of the rows run, so that the fewest runs fail; 0: too few runs are left to choose."""
    for failures in range(1, runs + 1):
        if _reach(failures, runs) >= rows:
            return min(rows - 1, _reach(failures - 1, runs - 1))
    return rows // 2
