"""The routes of OpenAI's Files and Batches APIs."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, Final

import msgspec
import structlog

from services.core.errors import FairwayError, InvalidInput, UnsupportedFeature
from services.gateway.batches.records import FilePurpose, StoredFile
from services.gateway.batches.service import BatchService
from services.gateway.faces.batches.types import (
    BatchBody,
    BatchesQuery,
    BatchList,
    BatchObject,
    DeletedFile,
    FileList,
    FileObject,
    FilesQuery,
    UploadForm,
    batch_object,
    file_object,
)
from services.gateway.faces.batches.uploads import FORM_BYTES, UPLOAD_TIMEOUT_S, read_form
from services.gateway.faces.openai.endpoint import BYTES, FORM, JSON, Access, ApiEndpoint, Exchange, Handler
from services.gateway.faces.openai.errors import HttpProblem
from services.gateway.faces.openai.exchange import BodyReader, HttpLimits, expect_body, read_body
from services.gateway.faces.openai.types import parse_body
from services.gateway.faces.transport.queries import page_of, read_query

log = structlog.get_logger()
_encode: Final = msgspec.json.Encoder().encode
_KEY: Final = ("idempotency-key",)
_PIECE_BYTES: Final = 64 * 1024


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
        with self._bodies.account(exchange.caller.tenant_id) as hold:
            data = await read_body(exchange.headers, exchange.receive, self._limits, hold)
            body = await self._bodies.parse(lambda data: parse_body(data, BatchBody), data)
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
