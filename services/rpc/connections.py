"""Bounds on a port's connections by their source, and in all for those that carry nothing of a known caller.

grpc bounds the connections of a whole port, and offers neither a bound for a source nor a way to close one
connection. So this process inspects its own sockets: the oldest connections of the source that has most are
shut, which grpc observes as if the peer had gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from typing import Final, NamedTuple

import structlog

from services.core.shares import share_of
from services.ports.clock import Clock
from services.runtime import connections

log = structlog.get_logger()

# Of a port; the process may have descriptors for less. grpc keeps some memory of its peak of connections.
MAX_CONNECTIONS: Final = 2048
MAX_OF_SOURCE: Final = 128
MAX_STRANGERS: Final = 1024
MAX_WITH_NEW: Final = MAX_STRANGERS + MAX_STRANGERS // 2  # with those that were not there at the last look
MAX_IDLE_OF_CALLER: Final = 256  # that carry no call of it; more count as strangers
KNOWN_FOR_S: Final = 60.0
PERIOD_S: Final = 0.2
_FLOODED_PERIOD_S: Final = 0.05  # while strangers open more than they may keep
_PAUSE_S: Final = 0.02
_FEW: Final = 64
_DESCRIPTORS: Final = "/dev/fd"


class Idle(NamedTuple):
    """A connection after its last call of a known caller."""

    since_s: float
    caller: str


class Connections:
    """Which connections carry calls of known callers, or did in the last minute; and the end of others.

    A caller has a bounded number of those that carry none.

    A connection is named as ``context.peer()`` names it.
    """

    def __init__(
        self, count: Callable[[str], None] = lambda reason: None, *, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """``count`` is called with the reason, surplus, share or unread, of each connection that is ended.

        ``max_connections``: as many as the port takes; one source has at most its share of them.
        """
        self._count = count
        self._share = share_of(max_connections)
        self._running: dict[str, int] = {}
        self._idle: dict[str, Idle] = {}
        self._seen: set[str] = set()  # at the last look
        self._condemned: set[str] = set()
        self._wanted = asyncio.Event()
        self._since_s: dict[str, float] = {}
        self._calm = _FEW
        self._period_s = PERIOD_S

    def begin(self, peer: str) -> None:
        """A known caller's RPC runs on this connection until ``end``."""
        self._running[peer] = self._running.get(peer, 0) + 1

    def end(self, peer: str, caller: str) -> None:
        """``caller``: whose idle connections are bounded together; empty for a role, without bound."""
        left = self._running[peer] - 1
        if left:
            self._running[peer] = left
        else:
            del self._running[peer]
            self._idle[peer] = Idle(_now_s(), caller)

    def condemn(self, peer: str) -> None:
        """End this connection soon, unless a known caller uses it too."""
        self._condemned.add(peer)
        self._wanted.set()

    async def guard(self, clock: Clock, port: Callable[[], int]) -> None:
        """Keep the bounds until cancelled. ``port``: where the server listens, 0 until it does."""
        while True:
            await clock.sleep(_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._wanted.wait()
            self._wanted.clear()
            if not port():
                continue
            try:
                await self._look(port())
            except OSError as error:  # no descriptor is left for the look itself, or no such folder
                log.warning("connections.not_inspected", error=error.strerror)
                await clock.sleep(10 * PERIOD_S)

    async def _look(self, port: int) -> None:
        now_s = _now_s()
        for peer in [peer for peer, idle in self._idle.items() if idle.since_s <= now_s - KNOWN_FOR_S]:
            del self._idle[peer]
        self._period_s = PERIOD_S
        descriptors = await asyncio.to_thread(os.listdir, _DESCRIPTORS)
        # Those that the last look did not see may have ended by now: they vouch for no descriptor.
        others = len(descriptors) - len(self._seen & (self._running.keys() | self._idle.keys()))
        if others <= self._calm and len(descriptors) <= self._share and not self._condemned:
            return
        found = await asyncio.to_thread(connected, port, descriptors)
        self._seen = set(found)
        self._idle = {peer: idle for peer, idle in self._idle.items() if peer in found}
        for peer in crowd_of(self._idle, MAX_IDLE_OF_CALLER):
            del self._idle[peer]
        known = self._running.keys() | self._idle.keys()
        condemned, self._condemned = self._condemned & found.keys() - known, set()
        seen_s, self._since_s = self._since_s, {}
        for peer in found:
            self._since_s[peer] = seen_s.get(peer, now_s)
        strangers = {peer: since_s for peer, since_s in self._since_s.items() if peer not in known}
        surplus = surplus_of_strangers(strangers, now_s) - condemned
        staying = {peer: self._since_s[peer] for peer in found.keys() - surplus - condemned}
        over = above_share(staying, self._running.keys(), self._share)
        self._calm = _FEW if surplus or condemned else len(descriptors) - len(self._seen & known) + _FEW // 2
        self._period_s = _FLOODED_PERIOD_S if surplus else PERIOD_S
        ended = surplus | condemned | over
        if ended:
            await asyncio.to_thread(shut, {peer: found[peer] for peer in ended})
            for peers, reason in ((surplus, "surplus"), (condemned, "unread"), (over, "share")):
                for _ in peers:
                    self._count(reason)
            log.warning(
                "connections.shut",
                surplus=len(surplus),
                unread=len(condemned),
                share=len(over),
                left=len(found) - len(ended),
            )


def surplus_of_strangers(since_s: Mapping[str, float], now_s: float) -> set[str]:
    """Return what to end of the connections that carry nothing of a known caller.

    One that was not there before ``now_s`` may be about to identify itself, and stays unless very many are
    new: of the memory that they take together only a part ever goes back.
    """
    settled = {peer: first_s for peer, first_s in since_s.items() if first_s < now_s}
    surplus = surplus_of(settled, of_source=MAX_OF_SOURCE, in_all=MAX_STRANGERS)
    left = {peer: first_s for peer, first_s in since_s.items() if peer not in surplus}
    return surplus | surplus_of(left, of_source=MAX_WITH_NEW, in_all=MAX_WITH_NEW)


def surplus_of(since_s: Mapping[str, float], *, of_source: int, in_all: int) -> set[str]:
    """Return what to end so that no source has more than ``of_source``, and all together ``in_all``.

    The oldest of a source end first, and the sources with most share what the total takes from them.
    """
    by_source: defaultdict[str, list[str]] = defaultdict(list)
    for peer in sorted(since_s, key=lambda peer: (-since_s[peer], peer)):
        by_source[source_of(peer)].append(peer)
    share = of_source
    while share and sum(min(share, len(peers)) for peers in by_source.values()) > in_all:
        share -= 1
    return {peer for peers in by_source.values() for peer in peers[share:]}


def crowd_of(idle: Mapping[str, Idle], most: int) -> list[str]:
    """Return the connections of each caller beyond its ``most``, those that are idle for longest."""
    by_caller: defaultdict[str, list[str]] = defaultdict(list)
    for peer in sorted(idle, key=lambda peer: (-idle[peer].since_s, peer)):
        if idle[peer].caller:
            by_caller[idle[peer].caller].append(peer)
    return [peer for peers in by_caller.values() for peer in peers[most:]]


def above_share(since_s: Mapping[str, float], busy: Container[str], share: int) -> set[str]:
    """Return what to end so that no source has more than ``share``, with a known caller or without.

    What carries no call of a known caller ends first, the oldest of it; then the newest of the others.
    """
    by_source: defaultdict[str, list[str]] = defaultdict(list)
    for peer in sorted(since_s, key=lambda peer: (since_s[peer], peer)):
        by_source[source_of(peer)].append(peer)
    ended: set[str] = set()
    for peers in by_source.values():
        over = len(peers) - share
        if over > 0:
            idle = [peer for peer in peers if peer not in busy]
            running = [peer for peer in reversed(peers) if peer in busy]
            ended.update([*idle, *running][:over])
    return ended


def source_of(peer: str) -> str:
    """Return the source of a connection that grpc names so, as ``runtime.connections`` defines it."""
    kind, _, address = peer.partition(":")
    if kind != "ipv6":
        return peer.rpartition(":")[0]
    host = address.rpartition(":")[0].replace("%5B", "").replace("%5D", "").replace("%25", "%")
    return connections.source_of((host,))


def connected(port: int, descriptors: list[str]) -> dict[str, int]:
    """Return the accepted connections of a port, by the peer's name, each with its descriptor."""
    found: dict[str, int] = {}
    for descriptor in map(int, descriptors):
        if peer := _peer_at(descriptor, port):
            found[peer] = descriptor
    return found


def shut(peers: Mapping[str, int]) -> None:
    """End these connections; a descriptor that is another connection's by now is left alone."""
    for peer, descriptor in peers.items():
        try:
            mine = socket.socket(fileno=os.dup(descriptor))  # cannot become another's while it is looked at
        except OSError:
            continue
        with mine:
            try:
                if _name(mine.getpeername()) == peer:
                    mine.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _peer_at(descriptor: int, port: int) -> str:
    """Return the peer of the connection that a descriptor is, or "" when it is none of this port."""
    try:
        # With a family and a kind given, the system is not asked for them: most of the time that this takes.
        borrowed = socket.SocketType(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)
    except OSError:
        return ""
    try:
        address = borrowed.getsockname()
        if not isinstance(address, tuple) or not isinstance(address[0], str) or address[1] != port:
            return ""  # other kinds of sockets have a text or numbers for a name
        return _name(borrowed.getpeername())
    except OSError:  # it listens, or has just ended
        return ""
    finally:
        borrowed.detach()


def _name(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return how grpc names a peer."""
    host, port = address[0], address[1]
    if ":" not in host:
        return f"ipv4:{host}:{port}"
    mapped = ipaddress.IPv6Address(host.partition("%")[0]).ipv4_mapped
    return f"ipv4:{mapped}:{port}" if mapped else f"ipv6:%5B{host.replace('%', '%25')}%5D:{port}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
