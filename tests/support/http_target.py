"""The HTTP face in a process of its own, on uvloop as in production, so that attackers do not share its loop.

Run as a module it serves, measures its event loop, and answers each line on stdin with a report.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import uvloop

from services.gateway.events import Event, Tokens
from services.gateway.faces.openai import server as http_server
from services.gateway.faces.openai.exchange import HttpLimits
from services.runtime.process.tenant_turns import TenantLoop
from services.runtime.telemetry import logging
from tests.integration.openai.face import CHAT, KEY, Call, accepted, plain, serving

ROOT = Path(__file__).parents[2]
MAX_BODY = 8 * 1024**2
TICK_S = 0.005
CANARY_SOURCE = "127.0.0.9"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
AUTHORISED = POST + f"authorization: Bearer {KEY}\r\n".encode()


@dataclass
class Report:
    """What the server process measured since the report before."""

    worst_gap_s: float  # between two turns of the event loop
    worst_gap_cpu_s: float  # CPU time of the process in one such gap: a loaded machine does not add to it
    connections: int
    calls: int  # events that the service made
    exchanges: int  # that were answered in full
    refused: int
    displaced: int
    running: int  # requests of the service


class Target:
    """The server process."""

    def __init__(self, **changes: Any) -> None:
        command = [sys.executable, "-m", "tests.support.http_target", json.dumps(changes)]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.port = int(self._line())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def report(self) -> Report:
        assert self._process.stdin is not None
        self._process.stdin.write("report\n")
        self._process.stdin.flush()
        return Report(**json.loads(self._line()))

    def resident_mib(self, *, peak: bool = False) -> float:
        wanted = "VmHWM:" if peak else "VmRSS:"
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(wanted))

    def connect(self, source: str = "127.0.0.2", timeout_s: float = 20.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout_s, (source, 0))

    def exchange(self, *pieces: bytes, source: str = "127.0.0.2") -> bytes:
        """Return all that comes until the server ends the connection, while ``pieces`` are sent."""
        with self.connect(source) as connection:
            return exchange(connection, *pieces)

    def ask(self, body: bytes | None = None, source: str = "127.0.0.2") -> tuple[int, Any]:
        """Return status and JSON of the answer to one chat."""
        data = json.dumps(CHAT).encode() if body is None else body
        head = AUTHORISED + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data)
        answer = self.exchange(head, data, source=source)
        top, _, text = answer.partition(b"\r\n\r\n")
        return int(top.split()[1]), json.loads(text)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server process has ended"
        return line


def exchange(connection: socket.socket, *pieces: bytes) -> bytes:
    """Send ``pieces`` and return all that comes until the connection ends, in whatever way."""
    answer = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):
            while piece := connection.recv(1 << 16):
                answer.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    with contextlib.suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)
    reader.join()
    return bytes(answer)


def send_until_cut(connection: socket.socket, piece: bytes, limit: int) -> int:
    """Return how many bytes of ``piece`` after ``piece`` are taken before the connection ends."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < limit:
            sent += connection.send(piece)
    return sent


class Canary:
    """A small request again and again from its own source, on a connection that lasts and on new ones."""

    def __init__(self, target: Target) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self.worst_s = 0.0
        self._target = target
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        data = json.dumps({**CHAT, "user": "canary"}).encode()
        request = AUTHORISED + b"content-length: %d\r\n\r\n" % len(data) + data
        try:
            with self._target.connect(CANARY_SOURCE) as lasting:
                while not self._end.wait(0.02):
                    started_s = time.monotonic()
                    self._ask(lasting, request)
                    with self._target.connect(CANARY_SOURCE) as fresh:
                        self._ask(fresh, request)
                    self.worst_s = max(self.worst_s, time.monotonic() - started_s)
                    self.answers += 1
        except OSError as exc:
            self.failures.append(repr(exc))

    def _ask(self, connection: socket.socket, request: bytes) -> None:
        connection.sendall(request)
        answer = b""
        while not answer.endswith(b"}"):
            piece = connection.recv(1 << 16)
            if not piece:
                self.failures.append("the connection was closed")
                return
            answer += piece
        if not answer.startswith(b"HTTP/1.1 200 "):
            self.failures.append(answer[:80].decode())


class _LoopWatch:
    """The longest time between two turns of the running loop."""

    def __init__(self) -> None:
        self.worst_gap_s = self.worst_gap_cpu_s = 0.0

    async def run(self) -> None:
        while True:
            wall_s, cpu_s = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_S)
            self.worst_gap_s = max(self.worst_gap_s, time.monotonic() - wall_s - TICK_S)
            self.worst_gap_cpu_s = max(self.worst_gap_cpu_s, time.process_time() - cpu_s)


class _Script:
    """A request of the user ``held`` does not end after its first token.

    Those of ``crowd`` have their tokens all at once: when one of ``go`` comes.
    """

    def __init__(self) -> None:
        self._go = asyncio.Event()

    async def __call__(self, call: Call) -> AsyncGenerator[Event, None]:
        user = call.generation.session_key
        if user == "held":
            yield accepted(call)
            yield Tokens(0, 0, [0], "Hel")
            await asyncio.sleep(600)
        if user == "crowd":
            yield accepted(call)
            await self._go.wait()
        elif user == "go":
            self._go.set()
        async for event in plain(call):
            yield event


async def _serve(changes: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    for name, value in changes.pop("protocol", {}).items():
        setattr(http_server._Protocol, name, value)
    async with serving(HttpLimits(MAX_BODY), **changes) as face:
        face.service.script = _Script()
        recent: Any = collections.deque(maxlen=1)
        face.service.calls = recent
        watch = _LoopWatch()
        task = loop.create_task(watch.run())
        print(face.server.port, flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            table = face.server.table
            report = Report(
                watch.worst_gap_s,
                watch.worst_gap_cpu_s,
                face.server.connections,
                face.service.made,
                face.server._server.server_state.total_requests,
                table.refused,
                table.displaced,
                face.service.running,
            )
            table.check_integrity()
            watch.worst_gap_s = watch.worst_gap_cpu_s = 0.0
            print(json.dumps(vars(report)), flush=True)
        task.cancel()


def main() -> None:
    logging.configure()
    changes = json.loads(sys.argv[1])
    loop = TenantLoop if changes.pop("tenants_take_turns", True) else uvloop.Loop
    uvloop.run(_serve(changes), loop_factory=loop)


if __name__ == "__main__":
    main()
