"""Limits of one commit: etcd's defaults, checked in every store before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.core.errors import InvalidInput
from services.ports.store import Operation, Put

MAX_OPERATIONS: Final = 128
MAX_BYTES: Final = 1_500_000


def check_commit(operations: Sequence[Operation]) -> None:
    """Raises InvalidInput for too many operations or bytes, or for a key that is written twice."""
    if len(operations) > MAX_OPERATIONS:
        raise InvalidInput(f"a commit has at most {MAX_OPERATIONS} operations", field="operations")
    if len({operation.key for operation in operations}) < len(operations):
        raise InvalidInput("a key is written twice in one commit", field="operations")
    size_bytes = sum(len(o.key) + (len(o.value) if isinstance(o, Put) else 0) for o in operations)
    if size_bytes > MAX_BYTES:
        raise InvalidInput(f"a commit has at most {MAX_BYTES} bytes", field="operations")
