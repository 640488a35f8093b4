"""OpenAI's Files and Batches APIs: their bodies, uploads, and routes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import structlog
from msgspec import UNSET, Meta, Struct
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from services.core.batches import BatchProblem, BatchRecord, BatchStatus, FilePurpose, StoredFile
from services.core.errors import FairwayError, InvalidInput, UnsupportedFeature
from services.gateway.batches.service import BatchService
from services.gateway.faces.openai.errors import HttpProblem
from services.gateway.faces.openai.exchange import (
    BYTES,
    FORM,
    JSON,
    Access,
    ApiEndpoint,
    BodyReader,
    ClientDisconnected,
    Exchange,
    Handler,
    Headers,
    HttpLimits,
    Receive,
    expect_body,
)
from services.gateway.faces.openai.types import Metadata, Short, Unserved, parse_body
from services.gateway.faces.transport.queries import OrderedQuery, PageQuery, page_of, read_query

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
log = structlog.get_logger()
_encode: Final = msgspec.json.Encoder().encode
_KEY: Final = ("idempotency-key",)
_PIECE_BYTES: Final = 64 * 1024


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class UploadForm(Struct, frozen=True):
    """The form of an upload: each field once, the file's bytes as they are."""

    file: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]
    purpose: Literal["batch"]


class FilesQuery(OrderedQuery, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1000
    purpose: str | None = None


class BatchesQuery(PageQuery, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class DeletedFile(Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(Struct, frozen=True):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class BatchBody(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    input_file_id: Short
    endpoint: Short
    completion_window: Short
    metadata: Metadata | None = None

    output_expires_after: Unserved = UNSET


class BatchErrorEntry(Struct, frozen=True):
    code: str
    message: str
    line: int | None
    param: str | None = None


class BatchErrors(Struct, frozen=True):
    data: list[BatchErrorEntry]
    object: Literal["list"] = "list"


class BatchCounts(Struct, frozen=True):
    total: int
    completed: int
    failed: int


class BatchObject(Struct, frozen=True, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    errors: BatchErrors | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: Mapping[str, str] | None
    object: Literal["batch"] = "batch"


class BatchList(Struct, frozen=True):
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.file_id,
        bytes=file.size_bytes,
        created_at=int(file.create_unix_s),
        expires_at=int(file.expire_unix_s),
        filename=file.filename,
        purpose=file.purpose.value,
    )


def batch_object(batch: BatchRecord) -> BatchObject:
    """Return a batch as its client reads it. Files have a name once the batch has ended."""
    is_over = batch.status.is_over

    def ended(status: BatchStatus) -> int | None:
        return _time(batch.end_unix_s) if batch.status is status else None

    return BatchObject(
        id=batch.batch_id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file_id,
        completion_window=batch.window,
        status=batch.status.value,
        output_file_id=batch.output_file_id if is_over and batch.output else None,
        error_file_id=batch.error_file_id if is_over and batch.errors else None,
        errors=BatchErrors([_entry(problem) for problem in batch.problems]) if batch.problems else None,
        created_at=int(batch.create_unix_s),
        in_progress_at=_time(batch.run_unix_s),
        expires_at=int(batch.expire_unix_s),
        finalizing_at=ended(BatchStatus.COMPLETED),
        completed_at=ended(BatchStatus.COMPLETED),
        failed_at=ended(BatchStatus.FAILED),
        expired_at=ended(BatchStatus.EXPIRED),
        cancelling_at=_time(batch.cancel_unix_s),
        cancelled_at=ended(BatchStatus.CANCELLED),
        request_counts=BatchCounts(batch.lines, batch.completed, batch.failed),
        metadata=batch.metadata or None,
    )


def _entry(problem: BatchProblem) -> BatchErrorEntry:
    return BatchErrorEntry(problem.code, problem.message, problem.line or None)


def _time(unix_s: float) -> int | None:
    return int(unix_s) if unix_s else None


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


class BatchesFace:
    """The handlers of the routes."""

    def __init__(self, service: BatchService, limits: HttpLimits, bodies: BodyReader) -> None:
        self._service = service
        self._limits = limits
        self._bodies = bodies

    def endpoints(self) -> tuple[ApiEndpoint, ...]:
        a_file, a_batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
        form: dict[str, Any] = {"takes": (FORM,), "body": UploadForm, "headers": _KEY, "answer": FileObject}
        order: dict[str, Any] = {"takes": (JSON,), "body": BatchBody, "headers": _KEY, "answer": BatchObject}
        files: dict[str, Any] = {"answer": FileList, "query": FilesQuery}
        batches: dict[str, Any] = {"answer": BatchList, "query": BatchesQuery}
        routes: tuple[tuple[str, str, Handler, str, dict[str, Any]], ...] = (
            ("POST", "/v1/files", self.upload, "a form: `file`, and `purpose` batch", form),
            ("GET", "/v1/files", self.files, "no body; the files, newest first", files),
            ("GET", a_file, self.file, "no body; a file", {"answer": FileObject}),
            ("GET", f"{a_file}/content", self.content, "no body; its bytes", {"returns": (BYTES,)}),
            ("DELETE", a_file, self.delete, "no body; deletes it", {"answer": DeletedFile}),
            ("POST", "/v1/batches", self.create, "an uploaded file", order),
            ("GET", "/v1/batches", self.batches, "no body; the batches, newest first", batches),
            ("GET", a_batch, self.batch, "no body; a batch", {"answer": BatchObject}),
            ("POST", f"{a_batch}/cancel", self.cancel, "no body; cancels it", {"answer": BatchObject}),
        )
        return tuple(
            ApiEndpoint(method, path, Access.TENANT, handler, accepts, **declared)
            for method, path, handler, accepts, declared in routes
        )

    async def upload(self, exchange: Exchange) -> None:
        try:
            file = await self._uploaded(exchange)
        except FairwayError as error:
            if not isinstance(error, HttpProblem):  # bytes of the request may be unread
                exchange.reply.add_header(b"connection", b"close")
            raise
        log.info("file.uploaded", file_id=file.file_id, size_bytes=file.size_bytes)
        await exchange.reply.json(200, _encode(file_object(file)))

    async def _uploaded(self, exchange: Exchange) -> StoredFile:
        files = self._service.files
        most = files.limits.max_bytes
        upload = files.upload(exchange.caller.tenant_id, exchange.headers.idempotency_key())
        try:
            expect_body(exchange.scope, most + FORM_BYTES, UPLOAD_TIMEOUT_S)
            form = await read_form(exchange.headers, exchange.receive, upload.write, most)
            purpose = form.values.pop("purpose", "")
            if purpose != FilePurpose.BATCH:
                raise InvalidInput("purpose must be batch", field="purpose")
            for name in form.values:
                shown = name[:64]
                raise UnsupportedFeature(f"{shown}: not offered by this server", field=shown)
            return await files.add(upload, form.filename)
        finally:
            await upload.close()

    async def files(self, exchange: Exchange) -> None:
        query = read_query(exchange.scope, FilesQuery)
        found = self._service.files.files(exchange.caller.tenant_id)
        if query.order == "asc":
            found.reverse()
        if query.purpose is not None:
            found = [file for file in found if file.purpose == query.purpose]
        page, more = page_of(found, lambda file: file.file_id, query)
        data = [file_object(file) for file in page]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        await exchange.reply.json(200, _encode(FileList(data, first, last, more)))

    async def file(self, exchange: Exchange) -> None:
        await exchange.reply.json(200, _encode(file_object(await self._file(exchange))))

    async def content(self, exchange: Exchange) -> None:
        file = await self._file(exchange)
        left = file.size_bytes
        async with aclosing(self._service.files.content(file)) as parts:
            try:
                async for part in parts:
                    if not exchange.reply.started:
                        await exchange.reply.start_bytes(left, b"application/octet-stream")
                    for start in range(0, len(part), _PIECE_BYTES):
                        piece = part[start : start + _PIECE_BYTES]
                        left -= len(piece)
                        await exchange.reply.write(piece, last=not left)
            except FairwayError:
                if exchange.reply.started:  # its length is announced: the client observes that bytes lack
                    exchange.reply.abort()
                raise

    async def delete(self, exchange: Exchange) -> None:
        file_id: str = exchange.scope["path_params"]["file_id"]
        await self._service.files.delete(exchange.caller.tenant_id, file_id)
        await exchange.reply.json(200, _encode(DeletedFile(file_id)))

    async def create(self, exchange: Exchange) -> None:
        key = exchange.headers.idempotency_key()
        body = await self._bodies.read(exchange, self._limits, lambda data: parse_body(data, BatchBody))
        batch = await self._service.create(
            exchange.caller,
            body.input_file_id,
            body.endpoint,
            body.completion_window,
            body.metadata or {},
            key=key,
        )
        log.info("batch.created", batch_id=batch.batch_id)
        await exchange.reply.json(200, _encode(batch_object(batch)))

    async def batches(self, exchange: Exchange) -> None:
        query = read_query(exchange.scope, BatchesQuery)
        found = self._service.batches(exchange.caller.tenant_id)
        page, more = page_of(found, lambda batch: batch.batch_id, query)
        data = [batch_object(batch) for batch in page]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        await exchange.reply.json(200, _encode(BatchList(data, first, last, more)))

    async def batch(self, exchange: Exchange) -> None:
        found = await self._service.batch(exchange.caller, exchange.scope["path_params"]["batch_id"])
        await exchange.reply.json(200, _encode(batch_object(found)))

    async def cancel(self, exchange: Exchange) -> None:
        found = await self._service.cancel(exchange.caller, exchange.scope["path_params"]["batch_id"])
        await exchange.reply.json(200, _encode(batch_object(found)))

    async def _file(self, exchange: Exchange) -> StoredFile:
        file_id: str = exchange.scope["path_params"]["file_id"]
        return await self._service.files.file(exchange.caller.tenant_id, file_id)
