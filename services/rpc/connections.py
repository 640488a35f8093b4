"""Bounds on a port's connections: per source, and in total for those without a call of an authenticated
caller.

grpc bounds only the connections of a whole port. It has no bound per source and no way to close one
connection. So this process inspects its own sockets and shuts down the oldest connections of the source that
has most. To grpc this looks like a disconnected peer. New connections come as events, so nothing polls.
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

from services.core.errors import OverQuota
from services.core.limits import share_of
from services.ports.clock import Clock
from services.runtime import connections

_DESCRIPTORS: Final = "/dev/fd"
log = structlog.get_logger()

# Per port; the process may have fewer descriptors. grpc keeps some memory of its peak of connections.
MAX_CONNECTIONS: Final = 4096
MAX_OF_SOURCE: Final = 128
MAX_UNAUTHENTICATED: Final = 1024
MAX_WITH_NEW: Final = (
    MAX_UNAUTHENTICATED + MAX_UNAUTHENTICATED // 2
)  # including those that are new since the last check
MAX_IDLE_OF_CALLER: Final = 256  # idle connections of one caller; more count as unauthenticated
AUTHENTICATED_FOR_S: Final = 60.0
PERIOD_S: Final = 0.2  # time between a new connection and the check
# Without a notice. Then only the time since a caller's last call changes, whose bound is a minute, and few
# connections can have arrived: grpc accepts some before the event loop notices them.
_CALM_PERIOD_S: Final = 5.0
_FLOODED_PERIOD_S: Final = 0.05  # the period while unauthenticated peers open more than their bound
_PAUSE_S: Final = 0.02
_FEW_OTHERS: Final = 64
_FEW_DESCRIPTORS: Final = 256


class NewConnections:
    """Watches the sockets that this process listens on; grpc accepts the connections.

    A connection makes its listening socket readable until it is accepted. The first one starts a period;
    ``arrived`` is called at its end, when the connections of the period have been accepted or are noticed
    again. So a flood costs one call per period. A connection that is accepted before the event loop polls
    goes unnoticed: the caller also needs a periodic check.
    """

    def __init__(self, arrived: Callable[[], None]) -> None:
        self._arrived = arrived
        self._listening: list[int] = []
        self._period_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, port: int, period_s: float) -> bool:
        """Watch until ``stop``. Return False if this process has no listening socket of the port."""
        self.stop()
        self._listening, self._period_s = listening(port), period_s
        self._add_readers()
        return bool(self._listening)

    def stop(self) -> None:
        """Stop watching. Call it before the sockets close: their numbers may be used again."""
        self._remove_readers()
        self._listening = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _add_readers(self) -> None:
        for descriptor in self._listening:
            asyncio.get_running_loop().add_reader(descriptor, self._readable)

    def _remove_readers(self) -> None:
        for descriptor in self._listening:
            asyncio.get_running_loop().remove_reader(descriptor)

    def _readable(self) -> None:
        self._remove_readers()  # it stays readable until grpc accepts
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._period_over)

    def _period_over(self) -> None:
        self._timer = None
        self._add_readers()
        self._arrived()


def listening(port: int) -> list[int]:
    """Return the descriptors of this process's sockets that listen on a port."""
    return [found for found in map(int, os.listdir(_DESCRIPTORS)) if _listens(found, port)]


def _listens(descriptor: int, port: int) -> bool:
    try:
        # Given family and kind, the constructor does not query the system.
        borrowed = socket.SocketType(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)
    except OSError:
        return False
    try:
        address = borrowed.getsockname()
        is_listening = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(is_listening) and isinstance(address, tuple) and address[1:2] == (port,)
    except OSError:
        return False
    finally:
        borrowed.detach()


class Idle(NamedTuple):
    """A connection after its last call of an authenticated caller."""

    since_s: float
    caller: str


