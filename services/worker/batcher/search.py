"""The rows of a failed batch, until each is answered or condemned: ``policy.isolation`` over live rows."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.batcher.policy.isolation import Isolation, RunFailure, RunPlace
from services.worker.streams.live_row import LiveRow


class RowSearch:
    """Single writer: the batcher, which runs ``rows`` in the process ``place`` and reports the outcome."""

    def __init__(self, rows: Sequence[LiveRow], width: int, cause: str, failure: RunFailure) -> None:
        """``width`` and ``cause`` are those of the batch that failed."""
        self.width = width
        self.cause = cause
        self.failure = failure  # the latest
        self._rows = {row.number: row for row in rows}
        self._state = Isolation.begin(tuple(self._rows), failure)
        self._taken = 0

    @property
    def place(self) -> RunPlace | None:
        """Where the next run takes place; None: the search is over.

        Suspects that were dropped are searched to the end: the next client that sends the cause would end
        another process. Rows of which nothing is known do not run for no one.
        """
        run = self._state.next_run
        if run is None or (not self._state.suspects and all(row.dropped for row in self._left())):
            return None
        return run.place

    @property
    def deadly(self) -> bool:
        """Whether its failures end the process."""
        return self._state.deadly

    @property
    def rows(self) -> tuple[LiveRow, ...]:
        """The rows of the next run."""
        run = self._state.next_run
        return () if run is None else tuple(self._rows[number] for number in run.rows)

    def after(self, failure: RunFailure | None) -> None:
        """Record the outcome of the next run; None: its rows were answered."""
        self.failure = failure or self.failure
        self._state = self._state.after(failure)

    def go_on_in_serving(self) -> None:
        """Run what is left in the process that serves: no sacrificial one can run."""
        self._state = self._state.in_serving()

    def take_condemned(self) -> list[tuple[LiveRow, int]]:
        """Return the rows that were condemned since the last call, and how many processes each ended."""
        taken, self._taken = self._taken, len(self._state.condemned)
        found = zip(self._state.condemned[taken:], self._state.deaths[taken:], strict=True)
        return [(self._rows[number], deaths) for number, deaths in found]

    def unanswered(self) -> list[LiveRow]:
        """Return the rows that the search leaves, when it is given up or over."""
        return [*self._left(), *(self._rows[number] for number in self._state.unresolved)]

    def _left(self) -> list[LiveRow]:
        return [self._rows[number] for number in (*self._state.suspects, *self._state.aside)]
