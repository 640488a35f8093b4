"""The bodies of the routes of files and batches, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct

from services.gateway.batches.records import BatchProblem, BatchRecord, BatchStatus, StoredFile
from services.gateway.faces.openai.types import Metadata, Short, Unserved
from services.gateway.faces.transport.queries import OrderedQuery, PageQuery


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
