"""This gateway's ownership of one record: the sink and the settlement of the request that runs for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from msgspec.structs import replace

from services.core.errors import FairwayError, StoreUnavailable
from services.core.generation import NO_USAGE, TokenLogprobs, Usage
from services.core.usage import RequestUsage
from services.gateway.events import Accepted, Finished
from services.gateway.idempotency.followers import too_large
from services.gateway.idempotency.record_codec import (
    AcceptedTerms,
    Resumed,
    encode,
    end_in,
    failure_in,
)
from services.gateway.idempotency.record_log import Piece, Place, outputs
from services.gateway.idempotency.record_reader import EarlierRun, RecordReader
from services.gateway.idempotency.telemetry import EndingOutcome
from services.gateway.idempotency.types import KeyedPorts
from services.gateway.policy.retry import ends_record
from services.gateway.requests.request import Admit, Request
from services.gateway.requests.terms import Charge
from services.ports.idempotency import Addition, Hold, Written
from services.ports.limiter import Reservation

log = structlog.get_logger()

# How long one sign of a follower at another gateway counts.
WATCHED_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Ending:
    """The last write to a record. ``ended``: it is final; otherwise another run may continue from there."""

    hold: Hold
    chunk: bytes
    # The slot and the usage of a request that was admitted.
    reservation: Reservation | None
    event: RequestUsage | None
    ended: bool

    @property
    def usage(self) -> Usage:
        """The usage that is settled."""
        return self.event.usage if self.event is not None else NO_USAGE


class RecordOwnership:
    """What wraps the request while it runs here: its sink, which the flusher writes, and its settlement.

    ``fenced``: another gateway owns the record, and this gateway's results no longer count. ``pending_end``:
    the end that the store has not accepted yet.
    """

    def __init__(
        self, hold: Hold, ports: KeyedPorts, reader: RecordReader, stop_retaining: Callable[[], None]
    ) -> None:
        """``stop_retaining`` is called when the record stops retaining the output."""
        self.hold = hold
        self.fenced = False
        self.pending_end: Ending | None = None
        self.watched_until_s = 0.0
        self.request: Request | None = None
        self._ports = ports
        self._reader = reader
        self._broadcast = reader.broadcast
        self._stop_retaining = stop_retaining
        self._written_s = ports.clock.monotonic_s()
        self._open = True
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._chars: dict[int, int] = {}
        self._credited: dict[int, int] = {}
        self._accepted = False  # whether this run recorded the acceptance

    def start(self, request: Request, earlier: EarlierRun | None) -> None:
        """The request runs; each choice continues after its output of the earlier run."""
        self.request = request
        if earlier is not None:
            self._chars = {choice: found.chars for choice, found in enumerate(earlier.produced)}

    # --- Settlement --------------------------------------------------------------------------------

    async def accept(self, terms: AcceptedTerms) -> None:
        """Record the acceptance, or that of an earlier run, then send it to the clients.

        A second call, or one with another version, replaces the acceptance of a request without output, whose
        version was withdrawn. Raises StoreUnavailable, also when the ownership is fenced.
        """
        fresh = self._broadcast.terms is None or self._accepted
        earlier = None if self._accepted else self._broadcast.terms
        if earlier is not None and earlier.version_digest != terms.version_digest:
            earlier = None
        terms = earlier or terms
        entry = Resumed() if self._reader.has_terms and earlier is not None else terms
        (answer,) = await self._ports.store.append([Addition(self.hold, encode([entry]))])
        if answer in (Written.FENCED, Written.GONE):
            self.fenced = True
            raise StoreUnavailable("another gateway took the request over", retry_after_s=0.1)
        if answer is Written.TOO_LARGE:
            self._broadcast.shorten()
        self._accepted = True
        self._reader.resumes += 0 if fresh else 1
        self._broadcast.accept(terms, fresh=fresh)

    async def finish(self, end: Finished | FairwayError, charge: Charge | None) -> Finished | FairwayError:
        """Write the record's end and the settlement in one step, unless another gateway owns the record.

        Returns the end, with the resumes of earlier runs.
        """
        await self.close()
        if isinstance(end, Finished):
            end = replace(end, resumes=end.resumes + self._reader.resumes)
        if not self.fenced:
            ended = isinstance(end, Finished) or (self._broadcast.terms is not None and ends_record(end))
            chunk = self._last_chunk(end, ended=ended)
            reservation, event = charge or (None, None)
            await self._write(Ending(self.hold, chunk, reservation, event, ended))
        if self.fenced:
            log.info("idempotency.fenced", record=self.hold.key.digest[:12])
            self._ports.telemetry.ending(EndingOutcome.FENCED)
        return end

    # --- the record, written behind the run --------------------------------------------------------

    def due(self, now_s: float) -> bool:
        """Whether the flusher has something to write."""
        if not (self._open and self._quiet.is_set()):
            return False
        renewal = now_s - self._written_s >= self._ports.limits.renew_s
        return renewal or (self._broadcast.whole and bool(self._broadcast.log.unrecorded(all_of_it=False)))

    def begin_write(self) -> tuple[Addition, dict[int, list[Piece]]]:
        """Return what to append now. ``end_write`` must follow: until then the record is not ended."""
        pieces = self._broadcast.log.unrecorded(all_of_it=False) if self._broadcast.whole else {}
        addition = Addition(self.hold, encode(outputs(pieces)))
        self._quiet.clear()
        return addition, pieces

    def end_write(self, pieces: dict[int, list[Piece]], answer: Written | None) -> None:
        """Apply the result of a write; None: the store did not answer, and the write is retried."""
        self._quiet.set()
        if answer is None:
            return
        now_s = self._written_s = self._ports.clock.monotonic_s()
        if answer in (Written.KEPT, Written.WATCHED):
            self._broadcast.log.recorded(pieces)
            if answer is Written.WATCHED:
                self.watched_until_s = now_s + WATCHED_S
        elif answer is Written.TOO_LARGE:
            self._stop_retaining()
        elif answer is Written.FENCED:
            self.fenced = True
            if self.request is not None:
                self.request.cancel()
        # GONE: the store lost its data. The clients are still served; a retry elsewhere runs again.

    async def close(self) -> None:
        """Return once no write is under way; no further write begins."""
        self._open = False
        await self._quiet.wait()

    async def _write(self, ending: Ending) -> None:
        """End or release the record, and settle the request with it."""
        found = EndingOutcome.WRITTEN
        try:
            self.fenced = await write_ending(self._ports, ending) is Written.FENCED
        except StoreUnavailable as error:
            log.warning("idempotency.end_deferred", record=self.hold.key.digest[:12], reason=error.reason)
            self.pending_end, found = ending, EndingOutcome.DEFERRED
            if ending.reservation is not None:  # its usage outlives this process, as any other request's does
                # Spooled: the record may be continued elsewhere, which must find these charges.
                await self._ports.limiter.settle(ending.reservation, ending.usage, spooled=True)
        if self.fenced:
            return
        self._ports.telemetry.ending(found)
        if ending.event is not None:  # the usage counts here: in the record, or settled apart from it
            self._ports.report_usage(ending.event)

    def _last_chunk(self, outcome: Finished | FairwayError, *, ended: bool) -> bytes:
        if self._broadcast.terms is None:
            return b""
        if not self._broadcast.whole:
            return encode([failure_in(too_large())]) if ended else b""
        rest = outputs(self._broadcast.log.unrecorded(all_of_it=ended))
        if not ended:
            return encode(rest)
        last = end_in(outcome) if isinstance(outcome, Finished) else failure_in(outcome)
        return encode([*rest, last])

    # --- RequestSink -------------------------------------------------------------------------------

    def on_accepted(self, accepted: Accepted) -> None:
        """The clients received it when it was recorded."""

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        chars = self._chars.get(choice, 0)
        self._chars[choice] = chars + len(text)
        if choice not in self._credited:
            self._credited[choice] = offset
        self._broadcast.put(choice, Piece(Place(offset, chars), ids, text, logprobs))
        self.credit(choice)

    def on_finished(self, finished: Finished) -> None:
        if not self.fenced:
            self._broadcast.finished(finished)

    def on_failed(self, error: FairwayError) -> None:
        if not self.fenced:
            self._broadcast.failed(error)

    def credit(self, choice: int) -> None:
        """Grant the worker as much more credit as the followers' progress permits."""
        taken, credited = self._broadcast.taken(choice), self._credited.get(choice, 0)
        if taken > credited and self.request is not None:
            self._credited[choice] = taken
            self.request.credit(choice, taken - credited)


# It returns a record's request, from what an earlier run left, whose sink and settlement the ownership is.
Launch = Callable[[RecordOwnership, EarlierRun | None], tuple[Request, Admit]]


async def write_ending(ports: KeyedPorts, ending: Ending) -> Written:
    """Return once the record is ended or released, and the request settled, by its current owner.

    Raises StoreUnavailable; calling it again is safe.
    """
    write = ports.store.finish if ending.ended else ports.store.release
    written = await write(ending.hold, ending.chunk, ending.reservation, ending.usage)
    reservation = ending.reservation
    if reservation is not None and (
        written is Written.GONE or (reservation.local and written is not Written.FENCED)
    ):
        # Without a record it is settled like any other request; the local slot is not in the store. Tokens
        # that the store has charged are not charged again.
        await ports.limiter.settle(reservation, ending.usage)
    return written
