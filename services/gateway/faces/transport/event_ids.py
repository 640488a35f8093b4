"""Ids of server-sent events: what a client has of an answer under an idempotency key.

An id is the place after its event, in MessagePack, with a keyed hash over it, the tenant, the key and the
form of the answer. So any gateway can continue behind any event, and another answer's id is refused before
anything runs. The place is a count: of the events of an answer with one choice, and of the tokens of each
choice of completions, whose choices arrive in any order.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib
from typing import Final

import msgspec

from services.core.errors import InvalidInput
from services.gateway.events import Delivered, DeliveredChoice, Tokens, request_tag
from services.gateway.faces.openai.exchange import Exchange
from services.gateway.faces.openai.requests import ApiRequest
from services.gateway.idempotency.followers import broken

HEADER: Final = "last-event-id"
_MAC_BYTES: Final = 8
_MAX_CHARS: Final = 16_384
_encode: Final = msgspec.msgpack.Encoder().encode


class EventSeal:
    """Makes ids of positions in one answer, and takes those of no other: ``context`` names the answer."""

    def __init__(self, secret: bytes, context: bytes) -> None:
        self._key = secret[: hashlib.blake2b.MAX_KEY_SIZE]
        self._context = context

    def close(self, position: bytes) -> bytes:
        """Return the id of a position."""
        return base64.urlsafe_b64encode(self._mac(position) + position).rstrip(b"=")

    def open(self, event_id: str) -> bytes:
        """Return the position of an id. Raises InvalidInput unless it is one of this answer."""
        padded = event_id + "=" * (-len(event_id) % 4)
        try:
            data = base64.b64decode(padded, b"-_", validate=True) if len(event_id) <= _MAX_CHARS else b""
        except ValueError:
            data = b""
        mac, position = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(position)):
            raise InvalidInput("last-event-id is not of this request", field=HEADER)
        return position

    def _mac(self, position: bytes) -> bytes:
        return hashlib.blake2b(
            self._context + position, digest_size=_MAC_BYTES, key=self._key, person=b"fairway event id"
        ).digest()


class EventIds:
    """Writes the ids of the events of one answer. Without a seal its events have none."""

    def __init__(self, seal: EventSeal | None) -> None:
        self._seal = seal

    def delivered(self, number: int = 0) -> Delivered | None:
        """Return what the client has of a generation; None: nothing."""
        return None

    def on_accepted(self, number: int, request_id: str) -> None:
        """The generation was accepted, before any event of it is counted."""

    def id_line(self) -> bytes:
        """Return the line with the id of the event that was counted last; empty without ids."""
        return b"" if self._seal is None else b"id: " + self._seal.close(_encode(self._place())) + b"\n"

    def _place(self) -> msgspec.Struct:
        """Return the place behind the event that was counted last."""
        raise NotImplementedError


class EventNumbers(EventIds):
    """Counts the events of one answer with one choice; the client has those up to the number ``after``.

    A number depends only on the output: an event counts one, and a delta as many as it has characters. So a
    stream that is read again, on any gateway, has the same numbers however its output is split into deltas.
    """

    def __init__(self, *, after: int = -1, with_ids: bool = False, seal: EventSeal | None = None) -> None:
        """``with_ids``: the number is also the id of the server-sent event."""
        super().__init__(seal)
        self.number = -1
        self._after = after
        self._with_ids = with_ids

    def counts(self, mark: str) -> bool:
        """Count an event, which ``mark`` describes. Return whether the client lacks it."""
        self._pass(mark.encode(), 1)
        return self.number > self._after

    def rest(self, text: str) -> str:
        """Count a delta. Return what the client lacks of it. Raises StreamBroken for other output."""
        had = min(max(self._after - self.number, 0), len(text))
        for part in (text[:had], text[had:]):
            if part:
                self._pass(part.encode(), len(part))
        return text[had:]

    def end(self, mark: str) -> bool:
        """Count the last event, which every client lacks. Raises StreamBroken for other output."""
        self.number = max(self.number, self._after)
        return self.counts(mark)

    def fail(self) -> None:
        """Count an event of an error, which every client lacks."""
        self.end("")

    def id_line(self) -> bytes:
        return b"id: %d\n" % self.number if self._with_ids else super().id_line()

    def _pass(self, data: bytes, count: int) -> None:
        self.number += count


class _Place(msgspec.Struct, array_like=True):
    """The tag of the request, the number of the last event, and a CRC-32 of the events up to it."""

    request: bytes
    number: int
    checksum: int


_decode: Final = msgspec.msgpack.Decoder(_Place).decode


class KeyedEventNumbers(EventNumbers):
    """The numbers of an answer under an idempotency key. Its ids are sealed and name the output so far.

    What follows an id is sent only to a client that has the same output before it.
    """

    def __init__(self, seal: EventSeal, event_id: str) -> None:
        """Continue behind an event, or begin where its id is empty. Raises InvalidInput for another id."""
        self._had = _decode(seal.open(event_id)) if event_id else _Place(b"", -1, 0)
        super().__init__(after=self._had.number, seal=seal)
        self._request = b""
        self._checksum = 0
        self._failed = False

    def delivered(self, number: int = 0) -> Delivered | None:
        return Delivered(self._had.request, ()) if self._had.request else None

    def on_accepted(self, number: int, request_id: str) -> None:
        self._request = request_tag(request_id)

    def end(self, mark: str) -> bool:
        lacks = self.counts(mark)
        if self.number < self._after:
            raise broken("its output is shorter than what was sent")
        return lacks

    def fail(self) -> None:
        """Count an event of an error, which has no id: what follows it on a retry is the output."""
        self.number, self._failed = max(self.number, self._after) + 1, True

    def id_line(self) -> bytes:
        return b"" if self._failed else super().id_line()

    def _pass(self, data: bytes, count: int) -> None:
        super()._pass(data, count)
        self._checksum = zlib.crc32(data, self._checksum)
        if self.number == self._after and self._checksum != self._had.checksum:
            raise broken("its output differs from what was sent")

    def _place(self) -> _Place:
        return _Place(self._request, self.number, self._checksum)


def keyed_numbers(exchange: Exchange, secret: bytes, form: str, *, stream: bool) -> EventNumbers:
    """Return the numbers of an answer in a form, behind the event that its client names.

    ``secret`` keys the ids. Raises InvalidInput for an id of another answer, and without a key or stream.
    """
    key = exchange.headers.idempotency_key()
    event_id = event_id_of(exchange, key, stream=stream)
    if not (stream and key):
        return EventNumbers()
    return KeyedEventNumbers(answer_seal(secret, exchange.caller.tenant_id, key, form), event_id)


def event_id_of(exchange: Exchange, key: str, *, stream: bool) -> str:
    """Return the id that a client names; empty without one. Raises InvalidInput where an answer has none."""
    event_id = exchange.headers.last_event_id()
    if event_id and not (stream and key):
        raise InvalidInput(
            f"{HEADER} continues a stream with an idempotency key; send it with both, or not at all",
            field=HEADER,
        )
    return event_id


class _Choice(msgspec.Struct, array_like=True):
    tokens: int = 0
    chars: int = 0
    checksum: int = 0
    # Characters of the tokens' own texts, which log probabilities refer to.
    token_chars: int = 0


class _Part(msgspec.Struct, array_like=True):
    """Of one generation: the tag of its request, frames of roles and of ends, and output by choice."""

    request: bytes
    roles: int
    ends: int
    choices: list[_Choice]


class _Position(msgspec.Struct, array_like=True):
    """``tail``: frames after the last choice's end."""

    parts: list[_Part]
    tail: int


