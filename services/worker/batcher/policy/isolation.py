"""Which rows of a failed batch run next, and where, until each is answered or condemned. Pure.

A batch that raises is searched in the process that serves. One that ends its process, or hangs, is searched
in a *sacrificial* process, while the serving one goes on with healthy rows: a suspect returns to it never. A
search halves its suspects. The half that runs decides for both: if it fails, it has a cause and the other
half is set aside; if it succeeds, its rows are answered and the other half has a cause, without a run. A row
that fails alone runs alone until it failed as often as condemning takes (``core.poison.suspicion``: faults
and kills differ). Then what was set aside runs as one batch, and is searched if that fails.

One cause among ``n`` rows takes ``ceil(log2(n))`` runs, those of the row alone, and one of the rest: for 100
rows at most 7 + 3 + 1 = 11. ``d`` causes take at most ``d`` times as many. Beyond ``most_runs`` the rows
that are left are returned unresolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from services.core.poison.suspicion import FATAL_FAULTS, FATAL_KILLS

MOST_RUNS: Final = 64


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

    suspects: tuple[int, ...]  # at least one of them is a cause
    aside: tuple[int, ...] = ()  # nothing is known of them
    answered: tuple[int, ...] = ()
    condemned: tuple[int, ...] = ()
    unresolved: tuple[int, ...] = ()
    place: RunPlace = RunPlace.SERVING
    lone_failures: int = 0  # of the only suspect
    runs: int = 0
    most_runs: int = MOST_RUNS

    @staticmethod
    def begin(rows: Sequence[int], failure: RunFailure, *, most_runs: int = MOST_RUNS) -> Isolation:
        """Return the search after a batch of these rows failed."""
        state = Isolation(tuple(rows), place=_place_after(RunPlace.SERVING, failure), most_runs=most_runs)
        return state._failed_alone(failure) if len(rows) == 1 else state

    @property
    def next_run(self) -> IsolationRun | None:
        """The next run; None: the search is over."""
        if self.suspects:
            return IsolationRun(self.suspects[: max(1, len(self.suspects) // 2)], self.place)
        return IsolationRun(self.aside, self.place) if self.aside else None

    def after(self, failure: RunFailure | None) -> Isolation:
        """Return the state after the next run; ``failure`` is None if its rows were answered."""
        run = self.next_run
        assert run is not None, "the search is over"
        ran, others = run.rows, self.suspects[len(run.rows) :]
        state = replace(self, runs=self.runs + 1)
        if failure is None:
            state = replace(
                state,
                answered=self.answered + ran,
                suspects=others,
                aside=self.aside if self.suspects else (),
                lone_failures=0,
            )
        else:
            state = replace(state, place=_place_after(self.place, failure), suspects=ran)
            state = replace(state, aside=self.aside + others if self.suspects else ())
            if len(ran) == 1:
                state = state._failed_alone(failure)
        return state._stopped() if state.runs >= state.most_runs else state

    def _failed_alone(self, failure: RunFailure) -> Isolation:
        failures = self.lone_failures + 1
        if failures < LONE_FAILURES[failure]:
            return replace(self, lone_failures=failures)
        return replace(self, condemned=self.condemned + self.suspects, suspects=(), lone_failures=0)

    def _stopped(self) -> Isolation:
        return replace(self, unresolved=self.suspects + self.aside, suspects=(), aside=())


def _place_after(place: RunPlace, failure: RunFailure) -> RunPlace:
    return place if failure is RunFailure.RAISED else RunPlace.SACRIFICIAL
