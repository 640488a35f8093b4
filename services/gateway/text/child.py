"""The gateway's end of one text process: starts it, sends orders within cost limits, kills and reaps it.

The check of a version's text files loads them once in a process of its own, as a gateway does. The registry
runs it before it creates a version, a worker before the version is READY. It finds files that a gateway could
not load, with the same bounds and the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from services.core.errors import (
    ConstraintRefused,
    FailedPrecondition,
    FairwayError,
    InternalError,
    InvalidInput,
    Unavailable,
)
from services.gateway.text.messages import (
    EXIT_MEMORY,
    EXIT_PANIC,
    LENGTH,
    MAX_MESSAGE_BYTES,
    Answer,
    Loaded,
    LoadText,
    Order,
    TextRefused,
    decode_answer,
    encode_message,
    error_of,
)
from services.ports.clock import Clock
from services.runtime.process.child import bare_environment, wait_end
from services.runtime.supervisor import Supervisor

TEXT_MODULE: Final = ("-P", "-m", "services.gateway.text.process")


class Cause(StrEnum):
    """Why a text process ended."""

    CPU = "cpu"  # the text exceeded its processor time
    MEMORY = "memory"  # the text exceeded its memory; some native libraries abort on a failed allocation
    PANIC = "panic"  # a library failed on it
    FAULT = "fault"  # a native library accessed an invalid address; some do where an allocation failed
    HUNG = "hung"  # no answer, although processor time is left
    CRASHED = "crashed"
    STOPPED = "stopped"  # it was not needed


class ProcessEnded(Exception):
    """The process ended before it answered."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class TextProcess(asyncio.Protocol):
    """One process from ``start`` to the return of ``wait``. It takes one order at a time."""

    def __init__(self, clock: Clock, *, nice: bool) -> None:
        self.nice = nice
        self.ready = False  # the version is loaded
        self.idle_since_s = 0.0
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None  # our end of the channel until ``connect``
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
        """Start the process; this blocks the event loop for about half a millisecond. Raises Unavailable.

        From here on one task awaits ``wait``, which ends and reaps the process. ``Popen`` uses vfork:
        ``worker/slots/engine_process.py`` states why nothing else and no thread may.
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
                        stderr=subprocess.DEVNULL,  # a library's error output may contain a prompt
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

        On cancellation the loop closes the socket; before ``connect``, ``discard`` does.
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

    def send_order(self, order: Order, *, patience_s: float) -> asyncio.Future[Answer]:
        """Send an order; return the future of its answer or of ProcessEnded; overdue after ``patience_s``."""
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
        """End the process now; ``wait`` returns the cause of the first call."""
        self._cause = self._cause or cause
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def wait(self) -> Cause:
        """Return why the process ended, once it ended and is reaped. Cancellation kills the process."""
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
        """End and reap the process now, regardless of waiters: no zombie remains. Idempotent.

        Blocks while a running process releases its memory, so it is only for a gateway that shuts down.
        Elsewhere ``kill`` ends the process, and ``wait`` returns when it ended.
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
        if answer is None or answer.done():  # cancelled: no task waits for it
            return
        self.idle_since_s = self._clock.monotonic_s()
        try:
            answer.set_result(decode_answer(data))
        except msgspec.DecodeError:
            self._answer = answer
            self.kill(Cause.CRASHED)


def own(supervisor: Supervisor, name: str, process: TextProcess, reaping: Coroutine[Any, Any, None]) -> None:
    """Ensure that ``reaping``, which awaits ``wait``, ends with the started process, at the latest at
    shutdown.

    Raises RuntimeError, with the process ended, when this process already shuts down.
    """
    try:
        task = supervisor.spawn(f"{name} {process.pid}", reaping, shared=True)
    except RuntimeError:
        process.discard()
        raise
    task.add_done_callback(lambda _: process.discard())  # also when it is cancelled before it runs


def _not_started() -> Unavailable:
    return Unavailable("no process can be started to read texts", retry_after_s=1.0)


