"""One request under an idempotency key on this gateway: claimed, run or followed, and ended.

``drive`` is the only task that decides. It claims the record. If the record is this gateway's, a ``Request``
runs as any other does, with this as its sink, and the record is written behind it; if another's, it is read
until it ends. Losing the record to another gateway turns the one into the other under the clients' feet:
what they hear comes from one log either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final

import structlog

from services.core.errors import (
    FairwayError,
    IdempotencyConflict,
    NoWorkerAvailable,
    RequestCancelled,
    ResultExpired,
    StoreUnavailable,
)
from services.core.generation import GenerationSpec, TokenLogprobs, Usage
from services.gateway.audience import Audience, too_large
from services.gateway.events import Accepted, Finished, RequestSink
from services.gateway.follower import Follower
from services.gateway.keyed_types import Ending, KeyedPorts, Launch, Resume
from services.gateway.policy.record_end import ends_record
from services.gateway.record_codec import Resumed, encode, end_in, failure_in
from services.gateway.record_log import Piece, Place, outputs
from services.gateway.record_reader import RecordReader
from services.gateway.request import Request
from services.gateway.sequence_run import Produced
from services.gateway.settling import NotingLimiter, pin_of, write_ending
from services.ports.idempotency import (
    Addition,
    Expired,
    Hold,
    OtherBody,
    Owned,
    RecordKey,
    RecordState,
    Written,
)
from services.ports.limiter import Reservation

log = structlog.get_logger()

# How often a record may change hands under one client before it is told to come again.
MAX_ROUNDS: Final = 32
# How long a follower waits for a store that does not answer.
FOLLOW_PATIENCE_S: Final = 10.0
WATCHED_S: Final = 2.0
_NOTHING: Final = Usage(0, 0)


class Phase(StrEnum):
    CLAIMING = "claiming"
    OWNING = "owning"
    FOLLOWING = "following"
    OVER = "over"


class KeyedRun:
    """The sink of the request, while it runs here, and the host of the clients that follow it."""

    def __init__(
        self,
        key: RecordKey,
        fingerprint: str,
        ports: KeyedPorts,
        launch: Launch,
        departed: Callable[[Follower], None],
    ) -> None:
        """``departed`` hears of every client that is done."""
        self.key = key
        self.phase = Phase.CLAIMING
        self.audience = Audience(ports.window_tokens, self._left)
        self.hold: Hold | None = None
        self.unwritten: Ending | None = None
        self._fingerprint = fingerprint
        self._ports = ports
        self._launch = launch
        self._departed = departed
        self._reader = RecordReader(self.audience)
        self._task: asyncio.Task[None] | None = None
        self._request: Request | None = None
        self._outcome: Finished | FairwayError | None = None
        self._settled: tuple[Reservation, Usage] | None = None
        self._fenced = False
        self._written_s = 0.0
        self._watched_until_s = 0.0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._grace: asyncio.TimerHandle | None = None
        self._chars: dict[int, int] = {}
        self._credited: dict[int, int] = {}
        self._stopped: FairwayError | None = None

    # --- clients -----------------------------------------------------------------------------------

    def start(self, task: asyncio.Task[None]) -> None:
        """Name the task that runs ``drive``."""
        self._task = task

    def join(self, sink: RequestSink, client_window: int | None, *, first: bool) -> Follower:
        """Return the handle of a client, who hears the request from its beginning."""
        follower = self.audience.join(sink, client_window, first=first)
        self._stop_grace()
        asyncio.get_running_loop().call_soon(self.audience.catch_up, follower)
        return follower

    @property
    def joinable(self) -> bool:
        """Whether another client can come: it runs, or its end is not written yet and stands here."""
        if self.phase is Phase.OVER:
            return self.unwritten is not None and self.unwritten.ended
        return self._stopped is None

    def stop(self, error: FairwayError) -> None:
        """End what this gateway does for the request: another may go on with it."""
        self._stopped = self._stopped or error
        if self._request is not None:
            self._request.cancel(error)
        elif self.phase is not Phase.OWNING and self._task is not None:
            self._task.cancel()

    # --- the one task ------------------------------------------------------------------------------

    async def drive(self) -> None:
        """Return once the request ended here and every client was told."""
        try:
            for _ in range(MAX_ROUNDS):
                if await self._round():
                    return
            raise NoWorkerAvailable(
                f"the request changed hands {MAX_ROUNDS} times; send it again with its key", retry_after_s=1.0
            )
        except FairwayError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._fail(self._stopped or RequestCancelled("the request was cancelled"))
            if self._stopped is None:
                raise
        finally:
            self.phase = Phase.OVER
            self.hold = None
            self._stop_grace()

    async def _round(self) -> bool:
        """Claim once and act on it. Whether the request is over."""
        self.phase = Phase.CLAIMING
        claim = await self._ports.store.claim(self.key, self._fingerprint, self._ports.owner)
        log.info("idempotency.claimed", record=self.key.digest[:12], found=type(claim).__name__.lower())
        if isinstance(claim, OtherBody):
            raise IdempotencyConflict(
                "this idempotency key was used for another request; take a new key for a new request",
                field="idempotency_key",
            )
        if isinstance(claim, Expired):
            raise ResultExpired(
                "the request of this idempotency key was run and its output is not kept any more; it will "
                "not run again: use another key",
                field="idempotency_key",
            )
        if isinstance(claim, Owned):
            return await self._own(claim)
        return await self._follow()

    async def _follow(self) -> bool:
        """Read the record until it ended, or until it can be claimed. Whether it ended."""
        ports = self._ports
        self.phase = Phase.FOLLOWING
        self._drop_if_alone()
        self._reader.restart()
        patience_until_s = ports.clock.monotonic_s() + FOLLOW_PATIENCE_S
        while True:
            try:
                tail = await ports.store.read(self.key, self._reader.chunks, watch=True)
            except StoreUnavailable:
                if ports.clock.monotonic_s() > patience_until_s:
                    raise
                await ports.clock.sleep(ports.limits.poll_s)
                continue
            patience_until_s = ports.clock.monotonic_s() + FOLLOW_PATIENCE_S
            self._reader.take(tail.chunks)
            if tail.state is RecordState.EXPIRED:
                raise too_large()
            if tail.more:
                continue
            if tail.state is RecordState.ENDED:
                self._deliver(self._reader.end or too_large())
                return True
            if tail.state in (RecordState.FREE, RecordState.GONE):
                return False
            if tail.state is RecordState.RUNNING:
                await ports.clock.sleep(ports.limits.poll_s)

    async def _own(self, claim: Owned) -> bool:
        """Run the request, from where an earlier run left it. Whether it is over, and not lost to another."""
        self.phase = Phase.OWNING
        self._begin(claim.hold)
        await self._load(claim.chunks)
        if not self.audience.whole:
            raise too_large()  # what was read of it is not all there to go on from
        resume = self._resume()
        self._chars = {number: found.chars for number, found in enumerate(resume.produced)} if resume else {}
        limiter = NotingLimiter(self.note, self._ports.limiter)
        self._request, task = self._launch(self, limiter, resume, self._record)
        if self._stopped is not None:
            self._request.cancel(self._stopped)
        if not len(self.audience):
            self._start_grace()
        await task
        self._request = None
        # From here on the flusher leaves the record alone.
        hold, self.hold = self.hold, None
        await self._quiet.wait()
        if self._fenced or hold is None:
            log.info("idempotency.fenced", record=self.key.digest[:12])
            return False
        return await self._conclude(hold)

    def _begin(self, hold: Hold) -> None:
        self.hold, self._fenced = hold, False
        self._outcome = self._settled = None
        self._credited = {}
        self._written_s = self._ports.clock.monotonic_s()

    async def _load(self, chunks: int) -> None:
        """Take over what the record has."""
        self._reader.restart()
        while self._reader.chunks < chunks:
            tail = await self._ports.store.read(self.key, self._reader.chunks, watch=False)
            if not tail.chunks:
                self._reader.restart()  # the log went meanwhile: from the beginning, with the same seed
                return
            self._reader.take(tail.chunks)

    def _resume(self) -> Resume | None:
        pin = self.audience.pin
        if pin is None:
            return None
        found = self.audience.log.choices
        places = [(number, choice.recorded) for number, choice in sorted(found.items())]
        count = max((number for number, _ in places), default=-1) + 1
        produced = [Produced()] * count
        for number, place in places:
            produced[number] = Produced(found[number].ids(place), place.chars)
        return Resume(pin, tuple(produced))

    async def _record(self, spec: GenerationSpec) -> None:
        """Write what the request was accepted as, before any client hears it. Raises StoreUnavailable."""
        assert self.hold is not None
        pin = self.audience.pin or pin_of(spec, self._ports.clock.unix_s())
        entry = Resumed() if self._reader.pinned else pin
        (answer,) = await self._ports.store.append([Addition(self.hold, encode([entry]))])
        if answer in (Written.FENCED, Written.GONE):
            self._fenced = True
            raise StoreUnavailable("another gateway took the request over", retry_after_s=0.1)
        if answer is Written.TOO_LARGE:
            self.audience.shorten()
        fresh = self.audience.pin is None
        self._reader.resumes += 0 if fresh else 1
        self.audience.accept(pin, fresh=fresh)

    # --- the end -----------------------------------------------------------------------------------

    async def _conclude(self, hold: Hold) -> bool:
        outcome = self._outcome
        assert outcome is not None, "a request ended without a terminal event"
        if isinstance(outcome, Finished):
            outcome = replace(outcome, resumes=outcome.resumes + self._reader.resumes)
        ended = isinstance(outcome, Finished) or (self.audience.pin is not None and ends_record(outcome))
        chunk = self._last_chunk(outcome, ended=ended)
        reservation, usage = self._settled or (None, _NOTHING)
        ending = Ending(hold, chunk, reservation, usage, ended)
        try:
            written = await write_ending(self._ports, ending)
        except StoreUnavailable as error:
            log.warning("idempotency.end_deferred", record=self.key.digest[:12], reason=error.reason)
            self.unwritten = ending
        else:
            if written is Written.FENCED:
                log.info("idempotency.fenced", record=self.key.digest[:12])
                return False
        self._deliver(outcome)
        return True

    def _last_chunk(self, outcome: Finished | FairwayError, *, ended: bool) -> bytes:
        if self.audience.pin is None:
            return b""
        if not self.audience.whole:
            return encode([failure_in(too_large())]) if ended else b""
        rest = outputs(self.audience.log.unrecorded(all_of_it=ended))
        if not ended:
            return encode(rest)
        last = end_in(outcome) if isinstance(outcome, Finished) else failure_in(outcome)
        return encode([*rest, last])

    def _deliver(self, outcome: Finished | FairwayError) -> None:
        self.phase = Phase.OVER
        if isinstance(outcome, Finished):
            self.audience.finished(outcome)
        else:
            self.audience.failed(outcome)

    def _fail(self, error: FairwayError) -> None:
        self.phase = Phase.OVER
        self.audience.failed(error)

    # --- clients that leave ------------------------------------------------------------------------

    def _left(self, follower: Follower, withdrawn: bool) -> None:
        self._departed(follower)
        if len(self.audience) or self.phase is Phase.OVER:
            return
        if self.phase is Phase.FOLLOWING:
            self._drop_if_alone()
        else:
            self._start_grace(0.0 if withdrawn or not self.audience.whole else None)

    def _drop_if_alone(self) -> None:
        """Nobody here follows what runs elsewhere: there is nothing to do."""
        if not len(self.audience) and self._task is not None:
            self._stopped = self._stopped or RequestCancelled("the request was cancelled")
            self._task.cancel()

    def _start_grace(self, seconds: float | None = None) -> None:
        self._stop_grace()
        wait_s = self._ports.limits.detach_grace_s if seconds is None else seconds
        self._grace = asyncio.get_running_loop().call_later(wait_s, self._grace_over)

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _grace_over(self) -> None:
        """End a request that nobody came back to, unless somebody follows it by way of another gateway."""
        if self.phase is Phase.CLAIMING or self._ports.clock.monotonic_s() < self._watched_until_s:
            self._start_grace(1.0)
        elif self._request is not None:
            self._request.cancel(RequestCancelled("the client left and did not come back"))

    # --- the record, written behind the run --------------------------------------------------------

    def due(self, now_s: float) -> bool:
        """Whether the flusher has something to write."""
        if self.hold is None or not self._quiet.is_set():
            return False
        renewal = now_s - self._written_s >= self._ports.limits.renew_s
        return renewal or (self.audience.whole and bool(self.audience.log.unrecorded(all_of_it=False)))

    def begin_write(self) -> tuple[Addition, dict[int, list[Piece]]]:
        """Return what to append now. ``end_write`` must follow: until then the record is not ended."""
        assert self.hold is not None
        self._quiet.clear()
        pieces = self.audience.log.unrecorded(all_of_it=False) if self.audience.whole else {}
        return Addition(self.hold, encode(outputs(pieces))), pieces

    def end_write(self, pieces: dict[int, list[Piece]], answer: Written | None) -> None:
        """Note what became of a write; None: the store did not answer, and it is tried again."""
        self._quiet.set()
        if answer is None:
            return
        now_s = self._written_s = self._ports.clock.monotonic_s()
        if answer in (Written.KEPT, Written.WATCHED):
            self.audience.log.recorded(pieces)
            if answer is Written.WATCHED:
                self._watched_until_s = now_s + WATCHED_S
        elif answer is Written.TOO_LARGE:
            self.outgrow()
        elif answer is Written.FENCED:
            self._fenced = True
            if self._request is not None:
                self._request.cancel()
        # GONE: the store lost its data. The clients are served on; a retry elsewhere runs anew.

    def outgrow(self) -> None:
        """Keep the whole output no more: nobody else can come, so it ends with its clients."""
        self.audience.shorten()
        if not len(self.audience):
            self._start_grace(0.0)

    def tend(self) -> None:
        """Give credit for what the clients of an output that is not kept took."""
        if not self.audience.whole:
            self.audience.shorten()
            for choice in list(self.audience.log.choices):
                self._credit(choice)

    def _credit(self, choice: int) -> None:
        taken, credited = self.audience.taken(choice), self._credited.get(choice, 0)
        if taken > credited and self._request is not None:
            self._credited[choice] = taken
            self._request.credit(choice, taken - credited)

    # --- RequestSink -------------------------------------------------------------------------------

    def on_accepted(self, accepted: Accepted) -> None:
        """The clients heard it when it was recorded."""

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        chars = self._chars.get(choice, 0)
        self._chars[choice] = chars + len(text)
        if choice not in self._credited:
            self._credited[choice] = offset
        self.audience.put(choice, Piece(Place(offset, chars), ids, text, logprobs))
        self._credit(choice)

    def on_finished(self, finished: Finished) -> None:
        self._outcome = finished

    def on_failed(self, error: FairwayError) -> None:
        self._outcome = error

    def note(self, reservation: Reservation, usage: Usage) -> None:
        """Keep what is to be settled: it is, together with the record."""
        self._settled = (reservation, usage)
