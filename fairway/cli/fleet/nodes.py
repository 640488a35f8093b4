"""Workers of a local installation as nodes that its control planes order and release.

As a program, ``python -P -m fairway.cli.fleet.nodes SOCKET``, it is the node command of the control planes
(docs/operations/scaling.md): it passes a call from its standard input to the supervisor's socket. The
supervisor answers at once, and starts or stops the worker afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from fairway.cli.errors import CliError
from fairway.cli.fleet.progress import StartProgress
from fairway.cli.state import write_private

_CALL_S: Final = 10.0
_MAX_BYTES: Final = 64 * 1024
Change = Callable[[Sequence[str]], Awaitable[None]]  # starts and stops workers until these run


class LocalNodes:
    """The ordered workers by order; written to ``path``, so that a restart starts them again."""

    def __init__(self, path: Path, most: int, change: Change, progress: StartProgress) -> None:
        """``most``: workers that may be ordered at once."""
        self._path = path
        self._most = most
        self._change = change
        self._progress = progress
        self._nodes: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            self._nodes = dict(json.loads(path.read_text("utf-8")))
        self._changed = asyncio.Event()
        if self._nodes:
            self._changed.set()

    def answer(self, request: dict[str, str]) -> dict[str, object]:
        """Apply a call. Raises ValueError with the reason against it."""
        match request["call"]:
            case "order" if request["order"] not in self._nodes:
                if len(self._nodes) >= self._most:
                    raise ValueError(f"{self._most} workers are ordered, the most of --workers")
                taken = set(self._nodes.values())
                names = (f"worker-ordered-{number}" for number in range(self._most))
                self._nodes[request["order"]] = next(name for name in names if name not in taken)
                self._save()
            case "release":
                self._nodes = {order: node for order, node in self._nodes.items() if node != request["node"]}
                self._save()
        return {"nodes": [{"order": order, "node": node} for order, node in self._nodes.items()]}

    def _save(self) -> None:
        write_private(self._path, json.dumps(self._nodes) + "\n")
        self._changed.set()

    async def run(self, door: Path) -> None:
        """Serve calls on the socket ``door`` and have the workers run, until cancelled."""
        door.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, str(door), limit=_MAX_BYTES)
        async with server:
            while True:
                await self._changed.wait()
                self._changed.clear()
                try:
                    await self._change(sorted(self._nodes.values()))
                except (CliError, OSError) as exc:  # the order fails where its worker does not register
                    self._progress.event("nodes", "failed", str(exc))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CALL_S):
                answer = self.answer(json.loads(await reader.readline()))
        except (TimeoutError, OSError, ValueError, KeyError, TypeError) as exc:
            answer = {"error": str(exc) or repr(exc)}
        with contextlib.suppress(OSError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()


def main() -> int:
    """Pass the call on standard input to the socket of the first argument. Return the exit code."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_CALL_S)
            connection.connect(sys.argv[1])
            connection.sendall(json.dumps(json.load(sys.stdin)).encode() + b"\n")
            answer = json.loads(connection.makefile("rb").readline(_MAX_BYTES))
    except (OSError, ValueError) as exc:
        answer = {"error": f"the supervisor does not answer: {exc}"}
    if "error" in answer:
        sys.stderr.write(f"{answer['error']}\n")
        return 1
    sys.stdout.write(f"{json.dumps(answer)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
