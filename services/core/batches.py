"""Records of uploaded files and of batches, as etcd has them. The bytes are in the blob store.

A file is a list of parts, which are sealed blobs of their own: no two files share one. A batch advances by
whole lines of its input: what comes before ``next_line`` is in the output or in the errors, once. The lines
that have a result behind it, at most the present window of them, are in ``early``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

# Outside the root of the fleet's state: a batch writes often. Gateways read it, and control
# planes for the deadlines of lines.
FILES: Final = "/fairway/v1-files/"
BATCHES: Final = "/fairway/v1-batches/"
# Under the lease of the gateway that runs the batch. The key's create_revision fences its writes.
BATCH_OWNERS: Final = "/fairway/v1-batch-owners/"

# Of an uploaded file, and of a file that a batch writes: that part is written again until it is full.
PART_BYTES: Final = 4 * 1024**2
OUTPUT_PART_BYTES: Final = 1024**2
# Most parts of one file: its record stays far below the largest value of etcd.
MAX_PARTS: Final = 1024
MAX_LINES: Final = 50_000
MAX_PROBLEMS: Final = 100
MAX_MODELS: Final = 32
MAX_MODEL_CHARS: Final = 256
FILE_ID: Final = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{24}")


class FilePurpose(StrEnum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class BatchStatus(StrEnum):
    """OpenAI's, without ``finalizing``: the files and the end are written at once."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self not in _UNFINISHED


_UNFINISHED: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file. ``digest`` is the sealed blob's; ``size_bytes`` counts before sealing."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a tenant. Times are Unix seconds."""

    file_id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    create_unix_s: float
    # Time from which it is not found, and its parts are deleted.
    expire_unix_s: float
    parts: tuple[FilePart, ...] = ()
    # A hash of the bytes of a file with a client's idempotency key.
    content_hash: str = ""

    @property
    def size_bytes(self) -> int:
        return size_of(self.parts)


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """Why a batch failed. ``line`` is the input's line, from 1; 0: the whole file."""

    code: str
    message: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch and its progress. Times are Unix seconds; 0: not yet."""

    batch_id: str
    tenant: str
    # The API key that created it: its lines run with what that key may do.
    key_id: str
    endpoint: str
    input_file_id: str
    # The names of the files that it writes, from its creation on.
    output_file_id: str
    error_file_id: str
    # The completion window as the client sent it.
    window: str
    create_unix_s: float
    expire_unix_s: float
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: dict[str, str] = field(default_factory=dict)
    # Known when the input is validated.
    lines: int = 0
    # Lines by deployment, of the first ``MAX_MODELS`` model names in the input.
    models: dict[str, int] = field(default_factory=dict)
    # The first line without a result, from 0, and where it begins in the input.
    next_line: int = 0
    next_offset: int = 0
    completed: int = 0
    failed: int = 0
    # What the lines with a result took, in the work of their pools: tokens, or rows.
    work: float = 0.0
    output: tuple[FilePart, ...] = ()
    errors: tuple[FilePart, ...] = ()
    # Results of lines behind ``next_line`` that waited long, not yet in a file; their parts have the batch's
    # id in place of a file's. Some may be in a file meanwhile.
    early: tuple[FilePart, ...] = ()
    problems: tuple[BatchProblem, ...] = ()
    run_unix_s: float = 0.0
    cancel_unix_s: float = 0.0
    end_unix_s: float = 0.0

    @property
    def parts(self) -> tuple[FilePart, ...]:
        """The parts of its results."""
        return (*self.output, *self.errors, *self.early)

    def lines_left(self, deployment: str) -> float:
        """Return how many lines of a deployment have no result, as if each model's end at one pace."""
        if self.status is not BatchStatus.IN_PROGRESS:
            return 0.0
        return self.models.get(deployment, 0) * (1.0 - self.next_line / self.lines)

    def cancelled(self, unix_s: float) -> BatchRecord:
        """Return the batch with a cancellation. One whose every line was done stays completed."""
        status = BatchStatus.CANCELLED if self.status.is_over else BatchStatus.CANCELLING
        if self.status is BatchStatus.COMPLETED:
            status = BatchStatus.COMPLETED
        return replace(self, status=status, cancel_unix_s=unix_s)


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """Names the gateway that runs a batch. ``stalled``: its lines are only refused."""

    gateway: str
    stalled: bool = False


def size_of(parts: tuple[FilePart, ...]) -> int:
    return sum(part.size_bytes for part in parts)


def id_of_key(kind: str, tenant: str, key: str) -> str:
    """Return the 24 hex digits of the ``batch`` or ``file`` that has a client's idempotency key."""
    text = f"fairway {kind} key v1\0{tenant}\0{key}".encode()
    return hashlib.blake2b(text, digest_size=12).hexdigest()


def file_key(tenant: str, file_id: str) -> str:
    return f"{FILES}{tenant}/{file_id}"


def batch_key(tenant: str, batch_id: str) -> str:
    return f"{BATCHES}{tenant}/{batch_id}"


def owner_key(tenant: str, batch_id: str) -> str:
    return f"{BATCH_OWNERS}{tenant}/{batch_id}"
