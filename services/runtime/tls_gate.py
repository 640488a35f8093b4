"""TLS on a TCP listener whose connections are bounded: a handshake begins only for an admitted one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from ssl import SSLContext

from services.runtime.connections import ConnectionTable


class TlsGate:
    """Makes the protocols of a listener. ``context`` returns the present certificate.

    A connection that completes no handshake within ``timeout_s`` is closed.
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


def _feed(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """Pass bytes to a protocol as a transport does."""
    while data:
        buffer = protocol.get_buffer(len(data))
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]
