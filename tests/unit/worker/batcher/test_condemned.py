"""Condemned rows that a worker remembers, and the error that it answers."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.batcher.policy.isolation import RunFailure
from services.worker.batcher.search import KEPT_S, MOST_KEPT, CondemnedRows
from tests.unit.worker.batcher.scripted import DIGEST, vector


def test_condemned_rows_are_bounded_and_nothing_is_hashed_while_there_is_none() -> None:
    condemned = CondemnedRows(DIGEST)
    unhashable: Any = None
    assert condemned.find(unhashable, 0.0) is None
    for number in range(MOST_KEPT + 1):
        condemned.add(vector(f"{number:04}"), RunFailure.DIED, 2, float(number))
    assert len(condemned) == MOST_KEPT
    assert condemned.find(vector("0000"), 1.0) is None
    assert condemned.find(vector("0001"), 1.0) is not None
    assert condemned.find(vector("0001"), 1.0 + KEPT_S) is None
    assert condemned.find(vector("0001"), 1e9) is None
    assert not len(condemned)


@pytest.mark.parametrize(
    ("failure", "deaths", "text"),
    [
        (RunFailure.RAISED, 0, f"raised an exception in the model of version {DIGEST}"),
        (RunFailure.DIED, 2, f"ended the process of version {DIGEST}"),
        (RunFailure.KILLED, 3, f"ran while the process of version {DIGEST} was killed"),
        (RunFailure.HUNG, 3, f"did not end within the time limit on version {DIGEST}"),
    ],
)
def test_the_error_has_what_happened_and_how_many_processes_ended(
    failure: RunFailure, deaths: int, text: str
) -> None:
    error = CondemnedRows(DIGEST).add(vector(), failure, deaths, 0.0)
    assert text in error.message
    assert error.message.endswith(f"processes that ended with it: {deaths}")
    assert error.metadata == {"version_digest": DIGEST, "deaths": str(deaths)}
