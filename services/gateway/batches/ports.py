"""What batches act through, and their times and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from services.adapters.blobs.sealed import SealedParts
from services.core.batches import OUTPUT_PART_BYTES, BatchRecord, BatchStatus
from services.core.errors import FairwayError
from services.core.generation import Principal
from services.core.records import Tenant
from services.gateway.batches.lines import LineAnswer
from services.gateway.batches.store import BatchStore
from services.ports.clock import Clock


class LineCalls(Protocol):
    """Runs bodies of lines as the HTTP API does, in the lowest class."""

    async def run(self, principal: Principal, endpoint: str, body: bytes, key: str) -> LineAnswer:
        """Return the answer of a body under an idempotency key. Raises the tree of ``core/errors.py``."""

    def refusal(self, error: FairwayError) -> LineAnswer:
        """Return the answer that states an error."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The times of a batch in seconds."""

    # Interval of committing results.
    commit_s: float = 1.0
    # Wait of a result for an earlier line before it is stored separately; far less than keys keep answers.
    early_s: float = 5.0
    # Time for lines that run when the batch is cancelled or expires.
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class BatchPorts:
    """What batches act through."""

    store: BatchStore
    parts: SealedParts
    calls: LineCalls
    clock: Clock
    rng: Random
    # Returns the tenant of a caller while its key is valid. Raises Unauthenticated.
    tenant_of: Callable[[Principal], Tenant]
    # Returns the batch's status as far as it is known here.
    status_of: Callable[[BatchRecord], BatchStatus]
    # Counts a line by its outcome.
    count: Callable[[str], None]
    # Returns how many bytes the tenant may store in addition to its files.
    room_bytes: Callable[[str], int]
    # Returns the lifetime of the tenant's result files in seconds.
    retention_s: Callable[[str], float]
    # Returns the deployment that a client's name of a model stands for.
    deployment_of: Callable[[str], str]
    max_line_bytes: int
    times: BatchTimes = BatchTimes()
    # Size of a result file's parts.
    part_bytes: int = OUTPUT_PART_BYTES
    # Lines that are read ahead of the first one without a result.
    ahead_lines: int = 512
