"""Uploads: the file arrives whole whatever the pieces; what is beside it is bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import FairwayError, InvalidInput
from services.gateway.faces.batches.routes import FORM_BYTES, Form, read_form
from services.gateway.faces.openai.errors import HttpProblem
from services.gateway.faces.openai.exchange import ClientDisconnected, Headers

TYPE = b"multipart/form-data; boundary=xx"


def part(name: str, value: bytes, more: str = "", headers: str = "") -> bytes:
    return (
        f'--xx\r\ncontent-disposition: form-data; name="{name}"{more}\r\n{headers}\r\n'.encode()
        + value
        + b"\r\n"
    )


def form_of(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xx--\r\n"


FILE = part("file", b"{}\n", '; filename="a.jsonl"')


async def read(
    body: bytes, *, content_type: bytes | None = TYPE, pieces: int = 1000, most: int = 1000, **more: bytes
) -> tuple[Form, bytes]:
    messages: list[Mapping[str, Any]] = [
        {"type": "http.request", "body": body[start : start + pieces], "more_body": True}
        for start in range(0, len(body), pieces)
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    received = bytearray()
    largest = 0

    async def receive() -> Mapping[str, Any]:
        return messages.pop(0)

    async def write(data: bytes) -> None:
        nonlocal largest
        largest = max(largest, len(data))
        received.extend(data)

    pairs = [(b"content-type", content_type)] if content_type is not None else []
    pairs += [(name.replace("_", "-").encode(), value) for name, value in more.items()]
    form = await read_form(Headers({"headers": pairs}), receive, write, most)
    assert largest <= pieces
    return form, bytes(received)


@given(st.binary(max_size=300), st.integers(1, 50))
async def test_the_file_is_what_was_sent(data: bytes, pieces: int) -> None:
    body = form_of(part("purpose", b"batch"), part("file", data, '; filename="a b.jsonl"'))
    if b"\r\n--xx" in data:
        return
    form, received = await read(body, pieces=pieces)
    assert received == data
    assert (form.values, form.filename, form.has_file) == ({"purpose": "batch"}, "a b.jsonl", True)


async def status_of(body: bytes, **more: Any) -> int:
    try:
        await read(body, **more)
    except HttpProblem as error:
        return error.status if error.close else 0  # bytes may be unread
    except InvalidInput:
        return 400
    return 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (form_of(FILE), 200),
        (b"--xx--\r\n", 400),
        (form_of(part("purpose", b"batch")), 400),
        (form_of(FILE, FILE), 400),
        (form_of(part("purpose", b"a"), part("purpose", b"b"), FILE), 400),
        (form_of(part("purpose", b"x" * 2000), FILE), 400),
        (form_of(*[part(f"f{number}", b"") for number in range(40)], FILE), 400),
        (form_of(part("file", b"x", headers="".join(f"x-{n}: 1\r\n" for n in range(20)))), 400),
        (form_of(part("file", b"x", headers="x: " + "y" * 5000 + "\r\n")), 400),
        (form_of(b"--xx\r\ncontent-type: text/plain\r\n\r\nx\r\n"), 400),
        (FILE[:-10], 400),
        (b"no form at all", 400),
        (form_of(part("file", b"x" * 1001 + b"y" * FORM_BYTES)), 413),
    ],
    ids=[
        "good",
        "empty",
        "no file",
        "two files",
        "field twice",
        "large field",
        "many fields",
        "many headers",
        "large header",
        "no name",
        "cut off",
        "no form",
        "large file",
    ],
)
async def test_hostile_forms(body: bytes, status: int) -> None:
    for pieces in (1, 7, 10_000):
        assert await status_of(body, pieces=pieces) == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": None}, 415),
        ({"content_type": b"application/json"}, 415),
        ({"content_type": b"multipart/form-data"}, 415),
        ({"content_type": b"multipart/form-data; boundary=" + b"x" * 1000}, 400),
        ({"content_encoding": b"gzip"}, 415),
        ({"content_length": b"99999999"}, 413),
        ({"content_length": b"9" * 30}, 413),
    ],
    ids=["none", "json", "no boundary", "long boundary", "gzip", "too long", "huge"],
)
async def test_heads_are_checked_before_a_byte_is_read(headers: dict[str, Any], status: int) -> None:
    assert await status_of(form_of(FILE), **headers) == status


async def test_a_client_that_leaves_ends_the_upload() -> None:
    async def receive() -> Mapping[str, Any]:
        return {"type": "http.disconnect"}

    async def write(_: bytes) -> None: ...

    with pytest.raises(ClientDisconnected):
        await read_form(Headers({"headers": [(b"content-type", TYPE)]}), receive, write, 10)


async def test_an_error_of_the_store_ends_the_upload_once_the_rest_is_read() -> None:
    """A server that closes while its client sends resets the connection, and the answer is lost."""
    form, pieces = form_of(part("file", b"x" * 1000, '; filename="a.jsonl"')), 10
    size = len(form) // pieces + 1
    waiting = [form[start : start + size] for start in range(0, len(form), size)]
    writes = 0

    async def receive() -> Mapping[str, Any]:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def write(_: bytes) -> None:
        nonlocal writes
        writes += 1
        raise InvalidInput("full", field="file")

    with pytest.raises(FairwayError):
        await read_form(Headers({"headers": [(b"content-type", TYPE)]}), receive, write, 2000)
    assert (waiting, writes) == ([], 1)
