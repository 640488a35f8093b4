"""The rows of failed batches, until each is answered or condemned: ``policy.isolation`` over live rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import structlog

from services.core.errors import PoisonedInput
from services.core.fixed_cost.rows import RawTensor
from services.core.poison.fingerprint import fingerprint_of_row
from services.worker.batcher.policy.isolation import Isolation, RunFailure, RunPlace
from services.worker.streams.live_row import LiveRow

KEPT_S: Final = 300.0  # long enough for the next try of a client, short after an operator lifts a quarantine
MOST_KEPT: Final = 256
_NO_SECRET: Final = b""  # these fingerprints stay in this process
_FAILED: Final = {
    RunFailure.RAISED: "raised an exception in the model of version {}",
    RunFailure.DIED: "ended the process of version {}",
    RunFailure.KILLED: "ran while the process of version {} was killed",
    RunFailure.HUNG: "did not end within the time limit on version {}",
}


class _Kept(NamedTuple):
    until_s: float
    failure: RunFailure
    deaths: int


class CondemnedRows:
    """The rows that were condemned on this worker, by fingerprint: they do not run again here.

    The gateway that receives the error writes the quarantine of the fleet. A client that left before the
    search ended received none: its next try is answered from here, and then every gateway refuses the input.
    The oldest row goes first. Single writer: the batcher.
    """

    def __init__(self, version_digest: str) -> None:
        self._digest = version_digest
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(
        self, inputs: Sequence[RawTensor], failure: RunFailure, deaths: int, now_s: float
    ) -> PoisonedInput:
        """Refuse these inputs for ``KEPT_S``; return the error. ``deaths``: processes that the row ended
        alone."""
        fingerprint = fingerprint_of_row(inputs, _NO_SECRET)
        self._kept.pop(fingerprint, None)
        if len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        kept = self._kept[fingerprint] = _Kept(now_s + KEPT_S, failure, deaths)
        return self._error(kept)

    def find(self, inputs: Sequence[RawTensor], now_s: float) -> PoisonedInput | None:
        """Return why a row with these inputs is refused, None if it may run. Nothing is hashed while no row
        is kept."""
        while self._kept and next(iter(self._kept.values())).until_s <= now_s:
            del self._kept[next(iter(self._kept))]
        if not self._kept:
            return None
        kept = self._kept.get(fingerprint_of_row(inputs, _NO_SECRET))
        return None if kept is None else self._error(kept)

    def _error(self, kept: _Kept) -> PoisonedInput:
        return PoisonedInput(
            f"this input {_FAILED[kept.failure].format(self._digest)}, alone in its batch; processes that "
            f"ended with it: {kept.deaths}",
            version_digest=self._digest,
            deaths=kept.deaths,
        )


log = structlog.get_logger()


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
        another process. The other rows run only while a client still waits for one of them.
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


class RowSearches:
    """The searches of one version, the oldest first, and the rows that they condemned. Single writer: the
    batcher."""

    def __init__(self, version_digest: str) -> None:
        self._searches: list[RowSearch] = []
        self._condemned = CondemnedRows(version_digest)
        self._healthy_first = False  # the serving process ran suspects: rows that wait have their turn

    def __iter__(self) -> Iterator[RowSearch]:
        return iter(self._searches)

    def refusal(self, inputs: Sequence[RawTensor], now_s: float) -> PoisonedInput | None:
        """Return why a row with these inputs may not run, None if it may."""
        return self._condemned.find(inputs, now_s)

    def begin(self, rows: Sequence[LiveRow], width: int, cause: str, failure: RunFailure) -> RowSearch:
        """Return the search of a batch that failed."""
        self._searches.append(search := RowSearch(rows, width, cause, failure))
        return search

    def at(self, place: RunPlace) -> list[RowSearch]:
        """Return those whose next run takes place there."""
        return [search for search in self._searches if search.place is place]

    def next_in_serving(self, *, others_wait: bool) -> RowSearch | None:
        """Return the search that runs next in the process that serves; None: others go first."""
        found = self.at(RunPlace.SERVING)
        if not found or (found[0].deadly and self._healthy_first and others_wait):
            return None
        self._healthy_first = found[0].deadly
        return found[0]

    def others_ran(self) -> None:
        """Record that rows that waited had their turn."""
        self._healthy_first = False

    def take_condemned(self, search: RowSearch, now_s: float) -> list[tuple[LiveRow, PoisonedInput]]:
        """Return the rows that the search condemned since the last call, with their errors."""
        found = []
        for row, deaths in search.take_condemned():
            error = self._condemned.add(row.spec.inputs, search.failure, deaths, now_s)
            request_id, failure = row.spec.request_id, search.failure.value
            log.error("row.condemned", request_id=request_id, failure=failure, deaths=deaths)
            found.append((row, error))
        return found

    def give_up(self, search: RowSearch) -> list[LiveRow]:
        """Forget a search; return the rows that it leaves."""
        self._searches.remove(search)
        return search.unanswered()

    def clear(self) -> None:
        """Forget all searches."""
        self._searches.clear()
