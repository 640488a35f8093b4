"""The engine process: ``python -P -m services.worker.engine.process --config JSON``.

With ``--config -`` it imports what an engine needs, and then reads its configuration as a line of its
standard input; an end without one ends the process.

It connects to its agent, loads, and steps until it receives a stop or loses the agent. Two threads: the
reader feeds commands, the main thread does everything else. Prompts and outputs are never logged.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NoReturn, Protocol

import msgspec
import structlog

from fairway.log_stream import LogStream
from services.runtime.process.child import die_with_parent
from services.runtime.telemetry.logging import LineBudget
from services.worker.engine.core import DuplicateHandle
from services.worker.engine.load.loading import Report, import_engine, load
from services.worker.engine.unsupported import REFUSALS, TooLittleMemory
from services.worker.engine_protocol import (
    LENGTH_PREFIX,
    MAX_MESSAGE_BYTES,
    OUT_OF_MEMORY,
    Command,
    EngineConfig,
    EngineHeartbeat,
    EngineMessage,
    LoadFailed,
    Progress,
    Ready,
    Resized,
    Shutdown,
    StepLink,
    Submit,
    decode_command,
    encode,
)

HEARTBEAT_S: Final = 1.0

# glibc's malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, whose greatest value is 32 MiB.
_REFUSED_WITHOUT_MEMORY: Final = b"command.refused: MemoryError\n"  # writing it allocates nothing
MALLOC_OPTIONS: Final = ((-1, 256 << 20), (-2, 64 << 20), (-3, 32 << 20))

log = structlog.get_logger()
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
    """The Unix socket to the agent: one reader thread that feeds a bounded inbox, one writer.

    The reader thread owns receiving and the inbox's tail; the engine thread owns sending and the inbox's
    head. The process must not outlive its agent, so an end of file ends it from the reader thread, whatever
    the engine thread is doing, loading included.

    ``on_end`` (with whether a Shutdown came before) and ``on_malformed`` are called in the reader
    thread. One of them is called, once, and need not return.
    """

    def __init__(
        self,
        channel: socket.socket,
        *,
        on_end: Callable[[bool], None],
        on_malformed: Callable[[Exception], None],
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
        except (MalformedCommand, MemoryError) as error:  # the stream cannot be followed without a command
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


class EngineExitCode(IntEnum):
    DONE = 0
    BAD_INPUT = 2  # the configuration or a command cannot be parsed
    LOAD_FAILED = 3
    STEP_FAILED = 4
    ORPHANED = 5  # the agent is gone
    OUT_OF_MEMORY = 6  # a step did not get its memory


class AgentGone(Exception):
    """The other end of the socket is closed."""


class StepLoop(Protocol):
    """What the process runs between commands: an engine, or batches of rows."""

    def connect(self, link: StepLink) -> None:
        """Receive the link, before the first step."""

    @property
    def has_work(self) -> bool: ...

    def apply(self, command: Command) -> None: ...

    def step(self) -> EngineMessage: ...

    def heartbeat(self) -> EngineHeartbeat: ...

    def resized(self) -> Resized | None: ...

    def check_integrity(self) -> None: ...


Loader = Callable[[EngineConfig, Report], tuple[StepLoop, Ready]]


def main(arguments: list[str], load: Loader = load) -> int:
    """Run until the end; return the exit code. ``load`` returns the engine that is served."""
    sys.stdout = sys.stderr = LogStream.on(sys.stderr)  # an agent that reads no log holds up no step
    _configure_logging()
    die_with_parent()
    _keep_freed_memory()
    parser = argparse.ArgumentParser(prog="services.worker.engine.process")
    parser.add_argument("--config", required=True, help="an EngineConfig as JSON; - reads it")
    given = parser.parse_args(arguments).config
    if given == "-":
        import_engine()
        given = sys.stdin.buffer.readline()
        if not given:
            return EngineExitCode.DONE
    try:
        config = msgspec.json.decode(given, type=EngineConfig)
        channel = connect(config.socket_path, sleep=time.sleep)
    except msgspec.DecodeError as error:
        log.error("config.refused", message=str(error))
        return EngineExitCode.BAD_INPUT
    except OSError as error:
        log.error("agent.not_reached", error=type(error).__name__)
        return EngineExitCode.ORPHANED
    connection = AgentConnection(channel, on_end=_exit_at_end, on_malformed=_exit_malformed)
    try:
        return _run(config, connection, load)
    except AgentGone:
        log.warning("agent.lost")
        return EngineExitCode.ORPHANED


def _run(
    config: EngineConfig,
    connection: AgentConnection,
    load: Loader,
) -> EngineExitCode:
    try:
        engine, ready = load(config, lambda phase, ratio: _send(connection, Progress(phase, ratio)))
    except AgentGone:
        raise
    except Exception as error:  # the process's top: whatever it is, the agent receives it
        reason = error.reason if isinstance(error, REFUSALS) else _reason(error)
        log.error("model.load_failed", reason=reason, exc_info=not isinstance(error, REFUSALS))
        message = str(error) if isinstance(error, REFUSALS) else type(error).__name__
        needed = (0, 0, 0)
        if isinstance(error, TooLittleMemory):
            needed = (error.weight_bytes, error.working_bytes, error.kv_bytes)
        _send(connection, LoadFailed(reason, message, *needed))
        return EngineExitCode.LOAD_FAILED
    gc.freeze()  # what was loaded stays: collections need not walk it
    _send(connection, ready)
    log.info(
        "model.loaded",
        kv_blocks_total=ready.kv_blocks_total,
        weight_bytes=ready.weight_bytes,
        working_bytes=ready.working_bytes,
    )
    return step_until_stopped(engine, connection, lines_per_s=config.request_log_per_s)


def step_until_stopped(
    engine: StepLoop, connection: AgentConnection, *, lines_per_s: float = 0.0
) -> EngineExitCode:
    """Serve, and return how that ended. Raises AgentGone."""
    try:
        serve(engine, connection, clock=time.monotonic, lines=LineBudget(time.monotonic, lines_per_s))
    except AgentGone:
        raise
    except DuplicateHandle as error:
        log.error("command.refused", message=str(error))
        return EngineExitCode.BAD_INPUT
    except Exception as error:  # the agent isolates the sequence that caused it
        log.exception("step.failed")
        lacked = _reason(error) == OUT_OF_MEMORY
        return EngineExitCode.OUT_OF_MEMORY if lacked else EngineExitCode.STEP_FAILED
    log.info("engine.stopped")
    return EngineExitCode.DONE


def serve(
    engine: StepLoop,
    connection: AgentConnection,
    *,
    clock: Callable[[], float],
    lines: LineBudget | None = None,
) -> None:
    """Apply commands between steps until Shutdown. Raises AgentGone, DuplicateHandle and a step's errors."""
    link = _Link(engine, connection, lines)
    engine.connect(link)
    spoken_s = clock()
    checked_step = -1
    while True:
        if (resized := engine.resized()) is not None:
            link.send(resized)
            spoken_s = clock()
        if engine.has_work:
            link.receive()
        else:
            link.apply(connection.receive(max(0.0, spoken_s + HEARTBEAT_S - clock())))
        if link.stops:
            return
        if engine.has_work:
            link.send(engine.step())
            spoken_s = clock()
        elif clock() >= spoken_s + HEARTBEAT_S:
            beat = engine.heartbeat()
            link.send(beat)
            spoken_s = clock()
            if beat.step != checked_step:  # walks all blocks: once per idle spell
                engine.check_integrity()
                checked_step = beat.step