_FAILS: Final = (Cause.PANIC, Cause.FAULT)
_CAUSES: Final = {
    -signal.SIGPROF: Cause.CPU,
    -signal.SIGABRT: Cause.MEMORY,
    -signal.SIGSEGV: Cause.FAULT,
    -signal.SIGBUS: Cause.FAULT,
    EXIT_MEMORY: Cause.MEMORY,
    EXIT_PANIC: Cause.PANIC,
}


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The cost limits of one order, and the error of an order that exceeds them.

    ``memory_bytes`` is added to the memory of the loaded version.
    """

    load_cpu_s: float = 20.0
    read_cpu_s: float = 2.0
    read_cpu_s_per_mib: float = 4.0
    constraint_cpu_s: float = 0.25
    memory_bytes: int = 1024 * 1024 * 1024
    patience_s: float = 10.0  # the wait for an answer, plus ten times the processor time
    idle_s: float = 60.0

    def cpu_s(self, size_bytes: int) -> float:
        return self.read_cpu_s + self.read_cpu_s_per_mib * size_bytes / 2**20

    def wait_s(self, cpu_s: float) -> float:
        """The longest wait for an answer, with allowance for a busy machine."""
        return self.patience_s + 10 * cpu_s

    def read_error(self, cause: Cause, size_bytes: int) -> FairwayError:
        """Return the error of a text on which the process ended."""
        if cause in _FAILS:
            return FailedPrecondition("this model's tokenizer or chat template fails on this text")
        took = self._took(cause, self.cpu_s(size_bytes))
        if took:
            return InvalidInput(
                f"this model's tokenizer or chat template takes {took} for this text: shorten it or send "
                "token ids",
                field="prompt",
                cause=cause.value,
            )
        return Unavailable("the process that read the text was lost", retry_after_s=1.0)

    def picture_error(self, cause: Cause, size_bytes: int) -> FairwayError:
        """Return the error of a picture on which the process ended."""
        took = self._took(cause, self.cpu_s(size_bytes))
        if took or cause in _FAILS:
            why = f"takes {took}" if took else "fails"
            return InvalidInput(f"decoding the picture {why}", field="images", cause=cause.value)
        return Unavailable("the process that decoded the picture was lost", retry_after_s=1.0)

    def constraint_error(self, cause: Cause) -> FairwayError:
        """Return the error of a constraint on which the process ended."""
        took = self._took(cause, self.constraint_cpu_s)
        if took or cause in _FAILS:
            why = f"takes {took} to compile: simplify it" if took else "makes its compiler fail"
            return ConstraintRefused(f"the constraint {why}", field="sampling.constraint", cause=cause.value)
        return Unavailable("the process that compiled the constraint was lost", retry_after_s=1.0)

    def load_error(self, cause: Cause, version_digest: str) -> FairwayError:
        """Return the error of a version on whose files the process ended."""
        took = "the library fails on it" if cause in _FAILS else self._took(cause, self.load_cpu_s)
        if took:
            return FailedPrecondition(
                f"the version's tokenizer or chat template cannot be loaded: {took}",
                version_digest=version_digest,
                cause=cause.value,
            )
        return Unavailable("the process that loaded the version's tokenizer was lost", retry_after_s=1.0)

    def _took(self, cause: Cause, cpu_s: float) -> str:
        if cause is Cause.CPU:
            return f"more than {cpu_s:g} s of processor time"
        return f"more than {self.memory_bytes // 2**20} MiB of memory" if cause is Cause.MEMORY else ""


MAX_CHECKS: Final = 2


class TextProcessCheck:
    """Implements ``TextCheck``. Event loop only."""

    def __init__(self, clock: Clock, supervisor: Supervisor, limits: TextLimits | None = None) -> None:
        self._clock = clock
        self._supervisor = supervisor
        self._limits = limits if limits is not None else TextLimits()
        self._running = asyncio.Semaphore(MAX_CHECKS)

    async def fault(self, folder: Path, version_digest: str) -> str:
        """See ``TextCheck``."""
        limits = self._limits
        order = LoadText(str(folder), version_digest, limits.load_cpu_s, limits.memory_bytes)
        process = TextProcess(self._clock, nice=False)
        async with self._running:
            try:
                process.start()
                own(self._supervisor, "text check", process, self._reap(process))
                await process.connect()
                async with asyncio.timeout(limits.wait_s(limits.load_cpu_s)):
                    answer = await process.send_order(order, patience_s=limits.wait_s(limits.load_cpu_s))
            except ProcessEnded as ended:
                raise limits.load_error(ended.cause, version_digest) from None
            except TimeoutError:
                raise limits.load_error(Cause.HUNG, version_digest) from None
            finally:
                process.kill(Cause.STOPPED)
        match answer:
            case Loaded(model=model):
                return model.template_fault
            case TextRefused():
                raise error_of(answer)
        raise InternalError("no answer to Load")

    async def _reap(self, process: TextProcess) -> None:
        """Own a started process until it has ended."""
        await process.wait()


FREE_KILLS: Final = 2
FIRST_S: Final = 5.0
MOST_S: Final = 60.0
CALM_S: Final = 120.0  # time after which a count starts again
SUSPENDING_TENANTS: Final = 3
MAX_TENANTS: Final = 256


@dataclass(slots=True)
class _Count:
    kills: int
    last_s: float
    until_s: float


class Strikes:
    """Ended text processes of one version, by the tenant whose text ended them.

    One tenant's texts never suspend a version for the others; those of several tenants do.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def suspended_s(self, tenant: str, now_s: float) -> float:
        """Return for how long the tenant's texts are rejected; 0 when they are accepted."""
        if not self._counts:
            return 0.0
        left_s = [max(0.0, count.until_s - now_s) for count in self._counts.values()]
        if sum(1 for left in left_s if left) >= SUSPENDING_TENANTS:
            return max(left_s)
        mine = self._counts.get(tenant)
        return 0.0 if mine is None else max(0.0, mine.until_s - now_s)

    def killed(self, tenant: str, now_s: float) -> None:
        """Count a process that a text of the tenant ended."""
        self._counts = {name: count for name, count in self._counts.items() if now_s < count.last_s + CALM_S}
        count = self._counts.get(tenant)
        if count is None:
            if len(self._counts) >= MAX_TENANTS:
                del self._counts[min(self._counts, key=lambda name: self._counts[name].last_s)]
            count = self._counts[tenant] = _Count(0, now_s, 0.0)
        count.kills += 1
        count.last_s = now_s
        if count.kills > FREE_KILLS:
            count.until_s = now_s + min(MOST_S, FIRST_S * 2 ** (count.kills - FREE_KILLS - 1))
