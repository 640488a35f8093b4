"""The Unix socket to the agent: one reader thread that feeds a bounded inbox, one writer.

Ownership: the reader thread owns receiving and the inbox's tail; the engine thread owns sending and the
inbox's head. The process must not outlive its agent, so an end of file ends it from the reader thread,
whatever the engine thread is doing, loading included.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from services.worker.engine_protocol import (
    LENGTH_PREFIX,
    MAX_MESSAGE_BYTES,
    Command,
    EngineMessage,
    Shutdown,
    decode_command,
    encode,
)

INBOX_MESSAGES: Final = 4096
CONNECT_ATTEMPTS: Final = 50
CONNECT_PAUSE_S: Final = 0.1
SEND_BUFFER_BYTES: Final = 1 << 20


class MalformedCommand(Exception):
    """What the agent sent is not a command; the stream cannot be trusted from here on."""


def connect(path: str, *, sleep: Callable[[float], None]) -> socket.socket:
    """Return a connected socket. Raises OSError when the agent does not listen within about 5 seconds."""
    for attempt in range(CONNECT_ATTEMPTS):
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            channel.connect(path)
            return channel
        except OSError:
            channel.close()
            if attempt == CONNECT_ATTEMPTS - 1:
                raise
        sleep(CONNECT_PAUSE_S)
    raise AssertionError("unreachable")


class AgentConnection:
    """``on_end`` (with whether a Shutdown came before) and ``on_malformed`` are called in the reader thread.

    One of them is called, once, and need not return.
    """

    def __init__(
        self,
        channel: socket.socket,
        *,
        on_end: Callable[[bool], None],
        on_malformed: Callable[[MalformedCommand], None],
    ) -> None:
        self._channel = channel
        self._on_end = on_end
        self._on_malformed = on_malformed
        self._inbox: queue.Queue[Command] = queue.Queue(INBOX_MESSAGES)
        threading.Thread(target=self._read, name="engine-reader", daemon=True).start()

    def send(self, message: EngineMessage) -> None:
        """The kernel has the message; blocks while the agent is slow. Raises OSError when it is gone."""
        self._channel.sendall(encode(message))

    def receive_ready(self) -> list[Command]:
        """Return the commands that have arrived, without waiting."""
        commands: list[Command] = []
        for _ in range(self._inbox.qsize()):
            commands.append(self._inbox.get_nowait())
        return commands

    def receive(self, timeout_s: float) -> list[Command]:
        """Wait for a command for at most that long, then return those that have arrived."""
        with contextlib.suppress(queue.Empty):
            return [self._inbox.get(timeout=timeout_s), *self.receive_ready()]
        return []

    def _read(self) -> None:
        was_shutdown = False
        try:
            with self._channel.makefile("rb") as stream:
                while (command := _read_command(stream.read)) is not None:
                    was_shutdown = was_shutdown or isinstance(command, Shutdown)
                    self._inbox.put(command)
        except MalformedCommand as error:
            self._on_malformed(error)
            return
        except OSError:
            pass  # a reset is an end too
        self._on_end(was_shutdown)


def _read_command(read: Callable[[int], bytes]) -> Command | None:
    """Return the next command, or None at the end of the stream. Raises MalformedCommand."""
    prefix = read(LENGTH_PREFIX.size)
    if len(prefix) < LENGTH_PREFIX.size:
        return None
    (length,) = LENGTH_PREFIX.unpack(prefix)
    if length > MAX_MESSAGE_BYTES:
        raise MalformedCommand(f"a message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
    body = read(length)
    if len(body) < length:
        return None
    try:
        return decode_command(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedCommand(f"{length} bytes are no command: {type(error).__name__}") from error
