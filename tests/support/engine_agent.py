"""The other end of an engine process's socket, as plain as possible."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from fairway.engines.environment import engine_variables
from services.worker.engine_protocol import (
    LENGTH_PREFIX,
    EngineConfig,
    EngineMessage,
    Event,
    Progress,
    Ready,
    Stepped,
    decode_event,
    encode,
)
from services.worker.slots.engine_process import BATCHERS

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 200.0


class Agent:
    """Starts a process and exchanges messages with it; ``close`` ends it."""

    def __init__(
        self, folder: Path, config: EngineConfig, *, python: str = sys.executable, poisoned: bool = False
    ) -> None:
        """``poisoned``: some prompts end it, as ``poisoned_engine`` states."""
        path = folder / "s"
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen(1)
        self.server.settimeout(PATIENCE_S)
        config = msgspec.structs.replace(config, socket_path=str(path))
        own = "batcher" if config.executor in BATCHERS else "engine"
        module = "tests.support.poisoned_engine" if poisoned else f"services.worker.{own}.process"
        variables = engine_variables(threads=config.threads, splits_kv=config.mode == "free")
        command = [python, "-m", module, "--config"]
        self.log = folder / "stderr"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, msgspec.json.encode(config).decode()],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)} if python == sys.executable else variables,
                stderr=log,
                start_new_session=True,
            )
        self.channel, _ = self.server.accept()
        self.channel.settimeout(PATIENCE_S)
        self.stream = self.channel.makefile("rb")

    def send(self, message: EngineMessage) -> None:
        self.channel.sendall(encode(message))

    def receive(self) -> Event:
        (length,) = LENGTH_PREFIX.unpack(self.stream.read(LENGTH_PREFIX.size))
        return decode_event(self.stream.read(length))

    def ready(self) -> Ready:
        while isinstance(event := self.receive(), Progress):
            assert 0.0 <= event.done_ratio <= 1.0
        assert isinstance(event, Ready), event
        return event

    def until(self, done: Callable[[Stepped], bool]) -> list[Stepped]:
        steps = []
        while True:
            event = self.receive()
            if isinstance(event, Stepped):
                steps.append(event)
                if done(event):
                    return steps

    def exit_code(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)

    def hang_up(self) -> None:
        self.stream.close()
        self.channel.close()

    def close(self) -> None:
        self.hang_up()
        self.server.close()
        with contextlib.suppress(ProcessLookupError):  # ranks are in its group, and may outlive it
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=PATIENCE_S)