class Connections:
    """Records which connections carry calls of authenticated callers, or did in the last minute, and closes
    others.

    The idle connections of a caller are bounded. A connection is named as ``context.peer()`` names it.
    """

    def __init__(
        self, count: Callable[[str], None] = lambda reason: None, *, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """``count`` is called with the reason (surplus, share or unread) for each connection that is closed.

        ``max_connections``: the limit of the port. One source has at most its share of it.
        """
        self._count = count
        self._share = share_of(max_connections)
        self._running: dict[str, int] = {}
        self._idle: dict[str, Idle] = {}
        self._seen: set[str] = set()  # peers of the last check
        self._to_close: set[str] = set()
        self._wanted = asyncio.Event()
        self._since_s: dict[str, float] = {}
        self._check_above = _FEW_OTHERS
        self._listed = 0  # descriptors at the last check
        self._period_s = self._calm_s = PERIOD_S
        self._arrivals = NewConnections(self._wanted.set)

    def begin(self, peer: str) -> None:
        """Record that an authenticated caller's RPC runs on this connection until ``end``."""
        self._running[peer] = self._running.get(peer, 0) + 1

    def end(self, peer: str, caller: str) -> None:
        """``caller``: its idle connections are bounded together. Empty for a role, which has no bound."""
        left = self._running[peer] - 1
        if left:
            self._running[peer] = left
        else:
            del self._running[peer]
            self._idle[peer] = Idle(_now_s(), caller)

    def close_soon(self, peer: str) -> None:
        """Close this connection soon, unless an authenticated caller uses it too."""
        self._to_close.add(peer)
        self._wanted.set()

    async def guard(self, clock: Clock, port: Callable[[], int]) -> None:
        """Enforce the bounds until cancelled. ``port`` returns the server's port, 0 before it starts."""
        while not port():
            await clock.sleep(PERIOD_S)
        try:
            self._watch_arrivals(port())
            while True:
                await clock.sleep(_PAUSE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._period_s):
                        await self._wanted.wait()
                self._wanted.clear()
                try:
                    await self._check(port())
                except OSError as error:  # no descriptor is left for the check, or the folder does not exist
                    log.warning("connections.not_inspected", error=error.strerror)
                    await clock.sleep(10 * PERIOD_S)
        finally:
            self._arrivals.stop()

    def port_closes(self) -> None:
        """Call this before the server closes its port."""
        self._arrivals.stop()

    def _watch_arrivals(self, port: int) -> None:
        """Check on new connections where the system shows them, else periodically."""
        try:
            is_watched = self._arrivals.watch(port, PERIOD_S)
        except OSError as error:
            log.warning("connections.arrivals_not_watched", error=error.strerror)
            is_watched = False
        self._calm_s = _CALM_PERIOD_S if is_watched else PERIOD_S

    async def _check(self, port: int) -> None:
        now_s = _now_s()
        for peer in [
            peer for peer, idle in self._idle.items() if idle.since_s <= now_s - AUTHENTICATED_FOR_S
        ]:
            del self._idle[peer]
        self._period_s = self._calm_s
        # The list costs less than a thread's turn if there are few descriptors.
        few = self._listed < _FEW_DESCRIPTORS
        descriptors = os.listdir(_DESCRIPTORS) if few else await asyncio.to_thread(os.listdir, _DESCRIPTORS)
        self._listed = len(descriptors)
        # Connections that the last check did not see may have ended: they explain no descriptor.
        others = len(descriptors) - len(self._seen & (self._running.keys() | self._idle.keys()))
        if others <= self._check_above and len(descriptors) <= self._share and not self._to_close:
            return
        found = await asyncio.to_thread(connected, port, descriptors)
        self._seen = set(found)
        self._idle = {peer: idle for peer, idle in self._idle.items() if peer in found}
        for peer in idle_above(self._idle, MAX_IDLE_OF_CALLER):
            del self._idle[peer]
        authenticated = self._running.keys() | self._idle.keys()
        unread, self._to_close = self._to_close & found.keys() - authenticated, set()
        seen_s, self._since_s = self._since_s, {}
        for peer in found:
            self._since_s[peer] = seen_s.get(peer, now_s)
        unauthenticated = {
            peer: since_s for peer, since_s in self._since_s.items() if peer not in authenticated
        }
        surplus = unauthenticated_surplus(unauthenticated, now_s) - unread
        staying = {peer: self._since_s[peer] for peer in found.keys() - surplus - unread}
        over = above_share(staying, self._running.keys(), self._share)
        self._check_above = (
            _FEW_OTHERS
            if surplus or unread
            else len(descriptors) - len(self._seen & authenticated) + _FEW_OTHERS // 2
        )
        self._period_s = _FLOODED_PERIOD_S if surplus else PERIOD_S
        ended = surplus | unread | over
        if ended:
            await asyncio.to_thread(shut, {peer: found[peer] for peer in ended})
            for peers, reason in ((surplus, "surplus"), (unread, "unread"), (over, "share")):
                for _ in peers:
                    self._count(reason)
            log.warning(
                "connections.shut",
                surplus=len(surplus),
                unread=len(unread),
                share=len(over),
                left=len(found) - len(ended),
            )


def unauthenticated_surplus(since_s: Mapping[str, float], now_s: float) -> set[str]:
    """Return the connections to close of those without a call of an authenticated caller.

    One that is new since ``now_s`` may still authenticate, so it stays unless very many are new: only a part
    of their memory is ever returned.
    """
    settled = {peer: first_s for peer, first_s in since_s.items() if first_s < now_s}
    surplus = surplus_of(settled, of_source=MAX_OF_SOURCE, in_all=MAX_UNAUTHENTICATED)
    left = {peer: first_s for peer, first_s in since_s.items() if peer not in surplus}
    return surplus | surplus_of(left, of_source=MAX_WITH_NEW, in_all=MAX_WITH_NEW)


def surplus_of(since_s: Mapping[str, float], *, of_source: int, in_all: int) -> set[str]:
    """Return the connections to close so that no source has more than ``of_source`` and the total is
    ``in_all``.

    The oldest of a source are closed first. The sources with most connections lose most for the total.
    """
    by_source: defaultdict[str, list[str]] = defaultdict(list)
    for peer in sorted(since_s, key=lambda peer: (-since_s[peer], peer)):
        by_source[source_of(peer)].append(peer)
    share = of_source
    while share and sum(min(share, len(peers)) for peers in by_source.values()) > in_all:
        share -= 1
    return {peer for peers in by_source.values() for peer in peers[share:]}


def idle_above(idle: Mapping[str, Idle], most: int) -> list[str]:
    """Return the connections of each caller beyond its ``most``, those idle for longest."""
    by_caller: defaultdict[str, list[str]] = defaultdict(list)
    for peer in sorted(idle, key=lambda peer: (-idle[peer].since_s, peer)):
        if idle[peer].caller:
            by_caller[idle[peer].caller].append(peer)
    return [peer for peers in by_caller.values() for peer in peers[most:]]


def above_share(since_s: Mapping[str, float], busy: Container[str], share: int) -> set[str]:
    """Return the connections to close so that no source has more than ``share``, authenticated or not.

    Connections without a call of an authenticated caller are closed first, from the oldest; then the newest
    others.
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
    """Return the source of a connection with this grpc name, as ``runtime.connections`` defines it."""
    kind, _, address = peer.partition(":")
    if kind != "ipv6":
        return peer.rpartition(":")[0]
    host = address.rpartition(":")[0].replace("%5B", "").replace("%5D", "").replace("%25", "%")
    return connections.source_of((host,))


def connected(port: int, descriptors: list[str]) -> dict[str, int]:
    """Return the accepted connections of a port: the peer's name and the descriptor."""
    found: dict[str, int] = {}
    for descriptor in map(int, descriptors):
        if peer := _peer_at(descriptor, port):
            found[peer] = descriptor
    return found


def shut(peers: Mapping[str, int]) -> None:
    """Shut down these connections. A descriptor that another connection uses by now stays open."""
    for peer, descriptor in peers.items():
        try:
            # a duplicate cannot be reused by another connection meanwhile
            mine = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        with mine:
            try:
                if _name(mine.getpeername()) == peer:
                    mine.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


def _peer_at(descriptor: int, port: int) -> str:
    """Return the peer of the connection at a descriptor, or "" when it is not of this port."""
    try:
        # Given family and kind, the constructor does not query the system, which would take most of the time.
        borrowed = socket.SocketType(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)
    except OSError:
        return ""
    try:
        address = borrowed.getsockname()
        if not isinstance(address, tuple) or not isinstance(address[0], str) or address[1] != port:
            return ""  # other kinds of sockets have a text or numbers as address
        return _name(borrowed.getpeername())
    except OSError:  # a listening socket, or one that has just ended
        return ""
    finally:
        borrowed.detach()


def _name(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return grpc's name of a peer."""
    host, port = address[0], address[1]
    if ":" not in host:
        return f"ipv4:{host}:{port}"
    mapped = ipaddress.IPv6Address(host.partition("%")[0]).ipv4_mapped
    return f"ipv4:{mapped}:{port}" if mapped else f"ipv6:%5B{host.replace('%', '%25')}%5D:{port}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()


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
