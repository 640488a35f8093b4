"""Numbers of the events of one answer; its stream can be continued behind any of them.

A number depends only on the output: an event counts one, and a delta as many as it has characters. So a
stream that is read again, on any gateway, has the same numbers however its output is split into deltas.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from services.gateway.events import Delivered, request_tag
from services.gateway.faces.openai.event_ids import EventSeal, answer_seal, without_stream
from services.gateway.faces.openai.exchange import Exchange
from services.gateway.idempotency.followers import broken


class EventNumbers:
    """Counts the events of one answer; the client has those up to the number ``after``."""

    def __init__(self, *, after: int = -1, with_ids: bool = False) -> None:
        """``with_ids``: the number is also the id of the server-sent event."""
        self.number = -1
        self._after = after
        self._with_ids = with_ids

    @property
    def delivered(self) -> Delivered | None:
        """What the client has: output of a named request, which is read again as a whole; None: nothing."""
        return None

    def on_accepted(self, request_id: str) -> None:
        """The request was accepted, before any event is counted."""

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
        """Return the line with the id of the event that was counted last; empty without ids."""
        return b"id: %d\n" % self.number if self._with_ids else b""

    def _pass(self, data: bytes, count: int) -> None:
        self.number += count


class _Place(msgspec.Struct, array_like=True):
    """The tag of the request, the number of the last event, and a CRC-32 of the events up to it."""

    request: bytes
    number: int
    checksum: int


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Place).decode


class KeyedEventNumbers(EventNumbers):
    """The numbers of an answer under an idempotency key. Its ids are sealed and name the output so far.

    What follows an id is sent only to a client that has the same output before it.
    """

    def __init__(self, seal: EventSeal, event_id: str) -> None:
        """Continue behind an event, or begin where its id is empty. Raises InvalidInput for another id."""
        found = _decode(seal.open(event_id)) if event_id else _Place(b"", -1, 0)
        super().__init__(after=found.number, with_ids=True)
        self._seal = seal
        self._had = found
        self._request = b""
        self._checksum = 0
        self._failed = False

    @property
    def delivered(self) -> Delivered | None:
        return Delivered(self._had.request, ()) if self._had.request else None

    def on_accepted(self, request_id: str) -> None:
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
        if self._failed:
            return b""
        return b"id: " + self._seal.close(_encode(_Place(self._request, self.number, self._checksum))) + b"\n"

    def _pass(self, data: bytes, count: int) -> None:
        super()._pass(data, count)
        self._checksum = zlib.crc32(data, self._checksum)
        if self.number == self._after and self._checksum != self._had.checksum:
            raise broken("its output differs from what was sent")


def keyed_numbers(exchange: Exchange, secret: bytes, form: str, *, stream: bool) -> EventNumbers:
    """Return the numbers of an answer in a form, behind the event that its client names.

    ``secret`` keys the ids. Raises InvalidInput for an id of another answer, and without a key or stream.
    """
    key, event_id = exchange.headers.idempotency_key(), exchange.headers.last_event_id()
    if not (stream and key):
        if event_id:
            raise without_stream()
        return EventNumbers()
    return KeyedEventNumbers(answer_seal(secret, exchange.caller.tenant_id, key, form), event_id)
