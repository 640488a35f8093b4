"""Limits of unauthenticated callers, so that health checks and authenticated callers are served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from services.core.errors import OverQuota
from services.rpc.connections import source_of

MAX_OF_CONNECTION: Final = 32
MAX_STREAMS_OF_SOURCE: Final = 32
MAX_STREAMS: Final = 128
# Rejections of one connection, per second and unread. Its calls share one queue with those of all callers.
MAX_REFUSALS_PER_S: Final = 100
MAX_UNREAD: Final = 256
UNREAD_WITHIN_S: Final = 15.0


class UnauthenticatedCalls:
    """Counts RPCs from their headers until the transport accepted their status, which may wait for the
    reader.

    ``close_soon`` ends the connection of the peer that it is called with.
    """

    def __init__(self, close_soon: Callable[[str], None]) -> None:
        self._close_soon = close_soon
        self._of_peer: dict[str, int] = {}
        self._refusals: dict[str, int] = {}
        self._second = 0
        self._streams: dict[str, int] = {}

    def refused(self, peer: str) -> None:
        """Count an RPC that is rejected for its credentials."""
        _count(self._of_peer, peer)
        self.refuse(peer)

    def refuse(self, peer: str) -> None:
        """Record the rejection of a counted RPC; a connection with many rejections is closed."""
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._refusals = second, {}
        refusals = self._refusals[peer] = self._refusals.get(peer, 0) + 1
        if refusals > MAX_REFUSALS_PER_S or self._of_peer[peer] > MAX_UNREAD:
            self._close_soon(peer)

    def enter(self, peer: str) -> None:
        """Count a public RPC with one response. Raises OverQuota when its connection has many.

        There is no other bound: a health check is answered whatever other connections do.
        """
        self._admit(peer)
        late = asyncio.get_running_loop().call_later(UNREAD_WITHIN_S, self._close_soon, peer)
        _at_end(late.cancel)

    def enter_stream(self, peer: str) -> None:
        """Count a public RPC of unlimited duration. Raises OverQuota."""
        self._admit(peer)
        source = source_of(peer)
        mine, all_of_them = self._streams.get(source, 0), sum(self._streams.values())
        if mine >= MAX_STREAMS_OF_SOURCE or all_of_them >= MAX_STREAMS:
            self.refuse(peer)
            raise OverQuota("too many streams without credentials are open", retry_after_s=1.0)
        _count(self._streams, source)

    def _admit(self, peer: str) -> None:
        refusals = self._refusals.get(peer, 0)
        if _count(self._of_peer, peer) > MAX_OF_CONNECTION or refusals > MAX_REFUSALS_PER_S:
            self.refuse(peer)
            raise OverQuota("this connection has too many calls without credentials", retry_after_s=1.0)


def _count(counts: dict[str, int], name: str) -> int:
    """Add one to a count until the RPC of this task is over, and return the count."""
    counts[name] = counts.get(name, 0) + 1

    def forget() -> None:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]

    _at_end(forget)
    return counts[name]


def _at_end(act: Callable[[], None]) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: act())
