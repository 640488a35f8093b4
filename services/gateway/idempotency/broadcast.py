"""The output of one request with an idempotency key, in memory, and this gateway's clients that follow it."""

from __future__ import annotations

from collections.abc import Callable

from services.core.errors import FairwayError, ResultExpired, StreamBroken
from services.gateway.events import Accepted, Finished, RequestSink
from services.gateway.idempotency.follower import RecordFollower
from services.gateway.idempotency.record_codec import AcceptedTerms, degraded_out
from services.gateway.idempotency.record_log import Diverged, Piece, RecordLog


class FollowerBroadcast:
    """Retains the whole output, so that a client may join at any time, until the output is too large.

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

    def join(self, sink: RequestSink, client_window: int | None, *, first: bool) -> RecordFollower:
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
        """Send every client the acceptance. ``fresh``: accepted just now, for the first client."""
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
        follower.accepted(
            Accepted(
                request_id=terms.request_id,
                model=terms.model,
                version_digest=terms.version_digest,
                route_revision=terms.route_revision,
                seed=terms.seed,
                prompt_tokens=terms.prompt_tokens,
                received_unix_us=terms.received_unix_us,
                replayed=replayed,
                degradations=degraded_out(terms.degraded),
            )
        )

    def _fail_beyond(self, choice: int, token: int, why: str) -> None:
        for follower in list(self._followers):
            if follower.place(choice).tokens > token:
                follower.failed(
                    StreamBroken(
                        f"the run was lost and its continuation is another one: {why}; send it again with "
                        "its key to have the whole output",
                        retry_after_s=0.1,
                    )
                )

    def _leave(self, follower: RecordFollower, withdrawn: bool) -> None:
        self._followers.pop(follower, None)
        self._left(follower, withdrawn)


def too_large() -> ResultExpired:
    return ResultExpired(
        "the output of this idempotency key is too large to be kept; it was run and will not run again: use "
        "another key"
    )


def copy_of(error: FairwayError) -> FairwayError:
    found = type(error)(error.message, retry_after_s=error.retry_after_s)
    found.metadata = dict(error.metadata)
    return found
