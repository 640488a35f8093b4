"""The output so far of one request with an idempotency key, in memory: the source for followers and the
record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.core.errors import IntegrityError
from services.core.generation import TokenLogprobs
from services.gateway.idempotency.record_codec import Output, logprobs_in

_ENTRY_BYTES: Final = 120
_TOKEN_BYTES: Final = 16
_LOGPROBS_BYTES: Final = 100


class Diverged(Exception):
    """A run produced other output than the run that it continues.

    Where the arithmetic is exact this does not happen; elsewhere two candidates may be nearly equal.
    """


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in the output of a choice: tokens and characters before it.

    Text may follow the last token without a token of its own.
    """

    tokens: int = 0
    chars: int = 0


START: Final = Place()


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive output of one choice, from ``at`` to ``end``."""

    at: Place
    ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs]

    @property
    def end(self) -> Place:
        return Place(self.at.tokens + len(self.ids), self.at.chars + len(self.text))

    @property
    def size_bytes(self) -> int:
        """The estimated memory size."""
        tops = sum(1 + len(each.top_ids) for each in self.logprobs)
        return _ENTRY_BYTES + _TOKEN_BYTES * len(self.ids) + len(self.text) + _LOGPROBS_BYTES * tops

    def beyond(self, place: Place) -> Piece:
        """Return the part of the piece beyond a place within it."""
        if place <= self.at:
            return self
        skip = max(0, place.tokens - self.at.tokens)
        text = self.text[max(0, place.chars - self.at.chars) :]
        return Piece(place, self.ids[skip:], text, self.logprobs[skip:])

    def first(self, tokens: int) -> Piece:
        """Return its first tokens. The text is attached to the last token: its split by token is unknown."""
        if tokens >= len(self.ids):
            return self
        return Piece(self.at, self.ids[:tokens], "", self.logprobs[:tokens])


@dataclass(slots=True)
class ChoiceLog:
    """Consecutive pieces of one choice; ``recorded`` is the position up to which the record has them."""

    pieces: list[Piece] = field(default_factory=list)
    end: Place = START
    recorded: Place = START
    size_bytes: int = 0

    def put(self, piece: Piece) -> bool:
        """Add a piece; return whether it has new output. Repeated output must be equal. Raises Diverged."""
        if piece.at.tokens > self.end.tokens:
            raise IntegrityError(f"received token {piece.at.tokens}, expected token {self.end.tokens}")
        if piece.at.tokens < self.end.tokens:
            self._compare(piece)
        if piece.at < self.end:
            if piece.end <= self.end:
                return False
            piece = piece.beyond(self.end)
        self.pieces.append(piece)
        self.end = piece.end
        self.size_bytes += piece.size_bytes
        return True

    def pieces_from(self, place: Place) -> Iterator[Piece]:
        """Yield the output beyond a place."""
        first = bisect_right(self.pieces, place, key=_end)
        for index in range(first, len(self.pieces)):
            yield self.pieces[index].beyond(place)

    def next_piece(self, place: Place) -> Piece | None:
        return next(self.pieces_from(place), None)

    def trim(self, place: Place) -> None:
        """Drop the pieces before a place."""
        keep = bisect_right(self.pieces, place, key=_end)
        self.size_bytes -= sum(piece.size_bytes for piece in self.pieces[:keep])
        del self.pieces[:keep]

    def cut(self, place: Place) -> None:
        """Drop the output beyond a place."""
        kept = bisect_right(self.pieces, place, key=_end)
        after = self.pieces[kept:]
        self.size_bytes -= sum(piece.size_bytes for piece in after)
        del self.pieces[kept:]
        if after and after[0].at.tokens < place.tokens:
            head = after[0]
            text = head.text[: place.chars - head.at.chars]
            ids = place.tokens - head.at.tokens
            self.pieces.append(Piece(head.at, head.ids[:ids], text, head.logprobs[:ids]))
            self.size_bytes += self.pieces[-1].size_bytes
        self.end = place

    def ids(self, place: Place) -> tuple[int, ...]:
        """Return the tokens before a place."""
        found = [token for piece in self.pieces for token in piece.ids]
        return tuple(found[: place.tokens])

    def text(self, place: Place) -> str:
        """Return the text before a place."""
        return "".join([piece.text for piece in self.pieces])[: place.chars]

    def unrecorded(self, *, all_of_it: bool) -> list[Piece]:
        """Return what the record lacks; the last piece with tokens only with ``all_of_it``.

        The last token of that piece may end the choice: a run that resumed behind it would continue beyond
        the end. So the record receives it with the next piece, or with the end.
        """
        found = list(self.pieces_from(self.recorded))
        if all_of_it:
            return found
        while found and not found[-1].ids:
            found.pop()
        return found[:-1]

    def _compare(self, piece: Piece) -> None:
        """Retained ids must be equal; trimmed output is not compared."""
        known = bisect_right(self.pieces, piece.at.tokens, key=_end_tokens)
        for index in range(known, len(self.pieces)):
            held = self.pieces[index]
            start, end = max(held.at.tokens, piece.at.tokens), min(held.end.tokens, piece.end.tokens)
            if start > end:  # equal for text without tokens
                return
            mine = held.ids[start - held.at.tokens : end - held.at.tokens]
            theirs = piece.ids[start - piece.at.tokens : end - piece.at.tokens]
            if list(mine) != list(theirs):
                raise Diverged(f"the output differs at token {start} or after")


class RecordLog:
    """The logs of all choices of a request."""

    def __init__(self) -> None:
        self.choices: dict[int, ChoiceLog] = {}

    @property
    def size_bytes(self) -> int:
        return sum(choice.size_bytes for choice in self.choices.values())

    def choice(self, choice: int) -> ChoiceLog:
        found = self.choices.get(choice)
        if found is None:
            found = self.choices[choice] = ChoiceLog()
        return found

    def unrecorded(self, *, all_of_it: bool) -> dict[int, list[Piece]]:
        return {
            number: pieces
            for number, choice in self.choices.items()
            if (pieces := choice.unrecorded(all_of_it=all_of_it))
        }

    def recorded(self, written: dict[int, list[Piece]]) -> None:
        """The record has these pieces now."""
        for number, pieces in written.items():
            self.choices[number].recorded = pieces[-1].end


def outputs(pieces: dict[int, list[Piece]]) -> Iterable[Output]:
    """Yield pieces as entries of a record; consecutive pieces form one entry."""
    for choice, found in pieces.items():
        yield Output(
            choice,
            found[0].at.tokens,
            found[0].at.chars,
            [token for piece in found for token in piece.ids],
            "".join(piece.text for piece in found),
            logprobs_in([each for piece in found for each in piece.logprobs]),
        )


def _end(piece: Piece) -> Place:
    return piece.end


def _end_tokens(piece: Piece) -> int:
    return piece.at.tokens + len(piece.ids)
