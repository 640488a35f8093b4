"""One engine process: starts it, exchanges messages with it, monitors it and stops it.

The agent listens on a socket in a directory that only its user can enter; the engine connects. The engine
is its own process group and ends when the socket closes, so it does not outlive the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec
import structlog

from fairway.engines.environment import engine_variables, interpreter_of
from fairway.task_group import TaskGroup
from services.core.errors import EngineNotInstalled, FailedPrecondition
from services.core.poison.suspicion import LossCause
from services.ports.clock import Clock
from services.runtime.process.child import is_stopped, wait_end
from services.runtime.process.folders import temporary_folder
from services.runtime.process.machine import memory_kills
from services.runtime.process.shared_memory import sweep
from services.runtime.supervisor import Supervisor
from services.worker.engine_protocol import (
    LENGTH_PREFIX,
    MAX_MESSAGE_BYTES,
    AdapterLoaded,
    AdapterRefused,
    BatchRaised,
    BatchRan,
    Command,
    EngineConfig,
    EngineHeartbeat,
    Event,
    LoadFailed,
    Progress,
    Ready,
    ReplaceWeights,
    Resized,
    Shutdown,
    Stepped,
    WeightsRefused,
    WeightsReplaced,
    decode_event,
    encode,
)
from services.worker.policy.engine_failures import ABANDON_STEPS, STEP_LACKED_MEMORY, cause_of
from services.worker.slots.log_pipe import LogPipe
from services.worker.slots.spare_engine import SpareEngine
from services.worker.step_page import StepPage

log = structlog.get_logger()

_PAGE: Final = "steps"
MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path holds 108 bytes with the terminating zero
CHECK_S: Final = 1.0  # interval of checks while messages arrive; an idle engine sends one a second
_OVERDUE_CHECK_S: Final = 0.25
EXIT_GRACE_S: Final = 2.0
ENGINE_MODULE: Final = ("-P", "-m", "services.worker.engine.process")
BATCHER_MODULE: Final = ("-P", "-m", "services.worker.batcher.process")
BATCHERS: Final = ("rows", "vllm_rows")
ON_VLLM: Final = ("vllm", "vllm_rows")
MAX_SEND_BUFFER_BYTES: Final = 2 * MAX_MESSAGE_BYTES


class EngineLink(asyncio.Protocol):
    """The agent's end of the socket: splits the bytes into messages. Any fault ends the connection."""

    def __init__(self, on_event: Callable[[Event], None], on_fault: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._on_fault = on_fault
        self._buffer = bytearray()
        self._faulty = False
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream server's transport can write; uvloop's does not derive from asyncio.Transport.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=MAX_SEND_BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        if self._faulty:
            return
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= LENGTH_PREFIX.size:
                (length,) = LENGTH_PREFIX.unpack_from(buffer, at)
                if length > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {length} bytes")
                end = at + LENGTH_PREFIX.size + length
                if end > len(buffer):
                    break
                with memoryview(buffer) as view:
                    event = decode_event(bytes(view[at + LENGTH_PREFIX.size : end]))
                self._on_event(event)
                at = end
        except Exception as exc:  # a fault in this engine or its handler ends the engine, not the agent
            log.exception("engine.event_refused")
            self._faulty = True
            self._on_fault(f"the engine's message could not be handled: {type(exc).__name__}")
            return
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class Refusal(asyncio.Protocol):
    """Closes every connection after the first: an engine has one connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Seconds. ``silence_s``: the longest time without a message from a running engine (usually 1 s);
    ``load_silence_s``: from one that loads or replaces its weights."""

    load_s: float = 1800.0
    load_silence_s: float = 300.0
    silence_s: float = 20.0
    shutdown_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Stopped:
    """It ended because the agent stopped it."""


@dataclass(frozen=True, slots=True)
class Crashed:
    """It ended by itself, or was killed because it hung. ``exit_code`` is negative for a signal.

    ``members``: the handles of the step that ran, empty while none did. ``out_of_memory``: a step did not get
    its memory, or it was killed while the kernel killed for memory.
    """

    exit_code: int
    message: str
    cause: LossCause = LossCause.OUTSIDE
    members: tuple[int, ...] = ()
    out_of_memory: bool = False


EngineExit = Stopped | LoadFailed | Crashed


def _unused(_: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvents:
    """Callbacks of the event loop, in order of the events; ``on_exit`` once, last. They must not block."""

    on_progress: Callable[[Progress], None] = _unused
    on_ready: Callable[[Ready], None]
    # Events of steps. The process of a fixed-cost model makes none.
    on_stepped: Callable[[Stepped], None] = _unused
    on_heartbeat: Callable[[EngineHeartbeat], None] = _unused
    on_resized: Callable[[Resized], None] = _unused
    on_adapter: Callable[[AdapterLoaded | AdapterRefused], None] = _unused
    on_weights: Callable[[WeightsReplaced | WeightsRefused], None] = _unused
    # Receives the batches of a fixed-cost model.
    on_batch: Callable[[BatchRan | BatchRaised], None] = _unused
    on_exit: Callable[[EngineExit], None]


class RunningEngine(Protocol):
    """One run of an engine, from ``start`` until ``on_exit``."""

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""

    @property
    def silent_s(self) -> float:
        """Time since the last message of the step loop, once it is ready; 0 before."""

    @property
    def members(self) -> tuple[int, ...]:
        """Handles of the step that runs; empty while none does, or while the process is stopped by a
        signal."""

    async def start(self) -> None:
        """Raises FailedPrecondition when it cannot be started."""

    def send(self, command: Command) -> bool:
        """Queue a command; False when the engine takes none."""

    def kill(self, reason: str) -> None:
        """End it at once, as one that hangs."""

    async def stop(self) -> None:
        """Return once it has ended. Idempotent."""


class EngineLauncher(Protocol):
    """Makes an engine's run; it is not started yet."""

    def __call__(self, config: EngineConfig, events: EngineEvents) -> RunningEngine: ...


def process_launcher(
    clock: Clock,
    supervisor: Supervisor,
    timeouts: EngineTimeouts,
    env: Mapping[str, str] | None = None,
    vllm_dir: Path | None = None,
    ranks_address: str = "",
    command: tuple[str, ...] = (),
    spare: SpareEngine | None = None,
) -> EngineLauncher:
    """Return the launcher of engine processes. ``env`` None: the agent's own environment.

    ``ranks_address``: of this node, for engines on several. Without ``command``: the module of the executor.
    ``spare``: the process of the next engine on torch, closed by the caller.
    """

    def launch(config: EngineConfig, events: EngineEvents) -> RunningEngine:
        return EngineProcess(
            config,
            events=events,
            clock=clock,
            supervisor=supervisor,
            timeouts=timeouts,
            env=env,
            vllm_dir=vllm_dir,
            ranks_address=ranks_address,
            command=command,
            spare=spare,
        )

    return launch


class EngineProcess:
    """Implements ``RunningEngine`` with a process; a restart needs a new instance."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        events: EngineEvents,
        clock: Clock,
        supervisor: Supervisor,
        timeouts: EngineTimeouts | None = None,
        env: Mapping[str, str] | None = None,
        command: tuple[str, ...] = (),
        vllm_dir: Path | None = None,
        ranks_address: str = "",
        spare: SpareEngine | None = None,
    ) -> None:
        """``start`` sets ``config.socket_path``. ``env`` None: the agent's own environment. Without
        ``command``: the module of the executor."""
        self._config = config
        self._events = events
        self._clock = clock
        self._supervisor = supervisor
        self._timeouts = timeouts if timeouts is not None else EngineTimeouts()
        self._env = env
        self._vllm_dir = vllm_dir  # the environment of the executors on vLLM
        self._ranks_address = ranks_address
        self._command = command or (BATCHER_MODULE if config.executor in BATCHERS else ENGINE_MODULE)
        self._spare = spare if config.executor == "torch" and not command else None
        self._link = EngineLink(self._on_event, self.kill)
        self._process: subprocess.Popen[bytes] | None = None
        self._page: StepPage | None = None
        self._ready = False
        self._replacing = False  # it was sent weights, and has not answered
        self._full_step_s = 0.0
        self._stopping = False
        self._refused: LoadFailed | None = None
        self._fault = ""
        self._started_s = self._last_message_s = clock.monotonic_s()
        self._exited = asyncio.Event()
        self._born_unix_s = clock.unix_s()
        self._memory_kills = memory_kills()

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return 0 if self._process is None else self._process.pid

    @property
    def silent_s(self) -> float:
        """Time since the last message of the step loop, once it is ready; 0 before."""
        return self._clock.monotonic_s() - self._last_message_s if self._ready else 0.0

    @property
    def members(self) -> tuple[int, ...]:
        """Handles of the step that runs; empty while none does, or while the process is stopped by a
        signal."""
        if self._page is None or self._process is None or is_stopped(self._process.pid):
            return ()
        return self._page.members()

    async def start(self) -> None:
        """Start the process and its monitoring. Raises FailedPrecondition when it cannot be started."""
        async with contextlib.AsyncExitStack() as undo:
            try:
                server, path = await self._listen(undo)
                config = self._at(path)
                taken = self._spare.take(msgspec.json.encode(config)) if self._spare is not None else None
                log_pipe = await LogPipe.open() if taken is None else taken[1]
                undo.callback(log_pipe.close)
                self._process = process = self._spawn(config, log_pipe) if taken is None else taken[0]
            except OSError as exc:
                raise FailedPrecondition(f"the engine process cannot be started: {exc.strerror}") from exc
            self._started_s = self._last_message_s = self._clock.monotonic_s()
            spare = taken is not None
            log.info("engine.started", pid=process.pid, executor=self._config.executor, spare=spare)
            self._supervisor.spawn(
                f"engine-{process.pid}", self._run(process, server, log_pipe, undo.pop_all())
            )

    def send(self, command: Command) -> bool:
        """Queue a command. Return False without a connection; an engine that does not read is killed."""
        transport = self._link.transport
        if transport is None or transport.is_closing() or self._fault:
            return False
        if transport.get_write_buffer_size() > MAX_SEND_BUFFER_BYTES:
            self.kill("the engine does not read its commands")
            return False
        transport.write(encode(command))
        self._replacing = self._replacing or isinstance(command, ReplaceWeights)
        return True

    async def stop(self) -> None:
        """Return once the process has ended, or was killed after ``shutdown_s``. Idempotent."""
        if self._process is None:
            return
        self._stopping = True
        if not self.send(Shutdown()):
            self._signal_group(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._timeouts.shutdown_s):
                await self._exited.wait()
        except TimeoutError:
            self._signal_group(signal.SIGKILL)
            async with asyncio.timeout(self._timeouts.shutdown_s):
                await self._exited.wait()

    # --- starting -------------------------------------------------------------------------------

    async def _listen(self, undo: contextlib.AsyncExitStack) -> tuple[asyncio.Server, str]:
        """Listen in a directory that only this user can enter."""
        directory = undo.enter_context(temporary_folder("fw-e-"))
        path = str(directory / "e")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise FailedPrecondition(f"the temporary directory's path is too long for a socket: {path}")
        self._page = StepPage.create(directory / _PAGE, self._config.max_sequences)
        server = await asyncio.get_running_loop().create_unix_server(self._accept, path)
        undo.callback(server.close)
        return server, path

    def _accept(self) -> asyncio.Protocol:
        return self._link if self._link.transport is None else Refusal()

    def _at(self, socket_path: str) -> EngineConfig:
        page = os.path.join(os.path.dirname(socket_path), _PAGE)
        return msgspec.structs.replace(self._config, socket_path=socket_path, step_page_path=page)

    def _spawn(self, config: EngineConfig, log_pipe: LogPipe) -> subprocess.Popen[bytes]:
        """Start it in its own session and process group; blocks for about a millisecond.

        Not by the event loop: uvloop forks, and gRPC's fork handlers can crash the child before it becomes
        the engine; ``Popen`` uses vfork. It must not run in a thread, because the engine ends with the thread
        that started it.
        """
        python, env = sys.executable, self._env
        if self._config.executor in ON_VLLM:
            found = interpreter_of(self._vllm_dir)
            if found is None:
                raise EngineNotInstalled(
                    f"vLLM is not installed in {self._vllm_dir}: run `fairway engines install vllm`"
                )
            ranks = config.tensor_parallel * config.pipeline_parallel // config.nodes
            python, env = (
                str(found),
                engine_variables(
                    env,
                    threads=max(1, config.threads // ranks) if config.threads else 0,
                    splits_kv=config.mode == "free",
                    address=self._ranks_address if config.nodes > 1 else "",
                ),
            )
        with log_pipe.write_end() as stderr:
            return subprocess.Popen(
                [python, *self._command, "--config", msgspec.json.encode(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                pass_fds=() if config.store_fd < 0 else (config.store_fd,),
                env=None if env is None else dict(env),
            )

    # --- watching -------------------------------------------------------------------------------

    async def _run(
        self,
        process: subprocess.Popen[bytes],
        server: asyncio.Server,
        log_pipe: LogPipe,
        undo: contextlib.AsyncExitStack,
    ) -> None:
        """Own the process until it has ended, even if this task is cancelled, and report that first."""
        try:
            await self._run_to_end(process, server, log_pipe, undo)
        finally:
            if self._config.executor in ON_VLLM:
                await self._group_ended(process.pid)
                await asyncio.to_thread(sweep, self._born_unix_s)
            self._exited.set()
        if self._spare is not None:
            if self._stopping:
                self._spare.want()
            await self._spare.prepare()

    async def _run_to_end(
        self,
        process: subprocess.Popen[bytes],
        server: asyncio.Server,
        log_pipe: LogPipe,
        undo: contextlib.AsyncExitStack,
    ) -> None:
        try:
            async with undo, TaskGroup() as group:
                reader = group.create_task(log_pipe.copy(process.pid))
                watcher = group.create_task(self._watch(server))
                await wait_end(process.pid, self._clock)
                self._signal_group(signal.SIGKILL)  # its child processes
                code = process.wait()
                watcher.cancel()
                await self._drain(reader)
        finally:
            self._signal_group(signal.SIGKILL)
            if process.returncode is None:  # this task was cancelled: leave no zombie
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1.0)
            if self._link.transport is not None:
                self._link.transport.abort()
        exit_ = self._exit_of(code)
        crashed = {}
        if isinstance(exit_, Crashed):
            crashed = {"cause": exit_.cause.value, "members": len(exit_.members)}
        log.info("engine.exited", pid=process.pid, exit_code=code, outcome=type(exit_).__name__, **crashed)
        self._events.on_exit(exit_)

    async def _drain(self, reader: asyncio.Task[None]) -> None:
        """Process the messages and log lines that the ended process left in the sockets."""
        if self._link.transport is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_GRACE_S):
                    await self._link.closed.wait()
        await asyncio.wait({reader}, timeout=EXIT_GRACE_S)
        reader.cancel()

    async def _group_ended(self, group: int) -> None:
        """Return once the killed group is empty, or after a second: what a process maps is not swept."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for _ in range(50):
                os.killpg(group, 0)
                await self._clock.sleep(0.02)

    async def _watch(self, server: asyncio.Server) -> None:
        """Kill a process that hangs, or that runs on after its connection closed."""
        checked_s = self._clock.monotonic_s()
        while True:
            is_overdue = checked_s - self._last_message_s > CHECK_S
            await self._clock.sleep(_OVERDUE_CHECK_S if is_overdue else CHECK_S)
            now_s = self._clock.monotonic_s()
            if now_s - checked_s > 2 * CHECK_S:  # this process was suspended: messages wait in the socket
                self._last_message_s = now_s
            checked_s = now_s
            if self._link.transport is not None and server.is_serving():
                server.close()  # accept no other connection
            if self._link.closed.is_set():
                await self._clock.sleep(EXIT_GRACE_S)
                self.kill("the engine closed its connection")
            elif not self._ready and now_s - self._started_s > self._timeouts.load_s:
                self.kill(f"loading took longer than {self._timeouts.load_s:g} s")
            elif now_s - self._last_message_s > self._patience_s():
                self.kill(f"no message for {now_s - self._last_message_s:.1f} s")

    def _patience_s(self) -> float:
        """Return the silence after which it is killed; its sequences are handed back earlier."""
        if self._replacing or not self._ready:
            return self._timeouts.load_silence_s
        return max(self._timeouts.silence_s, 2 * ABANDON_STEPS * self._full_step_s)

    def _on_event(self, event: Event) -> None:
        self._last_message_s = self._clock.monotonic_s()
        match event:
            case Stepped():
                self._events.on_stepped(event)
            case EngineHeartbeat():
                self._events.on_heartbeat(event)
            case Resized():
                self._events.on_resized(event)
            case AdapterLoaded() | AdapterRefused():
                self._events.on_adapter(event)
            case WeightsReplaced() | WeightsRefused():
                self._replacing = False
                self._events.on_weights(event)
            case BatchRan() | BatchRaised():
                self._events.on_batch(event)
            case Progress():
                self._events.on_progress(event)
            case Ready():
                self._ready = True
                self._full_step_s = event.full_step_s
                if self._spare is not None:  # it takes processors only after the load
                    self._supervisor.spawn("spare-engine", self._spare.prepare())
                self._events.on_ready(event)
            case LoadFailed():
                self._refused = event

    def _exit_of(self, code: int) -> EngineExit:
        if self._stopping:
            return Stopped()
        if self._refused is not None:
            return self._refused
        members = () if self._page is None else self._page.members()
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        killed = code == -signal.SIGKILL and not self._fault and memory_kills() > self._memory_kills
        lacked = killed or code == STEP_LACKED_MEMORY
        return Crashed(code, self._fault or f"the engine {ended}", cause_of(code), members, lacked)

    def kill(self, fault: str) -> None:
        if not self._fault:
            self._fault = fault
            log.warning("engine.killed", pid=self.pid, reason=fault)
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, signal_number: signal.Signals) -> None:
        """Signal the process group of a process that was not reaped yet."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal_number)
