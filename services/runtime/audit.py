"""Entries of the audit log on their way into the store.

A change and its entry are one transaction: ``AuditedStore`` adds the entry to the first commit of the call
that runs. Refusals and failed authentications have no commit: ``AuditRecorder`` writes them in the
background. ``controlplane/audit_log.py`` gives the entries their order.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

import structlog

from services.core.audit import PENDING, PLATFORM, Actor, AuditEntry
from services.core.errors import AuditBacklog, StoreUnavailable
from services.core.generation import Principal
from services.core.records import dump
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Condition,
    ConditionFailed,
    Entry,
    Listing,
    ModRevisionIs,
    Operation,
    Put,
    Store,
    WatchBatch,
)
from services.runtime.fleet_state.informer import RecordView

log = structlog.get_logger()

MAX_PENDING: Final = 4096  # entries without a place in the log, from which on changes are refused
FLUSH_S: Final = 1.0
PER_FLUSH: Final = 16
MAX_WAITING: Final = 256
MAX_UNSEQUENCED: Final = 64  # entries of one recorder without a place in the log


@dataclass(slots=True)
class AuditedCall:
    """A call of an authenticated caller. The task that runs it is its only writer."""

    entry: AuditEntry
    recorded: bool = False  # whether a commit of the call contains the entry


_call: ContextVar[AuditedCall | None] = ContextVar("audited_call", default=None)


def audited_call() -> AuditedCall | None:
    """Return the call that this task runs; None outside of one, and for a call of another service."""
    return _call.get()


def begin_call(method: str, caller: Principal, address: str, certificate: str = "") -> None:
    """Make this the call of the present task, until the task ends."""
    actor = Actor(caller.key_id, caller.role, caller.tenant_id, caller.subject, certificate, address)
    _call.set(AuditedCall(AuditEntry(method, actor)))


@contextmanager
def deciding(method: str, resource: str) -> Iterator[None]:
    """Record the first commit inside as a decision of the platform."""
    token = _call.set(AuditedCall(AuditEntry(method, Actor(role=PLATFORM), resource)))
    try:
        yield
    finally:
        _call.reset(token)


class AuditedStore:
    """``Store`` decorator: the first commit of a call contains the entry of the call.

    So an acknowledged change is in the log, and no change is without its entry. A commit of a caller raises
    AuditBacklog, and changes nothing, while ``MAX_PENDING`` entries wait for their place in the log.
    Decisions of the platform protect traffic, and are never refused.
    """

    def __init__(
        self,
        inner: Store,
        pending: RecordView[AuditEntry],
        clock: Clock,
        *,
        source: str,
        new_id: Callable[[], str],
    ) -> None:
        """``pending``: the entries under ``PENDING``. ``source`` is the role of this process."""
        self._inner = inner
        self._pending = pending
        self._clock = clock
        self._source = source
        self._new_id = new_id

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        call = audited_call()
        if call is None or call.recorded:
            return await self._inner.commit(operations, conditions)
        if (waiting := len(self._pending.view)) >= MAX_PENDING and call.entry.actor.role != PLATFORM:
            raise AuditBacklog(
                f"{waiting} entries wait for their place in the audit log, the most that may: changes are "
                "refused until the leading control plane writes it again; its /readyz names the problem",
                retry_after_s=5.0,
                waiting=waiting,
            )
        entry = replace(call.entry, unix_s=self._clock.unix_s(), source=self._source)
        put = Put(PENDING + self._new_id(), dump(entry.bounded()))
        done = await self._inner.commit([*operations, put], conditions)
        call.recorded = isinstance(done, Committed)
        return done

    async def get(self, key: str) -> Entry | None:
        return await self._inner.get(key)

    async def list(self, prefix: str) -> Listing:
        return await self._inner.list(prefix)

    async def grant_lease(self, ttl_s: int) -> int:
        return await self._inner.grant_lease(ttl_s)

    async def keep_alive(self, lease_id: int) -> None:
        await self._inner.keep_alive(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        await self._inner.revoke_lease(lease_id)

    def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        return self._inner.watch(prefix, after_revision)


class AuditRecorder:
    """Writes refusals into the store, at most ``PER_FLUSH`` entries a second. ``run`` is the only writer.

    Equal ones become one entry with their number. Of more than ``MAX_WAITING`` different ones, those with one
    outcome become one entry without an actor. A crash loses what waits, a second's in most cases.
    """

    def __init__(self, store: Store, clock: Clock, *, source: str, process: str) -> None:
        """``process`` is unique to this life of the process."""
        self._store = store
        self._clock = clock
        self._source = source
        self._process = process
        self._waiting: dict[tuple[str, ...], AuditEntry] = {}
        self._sent: list[tuple[tuple[str, ...], AuditEntry]] = []  # entries of the next commit
        self._next = MAX_UNSEQUENCED

    @property
    def waiting(self) -> int:
        """Calls that are not in the store yet."""
        return sum(entry.count for entry in self._waiting.values())

    def add(self, entry: AuditEntry, *distinct: str) -> None:
        """Queue an entry, with the present time. Returns at once.

        ``distinct``: what entries that are otherwise equal may differ by, and then stay apart.
        """
        key: tuple[str, ...] = (entry.outcome, entry.method, entry.actor.key, entry.actor.address, *distinct)
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING:
            key, entry = (entry.outcome,), AuditEntry("", Actor(), outcome=entry.outcome)
        held = self._waiting.get(key)
        if held is None:
            entry = replace(entry, unix_s=self._clock.unix_s(), source=self._source)
            self._waiting[key] = entry.bounded()
        else:
            self._waiting[key] = replace(held, count=held.count + 1)

    async def run(self) -> None:
        """Write what was added, until cancelled; survives an outage of the store."""
        while True:
            await self._clock.sleep(FLUSH_S)
            try:
                await self.flush()
            except StoreUnavailable as error:
                log.info("audit.store_lost", error=error.message, waiting=self.waiting)

    async def flush(self) -> None:
        """Write the oldest ones, unless ``MAX_UNSEQUENCED`` wait for their place. Raises StoreUnavailable."""
        taken = self._sent = self._sent or list(self._waiting.items())[:PER_FLUSH]
        if not taken:
            return
        last = self._next + len(taken) - 1
        puts = [Put(self._key(self._next + at), dump(entry)) for at, (_, entry) in enumerate(taken)]
        # Entries get their places in order, so none before the one that must be gone waits either.
        conditions = [ModRevisionIs(puts[0].key, 0), ModRevisionIs(self._key(last - MAX_UNSEQUENCED), 0)]
        done = await self._store.commit(puts, conditions)
        # An earlier commit whose answer was lost may have written them.
        if not isinstance(done, Committed) and await self._store.get(puts[0].key) is None:
            return
        for key, entry in taken:
            if added := self._waiting[key].count - entry.count:
                self._waiting[key] = replace(self._waiting[key], count=added)
            else:
                del self._waiting[key]
        self._next, self._sent = last + 1, []

    def _key(self, number: int) -> str:
        return f"{PENDING}{self._process}-{number:016x}"
