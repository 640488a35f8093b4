"""The fleet state in etcd."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

from aetcd import rpc

from services.adapters.commit_bounds import check_commit
from services.adapters.etcd import watch as etcd_watch
from services.adapters.etcd.channel import EtcdChannel
from services.adapters.etcd.lease_stream import LeaseStream
from services.adapters.etcd.space import EtcdSpace
from services.adapters.etcd.watch import WatchTimes, entry_of, key_bytes, prefix_range
from services.core.errors import StoreUnavailable
from services.ports.clock import Clock
from services.ports.store import (
    Committed,
    Compacted,
    Condition,
    ConditionFailed,
    Entry,
    LeaseLost,
    Listing,
    ModRevisionIs,
    Operation,
    Put,
    ValueIs,
    WatchBatch,
)

_PAGE_KEYS: Final = 1000
_LIST_ATTEMPTS: Final = 3


class EtcdStore:
    """``Store`` over etcd 3.5 or later. The caller closes it. It retries nothing.

    A write that raised StoreUnavailable may have been applied: the caller reads before it writes again.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        clock: Clock,
        *,
        timeout_s: float = 3.0,
        progress_s: float = 6.0,
        silence_s: float = 8.0,
        quota_bytes: int = 2 * 1024**3,
    ) -> None:
        """Connects at the first call. ``endpoints`` are ``host:port``, all of one cluster.

        A watch that receives no message for ``progress_s`` requests one, and is closed after ``silence_s``.
        ``quota_bytes`` is what etcd was started with.
        Raises InvalidInput for an invalid endpoint.
        """
        self._channel = EtcdChannel(endpoints)
        self._leases = LeaseStream(self._channel)
        self.space = EtcdSpace(quota_bytes, clock)
        self._clock = clock
        self._timeout_s = timeout_s
        self._watch_times = WatchTimes(timeout_s, progress_s, silence_s)

    async def get(self, key: str) -> Entry | None:
        answer = await self._range(rpc.RangeRequest(key=key_bytes(key)), self._timeout_s)
        return entry_of(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        deadline_s = self._clock.monotonic_s() + self._timeout_s
        for _ in range(_LIST_ATTEMPTS):
            try:
                return await self._list(prefix, deadline_s)
            except Compacted:  # compacted between two pages
                continue
        raise StoreUnavailable("etcd is compacted faster than it can be listed", retry_after_s=1.0)

    async def commit(
        self, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> Committed | ConditionFailed:
        check_commit(operations)
        self.space.check(operations, conditions)
        request = rpc.TxnRequest(
            compare=[_compare(condition) for condition in conditions],
            success=[_request_op(operation) for operation in operations],
        )
        answer = await self._channel.unary(lambda s: s.kv.Txn, request, self._timeout_s)
        revision = answer.header.revision
        return Committed(revision) if answer.succeeded else ConditionFailed(revision)

    async def grant_lease(self, ttl_s: int) -> int:
        request = rpc.LeaseGrantRequest(TTL=max(ttl_s, 1))
        answer = await self._channel.unary(lambda s: s.lease.LeaseGrant, request, self._timeout_s)
        lease_id: int = answer.ID
        return lease_id

    async def keep_alive(self, lease_id: int) -> None:
        if await self._leases.keep_alive(lease_id, self._timeout_s) <= 0:
            raise LeaseLost(f"lease {lease_id:x} has ended")

    async def revoke_lease(self, lease_id: int) -> None:
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._channel.unary(lambda s: s.lease.LeaseRevoke, request, self._timeout_s)
        except LeaseLost:
            return

    async def watch(self, prefix: str, after_revision: int) -> AsyncGenerator[WatchBatch, None]:
        batches = etcd_watch.watch(self._channel, prefix, after_revision, self._watch_times)
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    async def watch_space(self) -> None:
        """Measure the space, until cancelled."""
        await self.space.run(self._channel)

    async def close(self) -> None:
        """Close the connection; running calls and watches raise StoreUnavailable."""
        await self._channel.close()

    async def _list(self, prefix: str, deadline_s: float) -> Listing:
        """Return all pages as of the revision of the first."""
        key, range_end = prefix_range(prefix)
        entries: list[Entry] = []
        revision = 0
        while True:
            request = rpc.RangeRequest(key=key, range_end=range_end, limit=_PAGE_KEYS, revision=revision)
            answer = await self._range(request, deadline_s - self._clock.monotonic_s())
            revision = revision or answer.header.revision
            entries += [entry_of(kv) for kv in answer.kvs]
            if not answer.more:
                return Listing(revision, tuple(entries))
            key = answer.kvs[-1].key + b"\0"

    async def _range(self, request: Any, timeout_s: float) -> Any:
        return await self._channel.unary(lambda s: s.kv.Range, request, timeout_s)


def _compare(condition: Condition) -> Any:
    key = key_bytes(condition.key)
    if isinstance(condition, ValueIs):
        return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.VALUE, key=key, value=condition.value)
    if isinstance(condition, ModRevisionIs):
        return rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key, mod_revision=condition.revision
        )
    return rpc.Compare(
        result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key, create_revision=condition.revision
    )


def _request_op(operation: Operation) -> Any:
    key = key_bytes(operation.key)
    if isinstance(operation, Put):
        put = rpc.PutRequest(key=key, value=operation.value, lease=operation.lease_id)
        return rpc.RequestOp(request_put=put)
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