class _Link:
    """Implements ``StepLink``. ``stops``: a Shutdown was received; later commands are dropped."""

    def __init__(self, engine: StepLoop, connection: AgentConnection, lines: LineBudget | None) -> None:
        self._engine = engine
        self._connection = connection
        self._lines = lines
        self.stops = False

    def receive(self) -> None:
        self.apply(self._connection.receive_ready())

    def apply(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self.stops = self.stops or isinstance(command, Shutdown)
            if self.stops:
                return
            self._engine.apply(command)
            if self._lines is not None and isinstance(command, Submit):
                _log_taken(command, self._lines)

    def send(self, message: EngineMessage) -> None:
        _send(self._connection, message)


def _log_taken(command: Submit, lines: LineBudget) -> None:
    """Log the request of a handle: a crash names handles."""
    if lines.take():
        log.info(
            "sequence.taken",
            request_id=command.request_id,
            handle=command.handle,
            prompt_tokens=len(command.prompt.ids),
            produced_tokens=len(command.produced_ids),
        )


def _send(connection: AgentConnection, message: EngineMessage) -> None:
    try:
        connection.send(message)
    except OSError as error:
        raise AgentGone from error


def _reason(error: Exception) -> str:
    """Return a stable word for a failure that is not ours to explain."""
    text = str(error).lower()
    lacked = isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text
    return OUT_OF_MEMORY if lacked else "internal"


def _exit_at_end(was_shutdown: bool) -> NoReturn:
    """End the process from the reader thread: the main thread may be in a long load or a full socket."""
    if not was_shutdown:
        log.warning("agent.lost")
    os._exit(EngineExitCode.DONE if was_shutdown else EngineExitCode.ORPHANED)


def _exit_malformed(error: Exception) -> NoReturn:
    try:
        log.error("command.refused", message=str(error) or type(error).__name__)
    except MemoryError:
        os.write(2, _REFUSED_WITHOUT_MEMORY)
    finally:
        os._exit(EngineExitCode.BAD_INPUT)


def _keep_freed_memory() -> None:
    """Let the allocator keep what a step frees: tensors of some MB would be faulted in again at each use."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc has it; others do without
        for option, value in MALLOC_OPTIONS:
            library.mallopt(option, value)


def _configure_logging() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # An exit of vLLM waits for its ranks, clients for it.
    if status in (EngineExitCode.STEP_FAILED, EngineExitCode.OUT_OF_MEMORY):
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
