"""This gateway's clients that follow one request with an idempotency key, and the output that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.core.errors import (
    DeadlineExceeded,
    FairwayError,
    InvalidInput,
    RequestCancelled,
    ResultExpired,
    StreamBroken,
)
from services.gateway.events import (
    Accepted,
    Delivered,
    DeliveredChoice,
    Finished,
    RequestSink,
    request_tag,
)
from services.gateway.idempotency.record_codec import AcceptedTerms, degraded_out, with_fields_of
from services.gateway.idempotency.record_log import START, ChoiceLog, Diverged, Piece, Place, RecordLog


@dataclass(slots=True)
class _Reading:
    """``taken``: what the transport took. ``unchecked``: what the client had before, until it is compared."""

    place: Place = START
    taken: int = 0
    unchecked: DeliveredChoice | None = None


class RecordFollower:
    """The handle of one client; ``Request`` is the handle without a key.

    The client receives the output at its own pace, from its start or from behind what it has: tokens are sent
    while the transport takes them. A client that leaves does not affect the request.
    """

    def __init__(
        self,
        sink: RequestSink,
        log: RecordLog,
        *,
        window_tokens: int,
        client_window: int | None,
        delivered: Delivered | None,
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
        self._delivered = delivered
        self._readings = {
            number: _Reading(Place(choice.tokens, choice.chars), choice.tokens, choice)
            for number, choice in enumerate(delivered.choices if delivered is not None else ())
            if choice.tokens or choice.chars
        }
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
        """Send the client the acceptance, and one that replaces it: by another version, before any output.

        A client with output of another request is failed.
        """
        if self.done or (self._accepted is not None and not _replaces(accepted, self._accepted)):
            return
        if self._delivered is not None and self._delivered.request != request_tag(accepted.request_id):
            self._depart(foreign_position(), withdrawn=True)
            return
        self._accepted = accepted
        self._sink.on_accepted(accepted)
        self.pump()

    def fresh(self, choice: int, piece: Piece) -> None:
        """Send a piece that was just added to the log: the path of every token while the client keeps up."""
        reading = self._reading(choice)
        room = self._room(reading)
        ready = self._accepted is not None and reading.unchecked is None
        if ready and reading.place == piece.at and room >= len(piece.ids):
            reading.place = piece.end
            self._sink.on_tokens(choice, piece.at.tokens, piece.ids, piece.text, piece.logprobs)
        else:
            self.pump()

    def pump(self) -> None:
        """Send what the log has and the client takes; then the end, if nothing remains."""
        if self._accepted is None or self.done:
            return
        caught_up = True
        for number in sorted(self._log.choices.keys() | self._readings.keys()):
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
        """The client's position in a choice; its start until what the client had was compared."""
        reading = self._reading(choice)
        return START if reading.unchecked is not None else reading.place

    def _pump_choice(self, choice: int) -> bool:
        """Whether the client has all available output of the choice."""
        log, reading = self._log.choice(choice), self._reading(choice)
        if not self._compared(log, reading):
            return False
        while not self.done and (piece := log.next_piece(reading.place)) is not None:
            room = self._room(reading)
            if room <= 0:
                return False
            piece = piece.first(room)
            reading.place = piece.end
            self._sink.on_tokens(choice, piece.at.tokens, piece.ids, piece.text, piece.logprobs)
        return True

    def _compared(self, log: ChoiceLog, reading: _Reading) -> bool:
        """Whether the log contains what the client had. Fails a client that had other output."""
        had = reading.unchecked
        if had is None:
            return True
        there = log.end >= reading.place
        if there and DeliveredChoice().after(log.ids(reading.place), "").checksum == had.checksum:
            reading.unchecked = None
        elif there or self._end is not None:
            self.failed(broken("its output differs from what was sent"))
        return reading.unchecked is None

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


