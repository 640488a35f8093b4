"""A spare engine process: it has imported torch and waits for its configuration, so that a load starts there.

A worker has at most one, from the first time that it unloads a version: what was unloaded makes room for what
is loaded next. It holds no weights and no device memory, is used once, and ends with the agent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Final

import structlog

from services.runtime.process.machine import available_bytes
from services.worker.slots.log_pipe import LogPipe

log = structlog.get_logger()

LEAST_FREE_BYTES: Final = 2 << 30  # below it the machine's memory is left to engines
Started = tuple[subprocess.Popen[bytes], LogPipe]


class SpareEngine:
    """Single owner: the launcher of a worker. All calls come from its event loop, whose thread starts it."""

    def __init__(self, command: tuple[str, ...], *, free_bytes: Callable[[], int] = available_bytes) -> None:
        self._command = command
        self._free_bytes = free_bytes
        self._spare: Started | None = None
        self._wanted = False
        self._closed = False

    def want(self) -> None:
        """A version was unloaded here: from now on a spare is kept."""
        self._wanted = True

    async def prepare(self) -> None:
        """Start the spare, unless there is one, none is wanted, or memory is short."""
        if not self._lacks_one() or self._free_bytes() < LEAST_FREE_BYTES:
            return
        log_pipe = await LogPipe.open()
        if not self._lacks_one():
            log_pipe.close()
            return
        try:
            self._spare = self._start(log_pipe), log_pipe
        except OSError as error:
            log_pipe.close()
            log.warning("engine.spare_not_started", reason=error.strerror)

    def _lacks_one(self) -> bool:
        return self._wanted and not self._closed and self._spare is None

    def take(self, config: bytes) -> Started | None:
        """Give the spare its configuration and return it; None without a live one."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        process, log_pipe = spare
        assert process.stdin is not None, "a spare reads its configuration"
        try:
            os.write(process.stdin.fileno(), config + b"\n")
            process.stdin.close()
        except OSError:
            self._end(spare)
            return None
        return process, log_pipe

    def close(self) -> None:
        """End the spare; none is started from now on."""
        self._closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            self._end(spare)

    def _start(self, log_pipe: LogPipe) -> subprocess.Popen[bytes]:
        with log_pipe.write_end() as stderr:
            return subprocess.Popen(
                [sys.executable, *self._command, "--config", "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )

    def _end(self, spare: Started) -> None:
        process, log_pipe = spare
        process.kill()
        process.wait()
        log_pipe.close()
        if process.stdin is not None:
            process.stdin.close()
