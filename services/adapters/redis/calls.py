"""Calls of Redis that wait for a connection: in turns between tenants, and in batches of a bounded size."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.core.errors import StoreUnavailable

MAX_WAITING: Final = 16_384  # of one tenant: more than a gateway runs requests
BATCH_CALLS: Final = 64
BATCH_BYTES: Final = 1024**2


@dataclass(frozen=True, slots=True)
class Call:
    """``answer`` is the caller's: one that it cancelled wants no answer."""

    tenant_id: str
    command: Sequence[str | int | bytes]
    size_bytes: int
    answer: asyncio.Future[Any]

    @property
    def wanted(self) -> bool:
        return not self.answer.done()

    def answered(self, answer: Any) -> None:
        if self.wanted:
            self.answer.set_result(answer)

    def failed(self, error: StoreUnavailable) -> None:
        if self.wanted:
            self.answer.set_exception(error)


class CallQueue:
    """One queue per tenant, served in turns: a tenant with many calls delays another's by one call each."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Call]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, call: Call) -> None:
        """Raises StoreUnavailable when too many of its tenant wait."""
        calls = self._waiting.setdefault(call.tenant_id, deque())
        if len(calls) >= MAX_WAITING:
            raise StoreUnavailable(f"{MAX_WAITING} calls of this tenant wait for Redis", retry_after_s=1.0)
        calls.append(call)

    def take(self) -> list[Call]:
        """Return the next batch, without calls that nobody waits for. Empty when nothing is left."""
        batch: list[Call] = []
        size_bytes = 0
        while self._waiting and len(batch) < BATCH_CALLS:
            tenant_id, calls = next(iter(self._waiting.items()))
            if calls[0].wanted:
                size_bytes += calls[0].size_bytes
                if batch and size_bytes > BATCH_BYTES:
                    break
                batch.append(calls[0])
            calls.popleft()
            if calls:
                self._waiting.move_to_end(tenant_id)
            else:
                del self._waiting[tenant_id]
        return batch

    def take_all(self) -> list[Call]:
        """Return every call that waits, and forget them."""
        calls = [call for waiting in self._waiting.values() for call in waiting]
        self._waiting.clear()
        return calls