_position: Final = msgspec.msgpack.Decoder(_Position).decode


class AnswerPosition(EventIds):
    """The ids of completions. The stream advances the position before it writes an event."""

    def __init__(self, request: ApiRequest, secret: bytes, tenant_id: str, event_id: str) -> None:
        """Continue behind an event, or begin where its id is empty. A request without a key has no ids.

        Raises InvalidInput for an id of another answer.
        """
        key = request.generations[0].idempotency_key if request.generations else ""
        seal = EventSeal(secret, _context_of(request, tenant_id, key)) if key else None
        super().__init__(seal)
        if seal is not None and event_id:
            self._position = _position(seal.open(event_id))
        else:
            self._position = _Position(
                [_Part(b"", 0, 0, [_Choice() for _ in range(request.choices)]) for _ in request.generations],
                0,
            )

    def delivered(self, number: int = 0) -> Delivered | None:
        part = self._position.parts[number]
        if not part.request:
            return None
        choices = (DeliveredChoice(each.tokens, each.chars, each.checksum) for each in part.choices)
        return Delivered(part.request, tuple(choices))

    @property
    def tail(self) -> int:
        return self._position.tail

    def roles(self, number: int) -> int:
        return self._position.parts[number].roles

    def ends(self, number: int) -> int:
        return self._position.parts[number].ends

    def tokens(self, number: int, choice: int) -> tuple[int, int]:
        """Return the tokens of a choice, and the characters of their own texts."""
        found = self._position.parts[number].choices[choice]
        return found.tokens, found.token_chars

    def on_accepted(self, number: int, request_id: str) -> None:
        self._position.parts[number].request = request_tag(request_id)

    def on_role(self, number: int) -> None:
        self._position.parts[number].roles += 1

    def on_tokens(self, number: int, event: Tokens) -> None:
        if self._seal is None:
            return
        choice = self._position.parts[number].choices[event.choice]
        found = DeliveredChoice(choice.tokens, choice.chars, choice.checksum).after(event.ids, event.text)
        choice.tokens, choice.chars, choice.checksum = found.tokens, found.chars, found.checksum
        choice.token_chars += sum(len(entry.text) for entry in event.logprobs)

    def on_end(self, number: int) -> None:
        self._position.parts[number].ends += 1

    def on_tail(self) -> None:
        self._position.tail += 1

    def _place(self) -> _Position:
        return self._position


def answer_seal(secret: bytes, tenant_id: str, idempotency_key: str, form: str) -> EventSeal:
    """Return the seal of the answer to a key in a form, of a dialect with one answer per request."""
    return EventSeal(secret, _encode((tenant_id, idempotency_key, form)))


def _context_of(request: ApiRequest, tenant_id: str, key: str) -> bytes:
    """Return what must be equal for an id to be of the same answer."""
    usage = (request.include_usage, request.continuous_usage)
    form = (request.dialect, request.choices, len(request.generations), *usage)
    # The context without echo is that of gateways of the preceding release, so their ids stay valid.
    echo = (True,) if request.echo else ()
    return _encode((tenant_id, key, form, request.logprobs, request.stage_clock, *echo))
