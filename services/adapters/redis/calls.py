"""Redis calls that wait for a connection: round robin between tenants, in batches of bounded size."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any, Final

import hiredis

from services.core.errors import StoreUnavailable

MAX_WAITING: Final = 16_384  # per tenant: more than the requests that a gateway runs
BATCH_CALLS: Final = 16  # a burst is shared by the lanes, so that Redis works while others are read
BATCH_BYTES: Final = 1024**2


_pack: Final[Any] = hiredis.pack_command  # its stub has tuples of one element


def packed(*parts: str | int | bytes) -> bytes:
    """Return a command as Redis reads it."""
    command: bytes = _pack(parts)
    return command


@dataclass(frozen=True, slots=True)
class Call:
    """An encoded command and its caller's future, ``answer``. A call whose future is cancelled is skipped."""

    tenant_id: str
    command: bytes
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
    """One queue per tenant, served round robin: a tenant's many calls delay another's by one call each."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Call]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, call: Call) -> None:
        """Raises StoreUnavailable when too many calls of its tenant wait."""
        calls = self._waiting.setdefault(call.tenant_id, deque())
        if len(calls) >= MAX_WAITING:
            raise StoreUnavailable(f"{MAX_WAITING} calls of this tenant wait for Redis", retry_after_s=1.0)
        calls.append(call)

    def take(self) -> list[Call]:
        """Return the next batch, without cancelled calls. Empty when the queue is empty."""
        batch: list[Call] = []
        size_bytes = 0
        while self._waiting and len(batch) < BATCH_CALLS:
            tenant_id, calls = next(iter(self._waiting.items()))
            if calls[0].wanted:
                size_bytes += len(calls[0].command)
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
        """Remove and return every waiting call."""
        calls = [call for waiting in self._waiting.values() for call in waiting]
        self._waiting.clear()
        return calls
