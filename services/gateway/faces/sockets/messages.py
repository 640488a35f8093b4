"""The messages of a WebSocket, as JSON texts. Those of a request have the id that its client gave it.

A request has the path, the headers and the body that it has over HTTP. Its answer is whole, ``answer``, or a
stream: ``started``, an ``event`` per server-sent event with the same data and the same id, and ``end``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import msgspec

from services.core.errors import FairwayError, InvalidInput
from services.gateway.faces.openai.errors import Header, HttpProblem, error_body
from services.gateway.faces.openai.types import check_json_cost

MAX_HEADER_BYTES: Final = 32 * 1024
_ID: Final = re.compile(r"[\x21-\x7e]{1,64}")
_encode: Final = msgspec.json.Encoder().encode


class SocketRequest(msgspec.Struct, tag="request", forbid_unknown_fields=True):
    """``headers`` are those of the HTTP request by lower-case name, except its credentials."""

    id: str
    path: str
    body: msgspec.Raw
    headers: dict[str, str] = {}

    def pairs(self, allowed: Collection[str]) -> list[Header]:
        """Return the headers. Raises InvalidInput."""
        pairs: list[Header] = []
        for name, value in self.headers.items():
            if name not in allowed:
                raise InvalidInput("headers: one of them is not offered here", field="headers")
            if not value.isascii() or not value.isprintable():
                raise InvalidInput(f"headers.{name} must be visible ASCII", field=f"headers.{name}")
            pairs.append((name.encode(), value.encode()))
        if sum(len(name) + len(value) for name, value in pairs) > MAX_HEADER_BYTES:
            raise InvalidInput(f"headers have more than {MAX_HEADER_BYTES} bytes", field="headers")
        return pairs


class SocketCancel(msgspec.Struct, tag="cancel", forbid_unknown_fields=True):
    """Ends the request of this id, if there is one. One with an idempotency key is withdrawn."""

    id: str


_decode: Final[Callable[[bytes], SocketRequest | SocketCancel]] = msgspec.json.Decoder(
    SocketRequest | SocketCancel
).decode


def socket_message(data: bytes) -> SocketRequest | SocketCancel:
    """Return a client's message. Raises InvalidInput."""
    check_json_cost(data)
    try:
        message = _decode(data)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the message is not of this protocol: {error}"[:200]) from None
    except (msgspec.DecodeError, RecursionError):
        raise InvalidInput("the message is not valid JSON") from None
    if not _ID.fullmatch(message.id):
        raise InvalidInput("id must be 1 to 64 visible ASCII characters", field="id")
    return message


def started_message(name: str, headers: Iterable[Header]) -> bytes:
    return b'{"type":"started","id":%b,"headers":%b}' % (_encode(name), _headers(headers))


def event_messages(name: str, frames: bytes) -> Iterator[bytes]:
    """Yield a message for each of these whole server-sent events. Comments are left out."""
    for frame in frames.split(b"\n\n"):
        fields = dict(line.partition(b": ")[::2] for line in frame.split(b"\n") if line)
        data = fields.get(b"data")
        if data is None:
            continue
        head = b'{"type":"event","id":' + _encode(name)
        for field, shown in ((b"id", b"event_id"), (b"event", b"event")):
            if field in fields:
                head += b',"%b":"%b"' % (shown, fields[field])
        yield b'%b,"data":%b}' % (head, data if data.startswith(b"{") else _encode(data.decode()))


def answer_message(name: str, status: int, headers: Iterable[Header], body: bytes) -> bytes:
    parts = (_encode(name), status, _headers(headers), body)
    return b'{"type":"answer","id":%b,"status":%d,"headers":%b,"data":%b}' % parts


def end_message(name: str, *, complete: bool) -> bytes:
    """``complete``: whether the stream has all its events. Otherwise the request was cancelled or cut."""
    return b'{"type":"end","id":%b,"complete":%b}' % (_encode(name), b"true" if complete else b"false")


def error_message(error: FairwayError) -> bytes:
    """Return the last message before a close for a fault of the client."""
    return b'{"type":"error",' + error_body(error)[1:]


def unknown_path(paths: Collection[str]) -> HttpProblem:
    return HttpProblem(404, "there is nothing at this path for a WebSocket; use " + ", ".join(sorted(paths)))


_FRAMING: Final = (b"content-type", b"content-length", b"cache-control", b"x-accel-buffering", b"connection")


def _headers(headers: Iterable[Header]) -> bytes:
    return _encode({key.decode(): value.decode("latin-1") for key, value in headers if key not in _FRAMING})
