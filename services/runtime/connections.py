"""The open connections of one TCP listener, bounded in total and by source.

A listener that rejects new connections when full can be blocked by a client that opens enough connections and
sends nothing. So here a new connection replaces an idle one, that is, one that waits for nothing from this
process. Connections that never presented a credential are closed first, those idle for longest before others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, Final

from services.core.limits import share_of

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_BYTES_ACKED: Final = struct.Struct("=Q")  # format of tcp_info's field in linux/tcp.h
_BYTES_ACKED_AT: Final = 120
_SITE_BITS: Final = 64  # the address bits that one IPv6 site controls itself

Transport = asyncio.WriteTransport


def head_problem(version: str, hosts: Sequence[bytes]) -> str:
    """Return why a request with this HTTP version and these Host headers is refused, or an empty text."""
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is no version that this port takes: send HTTP/1.1"
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return f"there are {len(hosts)} Host headers: send one"
    if hosts and not _HOST.fullmatch(hosts[0]):
        return "the Host header is no host with an optional port"
    return ""


def source_of(peername: object) -> str:
    """Return the unit that is limited as one source: an IPv4 address, or the network of an IPv6 site."""
    host = str(peername[0]) if isinstance(peername, tuple) and peername else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _SITE_BITS), strict=False))


def reset(transport: Transport) -> None:
    """Close a connection by RST, so that neither side keeps state of it."""
    peer = transport.get_extra_info("socket")
    if peer is not None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()


def accepted_bytes(transport: Transport) -> int:
    """Return how many of the bytes of a TCP connection its peer has acknowledged so far.

    Elsewhere than on Linux it is the negative count of bytes that wait in this process.
    """
    if not hasattr(socket, "TCP_INFO"):
        return -transport.get_write_buffer_size()
    size = _BYTES_ACKED.size + _BYTES_ACKED_AT
    state = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    return int(_BYTES_ACKED.unpack_from(state, _BYTES_ACKED_AT)[0])


@dataclass(slots=True)
class _Pool:
    """Open connections; those that may be closed are in the order in which they are closed."""

    open: int = 0
    unauthenticated: dict[Transport, None] = field(default_factory=dict)
    authenticated: dict[Transport, None] = field(default_factory=dict)

    def place(self, transport: Transport, *, busy: bool, authenticated: bool) -> None:
        """Put a connection last in its order. A busy one is in no order."""
        self.unauthenticated.pop(transport, None)
        self.authenticated.pop(transport, None)
        if not busy:
            (self.authenticated if authenticated else self.unauthenticated)[transport] = None

    def first(self) -> Transport | None:
        return next(iter(self.unauthenticated or self.authenticated), None)


class ConnectionTable:
    """Decides which connections stay open. Its methods take a connection's transport.

    At most ``max_connections`` are open, and at most ``max_per_source`` of one source. At most
    ``max_unauthenticated`` never presented a credential (default: all); one source has its share of these.
    """

    def __init__(
        self, max_connections: int, max_per_source: int, *, max_unauthenticated: int | None = None
    ) -> None:
        self.refused = 0  # new connections that were closed because all others were busy
        self.displaced = 0  # idle connections that were closed for a new one
        self._max_connections = max_connections
        self._max_per_source = max_per_source
        self._max_unauthenticated = max_connections if max_unauthenticated is None else max_unauthenticated
        self._max_unauthenticated_per_source = share_of(self._max_unauthenticated)
        self._all = _Pool()
        self._sources: dict[str, _Pool] = {}
        self._source_of: dict[Transport, str] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def admit(self, transport: Transport) -> bool:
        """Return whether a new connection may stay. If not, it was closed."""
        source = source_of(transport.get_extra_info("peername"))
        pool = self._sources.get(source)
        if pool is not None and (
            pool.open >= self._max_per_source
            or len(pool.unauthenticated) >= self._max_unauthenticated_per_source
        ):
            full = pool
        elif (
            self._all.open >= self._max_connections
            or len(self._all.unauthenticated) >= self._max_unauthenticated
        ):
            full = self._all
        else:
            full = None
        if full is not None:
            displaced = full.first()
            if displaced is None:
                self.refused += 1
                reset(transport)
                return False
            self.displaced += 1
            self.remove(displaced)
            reset(displaced)
        self._source_of[transport] = source
        for entered in (self._all, self._sources.setdefault(source, _Pool())):
            entered.open += 1
            entered.place(transport, busy=False, authenticated=False)
        return True

    def update(self, transport: Transport, *, busy: bool, authenticated: bool) -> None:
        """``busy``: the client waits for this process, so the connection stays."""
        source = self._source_of.get(transport)
        if source is not None:
            self._all.place(transport, busy=busy, authenticated=authenticated)
            self._sources[source].place(transport, busy=busy, authenticated=authenticated)

    def replace(self, before: Transport, after: Transport) -> bool:
        """Let the transport of a TLS connection take the place of its TCP one.

        Returns False when the connection was closed meanwhile.
        """
        source = self._source_of.pop(before, None)
        if source is None:
            after.abort()
            return False
        self._source_of[after] = source
        for pool in (self._all, self._sources[source]):
            pool.place(before, busy=True, authenticated=False)
            pool.place(after, busy=False, authenticated=False)
        return True

    def remove(self, transport: Transport) -> None:
        """Remove a connection that has ended. Idempotent."""
        source = self._source_of.pop(transport, None)
        if source is None:
            return
        for left in (self._all, self._sources[source]):
            left.open -= 1
            left.place(transport, busy=True, authenticated=False)
        if not self._sources[source].open:
            del self._sources[source]

    def check_integrity(self) -> None:
        """Assert that the counts match the connections."""
        assert self._all.open == len(self._source_of) == sum(pool.open for pool in self._sources.values())
        waiting = [
            transport
            for pool in self._sources.values()
            for transport in (*pool.unauthenticated, *pool.authenticated)
        ]
        assert len(waiting) == len(self._all.unauthenticated) + len(self._all.authenticated)
        assert all(transport in self._source_of for transport in waiting)


class TlsGate:
    """Makes the protocols of a TLS listener: a handshake begins only for an admitted connection.

    ``context`` returns the present certificate. A connection without a handshake after ``timeout_s`` is
    closed.
    """

    def __init__(self, table: ConnectionTable, context: Callable[[], SSLContext], timeout_s: float) -> None:
        self.table = table
        self.context = context
        self.timeout_s = timeout_s
        self.running: set[asyncio.Task[None]] = set()

    def protocol(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of a new connection: after the handshake it is passed to ``make``'s."""
        return _Gated(self, make)

    async def close(self) -> None:
        """End the handshakes that are not complete."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


class _Gated(asyncio.Protocol):
    """One connection until its handshake is complete."""

    def __init__(self, gate: TlsGate, make: Callable[[], asyncio.Protocol]) -> None:
        self._gate = gate
        self._make = make
        self._early = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._gate.table.admit(transport):
            task = asyncio.get_running_loop().create_task(self._shake(transport))
            self._gate.running.add(task)
            task.add_done_callback(self._gate.running.discard)

    def data_received(self, data: bytes) -> None:
        """Keep what arrives before the next protocol is set: at most what the loop reads at once."""
        self._early += data

    async def _shake(self, transport: asyncio.Transport) -> None:
        loop, gate, secured = asyncio.get_running_loop(), self._gate, None
        starting = loop.start_tls(
            transport, self, gate.context(), server_side=True, ssl_handshake_timeout=gate.timeout_s
        )
        task = loop.create_task(starting)
        try:
            with contextlib.suppress(OSError, TimeoutError):  # the peer left, or it is no TLS client
                await asyncio.sleep(0)  # the task has set the next protocol by then, and paused the reading
                first, self._early = self._early, b""
                if first:  # uvloop reads from the start, so that the first part of the handshake is here
                    loop.call_soon(_feed, transport.get_protocol(), first)
                secured = await task
        finally:
            task.cancel()
            if secured is None:
                gate.table.remove(transport)
                transport.abort()
        if secured is not None and gate.table.replace(transport, secured):
            protocol = self._make()
            secured.set_protocol(protocol)
            protocol.connection_made(secured)
            if self._early:
                protocol.data_received(self._early)


def _feed(protocol: Any, data: bytes) -> None:
    """Pass bytes to a buffered protocol as a transport does."""
    while data:
        buffer = protocol.get_buffer(len(data))
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]
