"""Reads a request's record into a broadcast: the output of another gateway, or of an earlier run here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.core.errors import FairwayError, IntegrityError, StoreUnavailable
from services.gateway.events import Finished
from services.gateway.idempotency.followers import FollowerBroadcast, too_large
from services.gateway.idempotency.record_codec import (
    AcceptedTerms,
    End,
    Output,
    RecordedFailure,
    Resumed,
    decode,
    end_out,
    logprobs_out,
)
from services.gateway.idempotency.record_log import START, Piece, Place
from services.gateway.idempotency.types import KeyedPorts
from services.gateway.requests.terms import Produced
from services.ports.idempotency import IdempotencyStore, RecordKey, RecordState
from services.rpc.status import by_reason

# How long a follower waits for an unavailable store.
FOLLOW_PATIENCE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """The result of an earlier run in the record: its acceptance, and its tokens by choice."""

    terms: AcceptedTerms
    produced: tuple[Produced, ...]


class RecordReader:
    """Reads a record into ``broadcast``. ``has_terms``: the record has the acceptance."""

    def __init__(self, broadcast: FollowerBroadcast) -> None:
        self.broadcast = broadcast
        self.restart()

    def restart(self) -> None:
        """Read from the beginning. Output that the broadcast already has is compared, and not sent twice."""
        self.chunks = 0
        self.resumes = 0
        self.has_terms = False
        self.end: Finished | FairwayError | None = None
        for choice in self.broadcast.log.choices.values():
            choice.recorded = START

    def take(self, chunks: Iterable[bytes]) -> None:
        """Take the next chunks. Raises IntegrityError for an invalid chunk."""
        for chunk in chunks:
            for entry in decode(chunk):
                self._take(entry)
            self.chunks += 1

    async def follow(self, ports: KeyedPorts, key: RecordKey) -> bool:
        """Read the growing record until it ends or has no running owner. Returns whether it ended.

        Raises ResultExpired when the record has no log, StoreUnavailable after a long store outage.
        """
        self.restart()
        patience_until_s = ports.clock.monotonic_s() + FOLLOW_PATIENCE_S
        while True:
            try:
                tail = await ports.store.read(key, self.chunks, watch=True)
            except StoreUnavailable:
                if ports.clock.monotonic_s() > patience_until_s:
                    raise
                await ports.clock.sleep(ports.limits.poll_s)
                continue
            patience_until_s = ports.clock.monotonic_s() + FOLLOW_PATIENCE_S
            self.take(tail.chunks)
            if tail.state is RecordState.EXPIRED:
                raise too_large()
            if tail.more:
                continue
            if tail.state is not RecordState.RUNNING:
                return tail.state is RecordState.ENDED
            await ports.clock.sleep(ports.limits.poll_s)

    async def load(self, store: IdempotencyStore, key: RecordKey, chunks: int) -> EarlierRun | None:
        """Take over the first ``chunks`` of a record; return the state from which a run continues.

        Raises ResultExpired when the record has no readable log.
        """
        self.restart()
        while self.chunks < chunks:
            tail = await store.read(key, self.chunks, watch=False)
            if tail.state is RecordState.EXPIRED:
                raise too_large()
            if not tail.chunks:
                self.restart()  # the log was deleted meanwhile: start over, with the same seed
                break
            self.take(tail.chunks)
        terms = self.broadcast.terms
        if terms is None:
            return None
        found = self.broadcast.log.choices
        produced = [Produced()] * (max(found, default=-1) + 1)
        for number, choice in found.items():
            at = choice.recorded
            produced[number] = Produced(choice.ids(at), at.chars, choice.text(at))
        return EarlierRun(terms, tuple(produced))

    def _take(self, entry: AcceptedTerms | Resumed | Output | End | RecordedFailure) -> None:
        if isinstance(entry, Output):
            at = Place(entry.offset, entry.chars)
            piece = Piece(at, entry.ids, entry.text, logprobs_out(entry.logprobs))
            self.broadcast.put(entry.choice, piece)
            choice = self.broadcast.log.choice(entry.choice)
            choice.recorded = max(choice.recorded, piece.end)
        elif isinstance(entry, AcceptedTerms):
            self.has_terms = True
            self.broadcast.accept(entry, fresh=False)
        elif isinstance(entry, Resumed):
            self.resumes += 1
        elif not self.has_terms:
            raise IntegrityError("the record of this idempotency key has no beginning; use another key")
        elif isinstance(entry, End):
            self.end = end_out(entry)
        else:
            self.end = by_reason(entry.reason, entry.message)
            self.end.metadata = dict(entry.metadata)
