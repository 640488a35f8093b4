"""Bisection: healthy rows are answered, causes condemned, in few runs, one serving process lost at most."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.batcher.policy.isolation import (
    LONE_FAILURES,
    SPARE_RUNS,
    Isolation,
    RunFailure,
    RunPlace,
)

FAILURES = tuple(RunFailure)
# The most severe failure of a batch is the one that is observed.
SEVERITY = (RunFailure.RAISED, RunFailure.DIED, RunFailure.KILLED, RunFailure.HUNG)


def failure_of(rows: tuple[int, ...], causes: Mapping[int, RunFailure]) -> RunFailure | None:
    found = [causes[row] for row in rows if row in causes]
    return max(found, key=SEVERITY.index, default=None)


def searched(count: int, causes: Mapping[int, RunFailure], most_runs: int = 10_000) -> tuple[Isolation, int]:
    """Return the end of the search, and how many serving processes it took."""
    rows = tuple(range(count))
    first = failure_of(rows, causes)
    assert first is not None
    state = Isolation.begin(rows, first, most_runs=most_runs)
    lost = int(first is not RunFailure.RAISED)
    while (run := state.next_run) is not None:
        assert run.rows
        assert not set(run.rows) & {*state.answered, *state.condemned}
        failure = failure_of(run.rows, causes)
        lost += failure not in (None, RunFailure.RAISED) and run.place is RunPlace.SERVING
        state = state.after(failure)
    return state, lost


@pytest.mark.parametrize("failure", FAILURES)
def test_one_cause_in_a_hundred_takes_at_most_fourteen_runs(failure: RunFailure) -> None:
    for cause in range(100):
        state, lost = searched(100, {cause: failure})
        assert state.condemned == (cause,)
        assert sorted(state.answered) == [row for row in range(100) if row != cause]
        searching = 7 if failure is RunFailure.RAISED else 7 + SPARE_RUNS
        assert state.runs <= searching + LONE_FAILURES[failure] + 1 <= 14
        assert lost <= 1


@pytest.mark.parametrize("place", list(RunPlace))
@pytest.mark.parametrize("failure", FAILURES[1:])
def test_few_runs_of_a_search_end_their_process(failure: RunFailure, place: RunPlace) -> None:
    """Each takes seconds until the next process has started; by halves seven would, and those of the row."""
    for cause in range(100):
        state, failed = Isolation.begin(tuple(range(100)), failure), 0
        if place is RunPlace.SERVING:
            state = state.in_serving()
        while (run := state.next_run) is not None:
            assert run.place is place
            fails = cause in run.rows
            failed += fails
            state = state.after(failure if fails else None)
        assert state.condemned == (cause,)
        assert failed <= 2 + LONE_FAILURES[failure]
        assert state.runs <= 14


@settings(deadline=None, max_examples=150)
@given(
    count=st.integers(1, 128),
    causes=st.dictionaries(st.integers(0, 127), st.sampled_from(FAILURES), min_size=1, max_size=6),
)
def test_any_causes_are_all_found(count: int, causes: dict[int, RunFailure]) -> None:
    causes = {cause % count: failure for cause, failure in causes.items()}
    state, lost = searched(count, causes)
    assert sorted(state.condemned) == sorted(causes)
    assert sorted(state.answered) == [row for row in range(count) if row not in causes]
    assert state.runs <= len(causes) * (ceil(log2(count)) + SPARE_RUNS + 4) + 1
    assert lost <= 1


def test_rows_that_end_processes_run_apart_and_rows_that_raise_where_they_were() -> None:
    assert Isolation.begin((1, 2), RunFailure.RAISED).next_run.place is RunPlace.SERVING  # type: ignore[union-attr]
    for failure in FAILURES[1:]:
        state = Isolation.begin((1, 2), failure)
        while (run := state.next_run) is not None:
            assert run.place is RunPlace.SACRIFICIAL
            state = state.after(None)


def test_a_failure_that_does_not_come_again_condemns_no_row() -> None:
    state = Isolation.begin(tuple(range(100)), RunFailure.DIED)
    while state.next_run is not None:
        state = state.after(None)
    assert state.condemned == ()
    assert sorted(state.answered) == list(range(100))
    assert state.runs <= 8 + SPARE_RUNS


def test_a_row_alone_is_condemned_only_after_enough_failures() -> None:
    state = Isolation.begin((7,), RunFailure.DIED)
    assert state.condemned == ()
    assert state.after(RunFailure.DIED).condemned == (7,)
    assert state.after(None).answered == (7,)
    assert Isolation.begin((7,), RunFailure.RAISED).condemned == (7,)


@pytest.mark.parametrize(
    ("failures", "deaths"),
    [
        ([RunFailure.RAISED], 0),
        ([RunFailure.DIED] * 2, 2),
        ([RunFailure.KILLED, RunFailure.HUNG, RunFailure.KILLED], 3),
        ([RunFailure.HUNG, RunFailure.RAISED], 1),
    ],
)
def test_a_condemned_row_has_the_processes_that_it_ended_alone(
    failures: list[RunFailure], deaths: int
) -> None:
    state = Isolation.begin((7,), failures[0])
    for failure in failures[1:]:
        state = state.after(failure)
    assert (state.condemned, state.deaths) == ((7,), (deaths,))


def test_what_other_rows_ended_is_not_counted() -> None:
    state, dead = Isolation.begin(tuple(range(16)), RunFailure.DIED), {3, 9}
    while (run := state.next_run) is not None:
        state = state.after(RunFailure.DIED if dead.intersection(run.rows) else None)
    assert sorted(state.condemned) == [3, 9]
    assert state.deaths == (2, 2)


def test_the_runs_are_bounded() -> None:
    causes = dict.fromkeys(range(100), RunFailure.RAISED)
    state, _ = searched(100, causes, most_runs=20)
    assert state.runs == 20
    assert sorted((*state.condemned, *state.unresolved, *state.answered)) == list(range(100))
    assert state.unresolved
