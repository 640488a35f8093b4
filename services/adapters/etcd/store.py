"""The fleet state in etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc
import structlog
from aetcd import rpc

from services.adapters.commit_bounds import check_commit
from services.adapters.etcd import watch as etcd_watch
from services.adapters.etcd.channel import NEEDS_LEADER, EtcdChannel
from services.adapters.etcd.watch import WatchTimes, entry_of, key_bytes, prefix_range
from services.core.errors import FairwayError, StoreUnavailable
from services.core.records import ASSIGNMENTS, EVENTS, STORE_GENERATION
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
from services.runtime.certificates import Certificates
from services.runtime.reserve import RESERVE_RATIO, Reserve

log = structlog.get_logger()

_PAGE_KEYS: Final = 1000
_LIST_ATTEMPTS: Final = 3
_MEASURE_S: Final = 5.0
# New keys that keep the fleet going. Leases, updates and deletions are never refused.
_NEEDED: Final = (ASSIGNMENTS, EVENTS, STORE_GENERATION)


class EtcdSpace:
    """How much of its quota etcd uses: new objects of tenants and operators leave a part of it free.

    At the quota etcd refuses every write, new leases included, until an operator acts.
    """

    def __init__(self, quota_bytes: int, clock: Clock) -> None:
        mend = "delete what is not needed, or raise etcd's quota and FAIRWAY_ETCD_QUOTA_BYTES"
        self.reserve = Reserve("etcd", mend, clock)
        self._quota_bytes = quota_bytes
        self._clock = clock
        self._alarm = False

    def problem(self) -> str:
        """Return why etcd takes no writes; empty while it does."""
        return (
            "etcd has raised the alarm NOSPACE and takes no writes: free space, defragment it and disarm the "
            "alarm, as docs/operations/troubleshooting.md describes"
            if self._alarm
            else ""
        )

    def check(self, operations: Sequence[Operation], conditions: Sequence[Condition]) -> None:
        """Raise StorageFull for a commit that adds an object when the reserve is reached."""
        if not self.reserve.reached:
            return
        absent = {one.key for one in conditions if isinstance(one, ModRevisionIs) and not one.revision}
        for operation in operations:
            adds = isinstance(operation, Put) and not operation.lease_id and operation.key in absent
            if adds and not operation.key.startswith(_NEEDED):
                raise self.reserve.refusal()

    async def run(self, channel: EtcdChannel) -> None:
        """Measure every few seconds, until cancelled."""
        while True:
            try:
                self.note(await channel.unary(lambda s: s.maintenance.Status, rpc.StatusRequest(), 3.0))
            except FairwayError as error:
                log.debug("etcd.not_measured", error=error.message)
            await self._clock.sleep(_MEASURE_S)

    def note(self, status: Any) -> None:
        """Take what a member reports of itself."""
        alarm = any("NOSPACE" in each for each in status.errors)
        if alarm != self._alarm:
            log.warning("etcd.alarm_changed", raised=alarm, used_bytes=status.dbSizeInUse)
        self._alarm = alarm
        # The free pages of the file are used again, so that it does not grow past what was once in use.
        used_bytes = self._quota_bytes if alarm else status.dbSizeInUse
        self.reserve.measured(self._quota_bytes - used_bytes, int(self._quota_bytes * RESERVE_RATIO))


class LeaseStream:
    """Keep-alives of all leases over one stream, since a stream for each costs more than its message.

    It is opened at the first use and again after a failure. The channel's owner closes it with the channel.
    """

    def __init__(self, channel: EtcdChannel) -> None:
        self._channel = channel
        self._call: Any = None
        self._free = asyncio.Lock()  # one keep-alive at a time: answers come in order

    async def keep_alive(self, lease_id: int, timeout_s: float) -> int:
        """Return for how many seconds the lease is extended; 0 when it has ended.

        Raises StoreUnavailable, at the latest after ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s), self._free:
                is_reused = self._call is not None
                try:
                    return await self._exchange(lease_id)
                except StoreUnavailable:
                    if not is_reused:
                        raise
                    return await self._exchange(lease_id)  # only the old stream may be broken
        except TimeoutError as error:
            raise StoreUnavailable(f"etcd did not answer for {timeout_s:g} s", retry_after_s=1.0) from error

    async def _exchange(self, lease_id: int) -> int:
        """Send one keep-alive and return its answer. The stream is kept if both succeed."""
        with self._channel.stubs() as stubs:
            call, self._call = self._call, None
            if call is None:
                call = stubs.lease.LeaseKeepAlive(metadata=NEEDS_LEADER)
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise StoreUnavailable("etcd ended the keep-alive", retry_after_s=1.0)
                self._call = call
            except asyncio.InvalidStateError as error:  # the stream broke since the last keep-alive
                raise StoreUnavailable("the keep-alive stream is over", retry_after_s=1.0) from error
            finally:
                if self._call is None:
                    call.cancel()
            return int(answer.TTL)


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
        certificates: Certificates | None = None,
    ) -> None:
        """Connects at the first call. ``endpoints`` are ``host:port``, all of one cluster, or
        ``https://host:port`` for TLS, which needs ``certificates``.

        A watch that receives no message for ``progress_s`` requests one, and is closed after ``silence_s``.
        ``quota_bytes`` is what etcd was started with.
        Raises InvalidInput for an invalid endpoint.
        """
        self._channel = EtcdChannel(endpoints, certificates)
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