class FollowerBroadcast:
    """The output of one request, in memory, and the clients that follow it.

    Retains the whole output, so that a client may join at any time, until the output is too large.

    From then on it retains only what its clients have yet to take, and no other client can join.
    """

    def __init__(self, window_tokens: int, left: Callable[[RecordFollower, bool], None]) -> None:
        """``left`` is called when a follower is done, with whether it requested the request's end."""
        self.log = RecordLog()
        self.terms: AcceptedTerms | None = None
        self.whole = True
        self._window = window_tokens
        self._left = left
        self._followers: dict[RecordFollower, bool] = {}
        self._fresh: bool | None = None
        self._end: Finished | FairwayError | None = None

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def ended(self) -> bool:
        """Whether the request has its end here."""
        return self._end is not None

    def join(
        self, sink: RequestSink, client_window: int | None, delivered: Delivered | None, *, first: bool
    ) -> RecordFollower:
        """Return the handle of a new client. Raises ResultExpired when the output's beginning was dropped.

        The client receives nothing before ``catch_up``.
        """
        if not self.whole:
            raise too_large()
        follower = RecordFollower(
            sink,
            self.log,
            window_tokens=self._window,
            client_window=client_window,
            delivered=delivered,
            leave=self._leave,
        )
        self._followers[follower] = first
        return follower

    def catch_up(self, follower: RecordFollower) -> None:
        """Send a late client everything produced so far."""
        if follower in self._followers and self._fresh is not None:
            self._accept(follower)
        if isinstance(self._end, Finished):
            follower.finished(self._end)
        elif self._end is not None:
            follower.failed(copy_of(self._end))

    def accept(self, terms: AcceptedTerms, *, fresh: bool) -> None:
        """Send every client the acceptance that it does not have. ``fresh``: of the first acceptance,
        whether it was made just now, for the first client.
        """
        self.terms = terms
        if self._fresh is None:
            self._fresh = fresh
        for follower in list(self._followers):
            self._accept(follower)

    def put(self, choice: int, piece: Piece) -> None:
        """Add output and send it. Fails clients that received a different output from a lost run."""
        found = self.log.choice(choice)
        try:
            new = found.put(piece)
        except Diverged as diverged:
            found.cut(piece.at)
            self._fail_beyond(choice, piece.at.tokens, str(diverged))
            new = found.put(piece)
        if new:
            for follower in list(self._followers):
                follower.fresh(choice, found.pieces[-1])

    def finished(self, finished: Finished) -> None:
        """End every client with success, now or when it has taken its remaining output."""
        self._end = finished
        for follower in list(self._followers):
            follower.finished(finished)

    def failed(self, error: FairwayError) -> None:
        """Fail every client, each with its own copy of the error: a face adds to it."""
        self._end = error
        for follower in list(self._followers):
            follower.failed(copy_of(error))

    def shorten(self) -> None:
        """Drop what every client has taken."""
        self.whole = False
        for number, choice in self.log.choices.items():
            places = [follower.place(number) for follower in self._followers]
            choice.trim(min(places, key=lambda place: place.tokens, default=choice.end))

    def taken(self, choice: int) -> int:
        """Return the token up to which output counts as taken: its end while the whole is retained."""
        end = self.log.choice(choice).end.tokens
        if self.whole:
            return end
        return min((follower.place(choice).tokens for follower in self._followers), default=end)

    def _accept(self, follower: RecordFollower) -> None:
        assert self.terms is not None
        terms, replayed = self.terms, not (self._fresh and self._followers[follower])
        degradations = degraded_out(terms.degraded)
        follower.accepted(with_fields_of(terms, Accepted, replayed=replayed, degradations=degradations))

    def _fail_beyond(self, choice: int, token: int, why: str) -> None:
        for follower in list(self._followers):
            if follower.place(choice).tokens > token:
                follower.failed(broken(why))

    def _leave(self, follower: RecordFollower, withdrawn: bool) -> None:
        self._followers.pop(follower, None)
        self._left(follower, withdrawn)


def _replaces(accepted: Accepted, before: Accepted) -> bool:
    """Whether it is a later acceptance by another version: an earlier one is read again from the record."""
    later = accepted.received_unix_us > before.received_unix_us
    return later and accepted.version_digest != before.version_digest


def broken(why: str) -> StreamBroken:
    return StreamBroken(
        f"the run was lost and its continuation is another one: {why}; send it again with its key to have "
        "the whole output",
        retry_after_s=0.1,
    )


def foreign_position() -> InvalidInput:
    return InvalidInput(
        "last-event-id is not of this request; send it again without it to have the whole output",
        field="last-event-id",
    )


def too_large() -> ResultExpired:
    return ResultExpired(
        "the output of this idempotency key is not stored; it was run and will not run again: use another key"
    )


def copy_of(error: FairwayError) -> FairwayError:
    found = type(error)(error.message, retry_after_s=error.retry_after_s)
    found.metadata = dict(error.metadata)
    return found
