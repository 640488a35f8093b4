"""What an event loop offers besides callbacks, timers and tasks. A simulation has none of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class SimulationError(RuntimeError):
    """The program under simulation does something that a simulation cannot continue after."""


class OutsideWorld(SimulationError):
    """The program requests real I/O, a signal or a process."""


def _outside(name: str) -> Callable[..., Any]:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise OutsideWorld(f"{name}: a simulation has no real I/O, signals or processes")

    return refuse


class InsideLoop(asyncio.AbstractEventLoop):
    """An event loop that touches nothing outside."""

    add_reader = _outside("add_reader")  # type: ignore[assignment]
    add_signal_handler = _outside("add_signal_handler")  # type: ignore[assignment]
    add_writer = _outside("add_writer")  # type: ignore[assignment]
    connect_accepted_socket = _outside("connect_accepted_socket")
    connect_read_pipe = _outside("connect_read_pipe")
    connect_write_pipe = _outside("connect_write_pipe")
    create_connection = _outside("create_connection")
    create_datagram_endpoint = _outside("create_datagram_endpoint")
    create_server = _outside("create_server")
    create_unix_connection = _outside("create_unix_connection")
    create_unix_server = _outside("create_unix_server")
    get_exception_handler = _outside("get_exception_handler")
    get_task_factory = _outside("get_task_factory")
    getaddrinfo = _outside("getaddrinfo")
    getnameinfo = _outside("getnameinfo")
    remove_reader = _outside("remove_reader")
    remove_signal_handler = _outside("remove_signal_handler")
    remove_writer = _outside("remove_writer")
    sendfile = _outside("sendfile")
    set_debug = _outside("set_debug")
    set_default_executor = _outside("set_default_executor")
    set_exception_handler = _outside("set_exception_handler")
    set_task_factory = _outside("set_task_factory")
    sock_accept = _outside("sock_accept")
    sock_connect = _outside("sock_connect")
    sock_recv = _outside("sock_recv")
    sock_recv_into = _outside("sock_recv_into")
    sock_recvfrom = _outside("sock_recvfrom")
    sock_recvfrom_into = _outside("sock_recvfrom_into")
    sock_sendall = _outside("sock_sendall")
    sock_sendfile = _outside("sock_sendfile")
    sock_sendto = _outside("sock_sendto")
    start_tls = _outside("start_tls")
    subprocess_exec = _outside("subprocess_exec")
    subprocess_shell = _outside("subprocess_shell")
