"""Reads a record into an audience: what another gateway wrote of a request, or this one before."""

from __future__ import annotations

from collections.abc import Iterable

from services.core.errors import FairwayError
from services.gateway.audience import Audience
from services.gateway.events import Finished
from services.gateway.record_codec import (
    End,
    Failure,
    Output,
    Pin,
    Resumed,
    decode,
    end_out,
    logprobs_out,
)
from services.gateway.record_log import START, Piece, Place
from services.rpc.status import by_reason


class RecordReader:
    """Where it is in the log, and what it found. ``pinned``: the record says what was accepted."""

    def __init__(self, audience: Audience) -> None:
        self._audience = audience
        self.restart()

    def restart(self) -> None:
        """Read from the beginning. What the audience has already is compared, and not said twice."""
        self.chunks = 0
        self.resumes = 0
        self.pinned = False
        self.end: Finished | FairwayError | None = None
        for choice in self._audience.log.choices.values():
            choice.recorded = START

    def take(self, chunks: Iterable[bytes]) -> None:
        """Take the next chunks. Raises IntegrityError for what is none."""
        for chunk in chunks:
            for entry in decode(chunk):
                self._take(entry)
            self.chunks += 1

    def _take(self, entry: Pin | Resumed | Output | End | Failure) -> None:
        if isinstance(entry, Output):
            at = Place(entry.offset, entry.chars)
            piece = Piece(at, entry.ids, entry.text, logprobs_out(entry.logprobs))
            self._audience.put(entry.choice, piece)
            choice = self._audience.log.choice(entry.choice)
            choice.recorded = max(choice.recorded, piece.end, key=lambda place: place.tokens)
        elif isinstance(entry, Pin):
            self.pinned = True
            self._audience.accept(entry, fresh=False)
        elif isinstance(entry, Resumed):
            self.resumes += 1
        elif isinstance(entry, End):
            self.end = end_out(entry)
        else:
            self.end = by_reason(entry.reason, entry.message)
            self.end.metadata = dict(entry.metadata)
