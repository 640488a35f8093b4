"""The production engine process, driven over its socket as an agent drives it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from bench.engines.load import Request
from bench.engines.runner import ROOT, Answer, RunnerFailed, pause, resume
from fairway.engines.environment import engine_variables
from services.core.generation import OutputLimits, Prompt, Sampling
from services.core.prefix import prefix_chain
from services.worker.engine_protocol import (
    LENGTH_PREFIX,
    Command,
    EngineConfig,
    Event,
    LoadFailed,
    Ready,
    Stepped,
    Submit,
    decode_event,
    encode,
)

LOAD_S: Final = 120.0
THREADS: Final = 2
KV_BYTES: Final = 2 * 1024**3
# Prefill is cut by tokens alone: the benchmark compares throughput, and its peers have no ITL target either.
THROUGHPUT: Final = EngineConfig(
    socket_path="",
    model_dir="",
    threads=THREADS,
    kv_memory_bytes=KV_BYTES,
    token_budget=2048,
    max_sequences=32,
    itl_target_s=0.0,
)


@dataclass(slots=True)
class Stream:
    """One sequence: when it was submitted, its tokens, and the instant at which each came. Seconds."""

    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    received_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    is_live: bool = True

    @property
    def ttft_s(self) -> float:
        return self.received_s[0] - self.submitted_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between two tokens."""
        return [later - earlier for earlier, later in zip(self.received_s, self.received_s[1:], strict=False)]


class OwnEngine:
    """A loaded engine process. Implements ``Runner``; it is stopped but for its turns."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: socket.socket, config: EngineConfig
    ) -> None:
        self._process = process
        self._connection = connection
        self._received = connection.makefile("rb")
        self._config = config
        self._handles = 0
        self._streams: dict[int, Stream] = {}  # the live ones

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, checkpoint: Path, config: EngineConfig = THROUGHPUT, *, python: str = sys.executable
    ) -> Iterator[OwnEngine]:
        """Load the checkpoint; the process is killed at the end. Raises RunnerFailed.

        ``python``: the interpreter of the executor's environment.
        """
        with contextlib.ExitStack() as undo:
            folder = undo.enter_context(tempfile.TemporaryDirectory())
            server = undo.enter_context(socket.socket(socket.AF_UNIX))
            path = os.path.join(folder, "engine")
            server.bind(path)
            server.listen()
            server.settimeout(LOAD_S)
            config = msgspec.structs.replace(config, socket_path=path, model_dir=str(checkpoint))
            engine = cls(_spawned(config, python, undo), undo.enter_context(server.accept()[0]), config)
            engine._wait_until_ready()
            with engine.resumed():
                engine.generate([Request([0] * 32, 4)])
            yield engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def config(self) -> EngineConfig:
        return self._config

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """The process runs inside, and is stopped again after."""
        resume(self._process)
        try:
            yield
        finally:
            pause(self._process)

    def run(self, requests: Sequence[Request]) -> Answer:
        """See ``Runner``."""
        with self.resumed():
            began_s = time.perf_counter()
            streams = self.generate(requests)
            return Answer(time.perf_counter() - began_s, [stream.tokens for stream in streams])

    def generate(self, requests: Sequence[Request]) -> list[Stream]:
        """Return the streams of requests that arrive at once, when all have ended. Runs ``resumed``."""
        streams = [self.submit(request) for request in requests]
        while any(stream.is_live for stream in streams):
            self.step()
        return streams

    def submit(self, request: Request, *, produced: Sequence[int] = (), temperature: float = 0.0) -> Stream:
        """Send a request with unlimited credit; return its stream, which ``step`` fills.

        ``produced`` are tokens of its output that an earlier run has made.
        """
        self._handles += 1
        names = prefix_chain(request.root, request.prompt) if request.root else ()
        stream = self._streams[self._handles] = Stream(time.perf_counter())
        self._send(
            Submit(
                self._handles,
                Prompt(request.prompt, names, request.root),
                Sampling(seed=0, temperature=temperature),
                OutputLimits(request.output_tokens, ignore_eos=True),
                request.output_tokens,
                produced_ids=produced,
            )
        )
        return stream

    def step(self) -> Stepped:
        """Wait for the next step and note what it produced. Raises RunnerFailed for what did not finish."""
        while not isinstance(event := self._event(), Stepped):
            pass
        now_s = time.perf_counter()
        for handle, token in zip(event.handles, event.tokens, strict=True):
            self._streams[handle].tokens.append(token)
            self._streams[handle].received_s.append(now_s)
        for handle, tokens in event.cached.items():
            self._streams[handle].cached_tokens = tokens
        for handle, reason in event.finished.items():
            self._streams.pop(handle).is_live = False
            if reason != "length":
                raise RunnerFailed(f"a sequence ended by {reason}: {event.errors.get(handle, '')}")
        return event

    def _wait_until_ready(self) -> None:
        while not isinstance(event := self._event(), Ready):
            if isinstance(event, LoadFailed):
                raise RunnerFailed(event.message)

    def _event(self) -> Event:
        prefix = self._received.read(LENGTH_PREFIX.size)
        if len(prefix) < LENGTH_PREFIX.size:
            raise RunnerFailed("the engine process ended")
        return decode_event(self._received.read(LENGTH_PREFIX.unpack(prefix)[0]))

    def _send(self, command: Command) -> None:
        self._connection.sendall(encode(command))


def _spawned(config: EngineConfig, python: str, undo: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    command = [python, "-m", "services.worker.engine.process"]
    command += ["--config", msgspec.json.encode(config).decode()]
    env = os.environ if python == sys.executable else engine_variables(threads=config.threads)
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    undo.callback(end)
    return process
