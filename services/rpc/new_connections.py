"""New connections of a port as events, so that nothing has to poll for them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final

_DESCRIPTORS: Final = "/dev/fd"


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
