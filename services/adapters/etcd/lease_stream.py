"""Keep-alives of this process's leases over one stream; a stream for each costs more than its message."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from aetcd import rpc

from services.adapters.etcd.channel import NEEDS_LEADER, EtcdChannel
from services.core.errors import StoreUnavailable


class LeaseStream:
    """Opened at the first use and again after a failure. The channel's owner closes it with the channel."""

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
