"""Clients of fixed-cost models: each sends rows through a gateway and judges every answer.

The output of a row is a function of its input. A client whose gateway is lost, or whose request is refused,
does not send it again: what is checked is that no answer is wrong, missing or double.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from services.core.errors import FairwayError, PoisonedInput
from services.core.estimates.sketch import Sketch
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.records import Priority
from simulator.engine.poison import EngineEnding
from simulator.engine.sim_batches import row_input, row_output
from simulator.fleet.clients.session import GATEWAY_LOST, ONCE, UNREACHABLE, Clients
from simulator.fleet.violations import Violations

ROWS: Final = "rows"
ANSWERED: Final = "ANSWERED"
_MOST_ROWS: Final = 1000  # most rows of a request: a row's number is the request's and its place

RowsEnded = Callable[[Sequence[RowEnd] | FairwayError], None]


@dataclass(frozen=True, slots=True)
class SimRows:
    """One request of the load."""

    tenant: str
    # Tokens of each row.
    tokens: tuple[int, ...]
    # Time since the start of the load.
    arrival_s: float = 0.0
    priority: Priority = Priority.STANDARD
    # Time after the arrival; None: no deadline.
    deadline_s: float | None = None
    # The client leaves so long after its arrival.
    cancel_after_s: float | None = None
    # Rows that end each batch with them, by place.
    poisons: dict[int, EngineEnding] = field(default_factory=dict)


class RowsDoor(Protocol):
    """A gateway's interface to clients of rows."""

    @property
    def name(self) -> str: ...

    def enter(self, call: Callable[[], None]) -> None:
        """Do something inside its process."""

    def run_rows(
        self, sim_rows: SimRows, rows: tuple[tuple[RawTensor, ...], ...], ended: RowsEnded
    ) -> asyncio.Task[None]:
        """Run the rows; cancelling the task withdraws them."""


class RowClients:
    """All clients of rows of a run; ``outcomes`` counts rows by their end."""

    def __init__(
        self, clients: Clients, doors: Callable[[], RowsDoor | None], violations: Violations
    ) -> None:
        """``doors`` returns a gateway that accepts connections."""
        self._clients = clients
        self._doors = doors
        self.violations = violations
        self.present: dict[int, RowsSession] = {}
        self.outcomes: Counter[str] = Counter()
        # Durations of answered requests, by tenant.
        self.seconds: defaultdict[str, Sketch] = defaultdict(Sketch)
        self.sent = 0

    def send(self, request: SimRows) -> None:
        """Begin a request now."""
        self.sent += 1
        door = self._doors()
        if door is None:
            self.outcomes[UNREACHABLE] += len(request.tokens)
            return
        session = RowsSession(self, self.sent, request, door, self._clients.now_s)
        self.present[session.number] = session
        door.enter(session.submit)
        if request.cancel_after_s is not None:
            self._clients.later(request.cancel_after_s, session.leave)

    def gateway_lost(self, name: str) -> None:
        """Notify the clients of a gateway that their connections broke."""
        for session in [held for held in self.present.values() if held.door.name == name]:
            session.lost()

    def left(self, session: RowsSession, outcomes: Sequence[str]) -> None:
        """Count a request that ended, once."""
        if self.present.pop(session.number, None) is None:
            self.violations.add(ONCE, f"rows {session.number} ended twice")
        self.outcomes.update(outcomes)
        if set(outcomes) == {ANSWERED}:
            self.seconds[session.tenant].add(self._clients.now_s - session.sent_s)


class RowsSession:
    """One request of one client."""

    def __init__(
        self, clients: RowClients, number: int, request: SimRows, door: RowsDoor, sent_s: float
    ) -> None:
        self._clients = clients
        self._request = request
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self.number = number
        self.door = door
        self.sent_s = sent_s
        self._rows = tuple(
            row_input(number * _MOST_ROWS + place, tokens, request.poisons.get(place))
            for place, tokens in enumerate(request.tokens)
        )

    @property
    def tenant(self) -> str:
        return self._request.tenant

    def submit(self) -> None:
        if not self._over:
            self._task = self.door.run_rows(self._request, self._rows, self.ended)

    def leave(self) -> None:
        """The client disconnects."""
        if not self._over:
            self._end(["CANCELLED"] * len(self._rows))
            self.door.enter(self._cancel)

    def lost(self) -> None:
        """The connection to the gateway broke."""
        self._end([GATEWAY_LOST] * len(self._rows))

    def ended(self, found: Sequence[RowEnd] | FairwayError) -> None:
        """Judge the answer."""
        if self._over:
            return
        if isinstance(found, FairwayError):
            self._end([found.reason] * len(self._rows))
            return
        if len(found) != len(self._rows):
            self._violated(f"{len(found)} answers to {len(self._rows)} rows")
        self._end([self._outcome(place, end) for place, end in enumerate(found[: len(self._rows)])])

    def _outcome(self, place: int, end: RowEnd) -> str:
        """Return how a row ended, and add what is wrong with it."""
        poison = self._request.poisons.get(place)
        if end.lost:
            self._violated(f"row {place} was returned as lost")
        if end.error is not None:
            if poison is None and isinstance(end.error, PoisonedInput):
                self._violated(f"row {place} was condemned and is no poison")
            return end.error.reason
        if poison is not None:
            self._violated(f"row {place} was answered and is a poison")
        if end.outputs != row_output(self._rows[place]):
            self._violated(f"row {place} has the output of another input")
        return ANSWERED

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, outcomes: Sequence[str]) -> None:
        self._over = True
        self._clients.left(self, outcomes)

    def _violated(self, text: str) -> None:
        self._clients.violations.add(ROWS, f"rows {self.number}: {text}")
