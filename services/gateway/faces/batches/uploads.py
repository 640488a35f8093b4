"""Uploads as multipart/form-data, parsed while they arrive: one part of the file is held, whatever its size.

The file's name is text to show. The form has a bound for fields, headers and values, and its file comes once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.core.errors import FairwayError, InvalidInput
from services.gateway.faces.openai.errors import HttpProblem
from services.gateway.faces.openai.exchange import ClientDisconnected, Headers, Receive

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

UPLOAD_TIMEOUT_S: Final = 600.0
# Most bytes of the form without the file's own.
FORM_BYTES: Final = 64 * 1024
MAX_FIELDS: Final = 16
MAX_VALUE_BYTES: Final = 1024
MAX_HEADERS: Final = 8
MAX_HEADER_BYTES: Final = 2048
_FORM: Final = re.compile(rb"multipart/form-data\s*;.*", re.IGNORECASE | re.DOTALL)
_PAYLOAD: Final = "file"
Write = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True)
class Form:
    """The fields of the form and the file's name."""

    values: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    has_file: bool = False


async def read_form(headers: Headers, receive: Receive, write: Write, max_bytes: int) -> Form:
    """Return the form once its file was passed to ``write``, in pieces.

    What ``write`` raises is raised once the rest is read: a client that still sends would lose the answer to
    a reset. Raises HttpProblem, InvalidInput, or ClientDisconnected when the client leaves in the middle.
    """
    content_type = headers.one(b"content-type") or b""
    _, options = parse_options_header(content_type) if _FORM.fullmatch(content_type) else (b"", {})
    if not (boundary := options.get(b"boundary")):
        raise HttpProblem(415, "a file is sent as multipart/form-data", close=True)
    if headers.one(b"content-encoding") not in (None, b"identity"):
        raise HttpProblem(415, "an upload is not compressed", close=True)
    length = headers.one(b"content-length")
    if length is not None and (not length.isdigit() or int(length[:15]) > max_bytes + FORM_BYTES):
        raise HttpProblem(413, f"the file is larger than {max_bytes} bytes", close=True)
    try:
        reader = _FormReader(boundary)
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            await _read(reader, receive, write, max_bytes)
    except FormParserError:
        raise HttpProblem(400, "the form is malformed, or larger than a form may be", close=True) from None
    except TimeoutError:
        raise HttpProblem(408, f"the upload took more than {UPLOAD_TIMEOUT_S:g} s", close=True) from None
    if not reader.form.has_file:
        raise InvalidInput("the form has no file", field="file")
    return reader.form


async def _read(reader: _FormReader, receive: Receive, write: Write, max_bytes: int) -> None:
    size = 0
    more = True
    refusal: FairwayError | None = None
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        data: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(data)
        if size > max_bytes + FORM_BYTES:
            raise HttpProblem(413, f"the file is larger than {max_bytes} bytes", close=True)
        for piece in reader.feed(data):
            if refusal is None:
                try:
                    await write(piece)
                except FairwayError as error:
                    refusal = error
    if refusal is not None:
        raise refusal
    reader.finish()


class _FormReader:
    """Collects a form's fields; ``feed`` returns the bytes of its file."""

    def __init__(self, boundary: bytes) -> None:
        """Raises FormParserError for a boundary that is too long."""
        self.form = Form()
        self._pieces: list[bytes] = []
        self._name = ""
        self._is_file = self._complete = False
        self._fields = 0
        self._header = bytearray()
        self._disposition = bytearray()
        self._value = bytearray()
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": self._header_value,
            "on_header_end": self._header.clear,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finished,
        }
        self._parser = MultipartParser(
            boundary, callbacks, max_header_count=MAX_HEADERS, max_header_size=MAX_HEADER_BYTES
        )

    def feed(self, data: bytes) -> list[bytes]:
        """Raises FormParserError, InvalidInput."""
        if data:
            self._parser.write(data)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """Raises FormParserError unless the form is complete."""
        self._parser.finalize()
        if not self._complete:
            raise FormParserError("the form has no end")

    def _begin(self) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise FormParserError("the form has too many fields")
        self._disposition.clear()
        self._value.clear()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition += data[start:end]

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(bytes(self._disposition))
        if kind != b"form-data" or b"name" not in options:
            raise FormParserError("a field has no name")
        self._name = options[b"name"].decode("utf-8", "replace")
        self._is_file = self._name == _PAYLOAD
        if self._is_file:
            if self.form.has_file:
                raise InvalidInput("the form has more than one file", field="file")
            self.form.has_file = True
            self.form.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(bytes(data[start:end]))
        elif len(self._value) + end - start > MAX_VALUE_BYTES:
            shown = self._name[:64]
            raise InvalidInput(f"{shown} has more than {MAX_VALUE_BYTES} bytes", field=shown)
        else:
            self._value += data[start:end]

    def _end(self) -> None:
        if self._is_file:
            return
        if self._name in self.form.values:
            raise InvalidInput(f"the form has {self._name[:64]!r} twice", field=self._name[:64])
        self.form.values[self._name] = self._value.decode("utf-8", "replace")

    def _finished(self) -> None:
        self._complete = True
