"""Changes of a running installation: requests to its supervisor, over a socket that only its user reaches.

A request is one JSON line, ``{"workers": number}``; the response is messages as of ``PipeProgress``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from fairway.cli.errors import CliError
from fairway.cli.fleet.progress import (
    Phase,
    PhaseEvent,
    SharedProgress,
    StartProgress,
    failed_message,
    outcome_of,
    read_messages,
)
from fairway.cli.state import Endpoints

_REQUEST_S: Final = 5.0
_MAX_REQUEST_BYTES: Final = 1024
_BACKLOG: Final = 8


class _SocketProgress:
    """Sends events; one that does not fit the socket's buffer is dropped: the supervisor never waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def event(self, name: str, phase: Phase, detail: str = "") -> None:
        with contextlib.suppress(OSError):
            self._connection.send(_line({"event": asdict(PhaseEvent(name, phase, detail))}))

    def close(self) -> None:
        """Do nothing: there is no live display."""


async def serve_changes(
    path: Path, progress: SharedProgress, change: Callable[[int], Awaitable[Endpoints]]
) -> None:
    """Apply one request after the other until cancelled."""
    path.unlink(missing_ok=True)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.setblocking(False)
        door.bind(str(path))
        door.listen(_BACKLOG)
        try:
            while True:
                connection, _ = await loop.sock_accept(door)
                with connection:
                    await _answer(connection, progress, change)
        finally:
            path.unlink(missing_ok=True)


async def _answer(
    connection: socket.socket, progress: SharedProgress, change: Callable[[int], Awaitable[Endpoints]]
) -> None:
    loop, listener = asyncio.get_running_loop(), _SocketProgress(connection)
    answer: dict[str, object]
    progress.listeners.append(listener)
    try:
        async with asyncio.timeout(_REQUEST_S):
            request = json.loads(await loop.sock_recv(connection, _MAX_REQUEST_BYTES))
        answer = {"ready": asdict(await change(int(request["workers"])))}
    except CliError as exc:
        answer = failed_message(exc)
    except (TimeoutError, OSError, ValueError, KeyError, TypeError) as exc:
        answer = failed_message(CliError("CHANGE_FAILED", f"the change failed: {exc!r}"))
    finally:
        progress.listeners.remove(listener)
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_REQUEST_S):
            await loop.sock_sendall(connection, _line(answer))


def request_workers(path: Path, count: int, progress: StartProgress) -> Endpoints:
    """Return the endpoints once the installation has ``count`` workers. Blocks. Raises CliError."""
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.closing(connection):
            connection.connect(str(path))
            connection.sendall(_line({"workers": count}))
            for message in read_messages(connection.detach()):
                if (outcome := outcome_of(message, progress)) is not None:
                    return outcome[0]
    except OSError as exc:
        raise _lost(f"{exc.strerror} ({path})") from exc
    raise _lost("it ended meanwhile")


def _lost(why: str) -> CliError:
    return CliError(
        "SUPERVISOR_LOST",
        f"the supervisor does not change the installation: {why}",
        next_step="`fairway status` shows what runs; `fairway down`, then the same command",
    )


def _line(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"
