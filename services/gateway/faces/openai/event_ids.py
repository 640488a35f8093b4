"""Ids of server-sent events: what a client has of an answer under an idempotency key.

An id is the position after its event, in MessagePack, with a keyed hash over it, the tenant, the key and the
form of the answer. So any gateway can continue behind any event, and another answer's id is refused before
anything runs.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

import msgspec

from services.core.errors import InvalidInput
from services.gateway.events import Delivered, DeliveredChoice, Tokens, request_tag
from services.gateway.faces.openai.requests import ApiRequest

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


_decode: Final = msgspec.msgpack.Decoder(_Position).decode


class AnswerPosition:
    """What the client of one streamed answer has. The stream advances it before it writes an event."""

    def __init__(self, request: ApiRequest, secret: bytes, tenant_id: str) -> None:
        self._seal = EventSeal(secret, _context_of(request, tenant_id))
        self._position = _Position(
            [_Part(b"", 0, 0, [_Choice() for _ in range(request.choices)]) for _ in request.generations], 0
        )

    def resume(self, event_id: str) -> None:
        """Continue behind an event. Raises InvalidInput unless it is one of this answer."""
        self._position = _decode(self._seal.open(event_id))

    @property
    def tail(self) -> int:
        return self._position.tail

    def event_id(self) -> bytes:
        return self._seal.close(_encode(self._position))

    def delivered(self, number: int) -> Delivered | None:
        """Return what the client has of a generation; None: nothing."""
        part = self._position.parts[number]
        if not part.request:
            return None
        choices = (DeliveredChoice(each.tokens, each.chars, each.checksum) for each in part.choices)
        return Delivered(part.request, tuple(choices))

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
        choice = self._position.parts[number].choices[event.choice]
        found = DeliveredChoice(choice.tokens, choice.chars, choice.checksum).after(event.ids, event.text)
        choice.tokens, choice.chars, choice.checksum = found.tokens, found.chars, found.checksum
        choice.token_chars += sum(len(entry.text) for entry in event.logprobs)

    def on_end(self, number: int) -> None:
        self._position.parts[number].ends += 1

    def on_tail(self) -> None:
        self._position.tail += 1


def without_stream() -> InvalidInput:
    """Return the error for an id in a request whose answer has none."""
    return InvalidInput(
        f"{HEADER} continues a stream with an idempotency key; send it with both, or not at all", field=HEADER
    )


def answer_seal(secret: bytes, tenant_id: str, idempotency_key: str, form: str) -> EventSeal:
    """Return the seal of the answer to a key in a form, of a dialect with one answer per request."""
    return EventSeal(secret, _encode((tenant_id, idempotency_key, form)))


def _context_of(request: ApiRequest, tenant_id: str) -> bytes:
    """Return what must be equal for an id to be of the same answer."""
    key = request.generations[0].idempotency_key if request.generations else ""
    usage = (request.include_usage, request.continuous_usage)
    form = (request.dialect, request.choices, len(request.generations), *usage)
    # The context without echo is that of gateways of the preceding release, so their ids stay valid.
    echo = (True,) if request.echo else ()
    return _encode((tenant_id, key, form, request.logprobs, request.stage_clock, *echo))
