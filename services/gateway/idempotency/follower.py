"""One client of a request with an idempotency key: receives the output from its start, at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.core.errors import DeadlineExceeded, FairwayError, RequestCancelled
from services.gateway.events import Accepted, Finished, RequestSink
from services.gateway.idempotency.record_log import START, Piece, Place, RecordLog


@dataclass(slots=True)
class _Reading:
    """``taken``: what the transport took; ``allowed``: where the client's own window ends."""

    place: Place = START
    taken: int = 0


class RecordFollower:
    """The handle of one client; ``Request`` is the handle without a key.

    Tokens are sent while the transport takes them. A client that leaves does not affect the request.
    """

    def __init__(
        self,
        sink: RequestSink,
        log: RecordLog,
        *,
        window_tokens: int,
        client_window: int | None,
        leave: Callable[[RecordFollower, bool], None],
    ) -> None:
        """``leave`` is called once when this client leaves, with whether it requested the request's end."""
        self.done = False
        self._sink = sink
        self._log = log
        self._window = window_tokens
        self._allowed = client_window
        self._leave = leave
        self._accepted: Accepted | None = None
        self._readings: dict[int, _Reading] = {}
        self._end: Finished | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- calls from its face -----------------------------------------------------------------------

    def credit(self, choice: int, tokens: int) -> None:
        """The transport took tokens of a choice."""
        reading = self._readings.get(choice)
        if reading is not None:
            reading.taken += tokens
            self.pump()

    def allow(self, tokens: int) -> None:
        """The client takes ``tokens`` more of every choice."""
        if self._allowed is not None:
            self._allowed += tokens
            self.pump()

    def cancel(self, error: FairwayError | None = None) -> None:
        """The client disconnected; the request runs on for a grace period."""
        self._depart(error, withdrawn=False)

    def withdraw(self) -> None:
        """The client requests the end of the request; it ends unless other clients follow it."""
        self._depart(None, withdrawn=True)

    # --- calls from the request --------------------------------------------------------------------

    def limit_to(self, timeout_s: float) -> None:
        """Fail this client, and no other, when its deadline passes."""
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def accepted(self, accepted: Accepted) -> None:
        """Send the client the acceptance, once."""
        if self._accepted is None and not self.done:
            self._accepted = accepted
            self._sink.on_accepted(accepted)
            self.pump()

    def fresh(self, choice: int, piece: Piece) -> None:
        """Send a piece that was just added to the log: the path of every token while the client keeps up."""
        reading = self._reading(choice)
        room = self._room(reading)
        if self._accepted is not None and reading.place == piece.at and room >= len(piece.ids):
            reading.place = piece.end
            self._sink.on_tokens(choice, piece.at.tokens, piece.ids, piece.text, piece.logprobs)
        else:
            self.pump()

    def pump(self) -> None:
        """Send what the log has and the client takes; then the end, if nothing remains."""
        if self._accepted is None or self.done:
            return
        caught_up = True
        for number in sorted(self._log.choices):
            caught_up &= self._pump_choice(number)
        if caught_up and self._end is not None and not self.done:
            self._finish()
            self._sink.on_finished(self._end)

    def finished(self, finished: Finished) -> None:
        """The request succeeded: the client receives the end after its remaining tokens."""
        self._end = finished
        self.pump()

    def failed(self, error: FairwayError) -> None:
        """Fail the client now, with its own copy of the error: a face may add to it."""
        if not self.done:
            self._finish()
            self._sink.on_failed(error)

    def place(self, choice: int) -> Place:
        """The client's position in a choice."""
        return self._reading(choice).place

    def _pump_choice(self, choice: int) -> bool:
        """Whether the client has all available output of the choice."""
        log, reading = self._log.choices[choice], self._reading(choice)
        while not self.done and (piece := log.next_piece(reading.place)) is not None:
            room = self._room(reading)
            if room <= 0:
                return False
            piece = piece.first(room)
            reading.place = piece.end
            self._sink.on_tokens(choice, piece.at.tokens, piece.ids, piece.text, piece.logprobs)
        return True

    def _room(self, reading: _Reading) -> int:
        limit = reading.taken + self._window
        if self._allowed is not None:
            limit = min(limit, self._allowed)
        return limit - reading.place.tokens

    def _reading(self, choice: int) -> _Reading:
        found = self._readings.get(choice)
        if found is None:
            found = self._readings[choice] = _Reading()
        return found

    def _depart(self, error: FairwayError | None, *, withdrawn: bool) -> None:
        if not self.done:
            self._finish(withdrawn=withdrawn)
            self._sink.on_failed(error or RequestCancelled("the request was cancelled"))

    def _expire(self) -> None:
        self._depart(DeadlineExceeded("the deadline passed before the output was complete"), withdrawn=False)

    def _finish(self, *, withdrawn: bool = False) -> None:
        self.done = True
        if self._timer is not None:
            self._timer.cancel()
        self._leave(self, withdrawn)
