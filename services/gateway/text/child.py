"""The gateway's end of one text process: started, asked, killed, reaped."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, Final

import msgspec

from services.core.errors import Unavailable
from services.gateway.text.messages import (
    EXIT_MEMORY,
    EXIT_PANIC,
    LENGTH,
    MAX_MESSAGE_BYTES,
    Answer,
    Order,
    decode_answer,
    encode_message,
)
from services.ports.clock import Clock
from services.runtime.process.child_end import wait_end
from services.runtime.process.child_process import bare_environment
from services.runtime.supervisor import Supervisor

TEXT_MODULE: Final = ("-m", "services.gateway.text.process")


class Cause(StrEnum):
    """Why a text process ended."""

    CPU = "cpu"  # the text took more processor time than it is given
    MEMORY = "memory"  # it took more memory; a native library that is refused some aborts
    PANIC = "panic"  # a library failed on it
    HUNG = "hung"  # no answer, without the processor time being used up
    CRASHED = "crashed"
    STOPPED = "stopped"  # it was not needed


class ProcessEnded(Exception):
    """The process ended before it answered."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class TextProcess(asyncio.Protocol):
    """One process from ``start`` to the return of ``wait``. It has one order at a time."""

    def __init__(self, clock: Clock, *, nice: bool) -> None:
        self.nice = nice
        self.ready = False  # the version is loaded
        self.idle_since_s = 0.0
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None  # until ``connect``
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answer: asyncio.Future[Answer] | None = None
        self._due_s = 0.0
        self._cause: Cause | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def idle(self) -> bool:
        return self.ready and self._answer is None and self._cause is None

    def start(self) -> None:
        """Start the process; the event loop is blocked for about half a millisecond. Raises Unavailable.

        From here on one task awaits ``wait``, which ends and reaps the process.
        ``Popen`` uses vfork: ``worker/slots/engine_process.py`` states why nothing else and no thread may.
        """
        command = [sys.executable, *TEXT_MODULE, *(("--nice",) if self.nice else ())]
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._process = subprocess.Popen(
                        [*command, "--fd", str(theirs.fileno())],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,  # what a library says of its failure may hold a prompt
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,
                        env=bare_environment() | {"TOKENIZERS_PARALLELISM": "false"},
                    )
                except BaseException:
                    ours.close()
                    raise
        except OSError as exc:
            raise _not_started() from exc
        self._socket = ours

    async def connect(self) -> None:
        """Open the transport to the started process. Raises Unavailable, or ProcessEnded.

        Cancelled, the loop closes the socket; before that ``discard`` does.
        """
        ours, self._socket = self._socket, None
        assert ours is not None, "the text process is not started, or connected"
        try:
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)
        except OSError as exc:
            raise _not_started() from exc
        if self._cause is not None:  # the process was ended meanwhile
            self._transport.abort()
            raise ProcessEnded(self._cause)

    def ask(self, order: Order, *, patience_s: float) -> asyncio.Future[Answer]:
        """Send an order and return its answer to come, or ProcessEnded; ``overdue`` after ``patience_s``."""
        assert self._answer is None, "a text process has one order at a time"
        assert self._transport is not None, "the text process is not started"
        self._answer = asyncio.get_running_loop().create_future()
        self._due_s = self._clock.monotonic_s() + patience_s
        data = encode_message(order)
        self._transport.writelines((LENGTH.pack(len(data)), data))
        return self._answer

    def overdue(self, now_s: float) -> bool:
        return self._answer is not None and now_s > self._due_s

    def kill(self, cause: Cause) -> None:
        """End the process now; ``wait`` returns the first cause that was given."""
        self._cause = self._cause or cause
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait(self) -> Cause:
        """Return why the process ended, once it did and is reaped. Cancelled, it kills the process."""
        process = self._process
        if process is None:
            return Cause.STOPPED
        try:
            await wait_end(process.pid, self._clock)
            self._cause = self._cause or _CAUSES.get(process.wait(), Cause.CRASHED)
            return self._cause
        finally:
            self.discard()

    def discard(self) -> None:
        """End and reap the process now, whoever waits for what: no zombie is left. Idempotent.

        Blocks while a process that did not end yet gives its memory back: only a process that shuts down does
        this to one. Elsewhere it is killed, and ``wait`` returns when it ended.
        """
        self.kill(Cause.STOPPED)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
        if self._socket is not None:
            self._socket.close()
        if self._transport is not None:
            self._transport.abort()
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(ProcessEnded(self._cause or Cause.STOPPED))

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if len(received) < LENGTH.size:
            return
        (length,) = LENGTH.unpack_from(received)
        if length > MAX_MESSAGE_BYTES:
            self.kill(Cause.CRASHED)
        elif len(received) >= LENGTH.size + length:
            self._received = bytearray()
            self._answered(received[LENGTH.size :])

    def _answered(self, data: bytearray) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():  # cancelled: nobody waits for it
            return
        self.idle_since_s = self._clock.monotonic_s()
        try:
            answer.set_result(decode_answer(data))
        except msgspec.DecodeError:
            self._answer = answer
            self.kill(Cause.CRASHED)


def own(supervisor: Supervisor, name: str, process: TextProcess, reaping: Coroutine[Any, Any, None]) -> None:
    """Have ``reaping``, which awaits ``wait``, end with the started process, at the latest at shutdown.

    Raises RuntimeError, and the process is gone, when this process shuts down already.
    """
    try:
        task = supervisor.spawn(f"{name} {process.pid}", reaping)
    except RuntimeError:
        process.discard()
        raise
    task.add_done_callback(lambda _: process.discard())  # also when it is cancelled before it runs


def _not_started() -> Unavailable:
    return Unavailable("no process can be started to read texts", retry_after_s=1.0)


_CAUSES: Final = {
    -signal.SIGPROF: Cause.CPU,
    -signal.SIGABRT: Cause.MEMORY,
    EXIT_MEMORY: Cause.MEMORY,
    EXIT_PANIC: Cause.PANIC,
}
