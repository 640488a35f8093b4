"""The network between the processes of a fleet: one listener per server, and rules per pair of names.

    python -m tests.chaos.proxy '{"etcd": [23790, 2379], ...}' (name: [listening port, server's port or path])

Who connects is found out by the kernel's tables: the process that owns the socket says its name in the
variable CHAOS_NAME; a process without one is the client. Rules arrive as lines of JSON on the standard
input, each replacing all rules before, and each is answered with a line. Linux only.

A hole holds back what is sent and tells neither side of the other's end, as a network does that drops
packets: once it is closed, what the kernel would have sent again arrives, and so does the news of an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

HOST: Final = "127.0.0.1"
NAME_VARIABLE: Final = "CHAOS_NAME"
CLIENT: Final = "client"
PIECE_BYTES: Final = 64 * 1024
FRESH_S: Final = 0.5

Mode = Literal["pass", "cut", "hole", "delay"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Connections from ``source`` to ``target``, both shell patterns, have this ``mode``."""

    source: str
    target: str
    mode: Mode
    delay_s: float = 0.0


PASS: Final = Rule("*", "*", "pass")


def rule_for(rules: Sequence[Rule], source: str, target: str) -> Rule:
    """Return the first rule that fits."""
    for rule in rules:
        if fnmatch.fnmatchcase(source, rule.source) and fnmatch.fnmatchcase(target, rule.target):
            return rule
    return PASS


class Names:
    """Which process is at the other end of a connection on the loopback.

    One look at all sockets serves the connections that arrive within ``FRESH_S``: a busy machine would
    otherwise take longer for each than its client waits.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._sockets: dict[str, str] = {}  # the name of the process that holds a socket, by its link
        self._looked_s = float("-inf")

    def of(self, peer_port: int, own_port: int) -> str:
        """Return the name of the process that connected from ``peer_port`` to ``own_port``."""
        inode = self._inode(peer_port, own_port)
        if inode is None:
            return CLIENT
        link = f"socket:[{inode}]"
        if time.monotonic() > self._looked_s + FRESH_S or link not in self._sockets:
            self._look()
        if link not in self._sockets:
            self._refresh()
            self._look()
        return self._sockets.get(link, CLIENT)

    def _inode(self, peer_port: int, own_port: int) -> str | None:
        ends = (f"0100007F:{peer_port:04X}", f"0100007F:{own_port:04X}")
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError), Path(f"/proc/net/{table}").open() as rows:
                for row in rows:
                    fields = row.split()
                    if (fields[1][-13:], fields[2][-13:]) == ends:
                        return fields[9]
        return None

    def _refresh(self) -> None:
        self._names = {}
        marker = f"{NAME_VARIABLE}=".encode()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                for entry in (folder / "environ").read_bytes().split(b"\0"):
                    if entry.startswith(marker):
                        self._names[int(folder.name)] = entry[len(marker) :].decode()

    def _look(self) -> None:
        self._sockets = {}
        for pid, name in self._names.items():
            with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):  # it was closed meanwhile
                        self._sockets.setdefault(os.readlink(entry.path), name)
        self._looked_s = time.monotonic()


class Connection:
    """One client's connection and the one to its server, as the rule of the moment says."""

    def __init__(self, source: str, target: str, rule: Rule) -> None:
        self.source = source
        self.target = target
        self._rule = rule
        self._open = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self.apply(rule)

    def apply(self, rule: Rule) -> None:
        self._rule = rule
        if rule.mode == "hole":
            self._open.clear()
        else:
            self._open.set()
        if rule.mode == "cut":
            self.reset()

    def reset(self) -> None:
        """Both ends receive an RST."""
        for writer in self._writers:
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: int | str
    ) -> None:
        """Return once both directions ended or the connection was reset."""
        self._writers.append(writer)
        if self._rule.mode == "cut":
            self.reset()
            return
        await self._open.wait()
        try:
            upstream, to_server = await (
                asyncio.open_connection(HOST, server)
                if isinstance(server, int)
                else asyncio.open_unix_connection(server)
            )
        except OSError:
            self.reset()
            return
        self._writers.append(to_server)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, to_server))
                group.create_task(self._pump(upstream, writer))
        except* OSError:
            self.reset()
        finally:
            for each in self._writers:
                each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            piece = await reader.read(PIECE_BYTES)
            if self._rule.mode == "delay":
                await asyncio.sleep(self._rule.delay_s)
            while not self._open.is_set():
                await self._open.wait()
            if not piece:
                if writer.can_write_eof() and not writer.is_closing():
                    writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()


class Proxy:
    """All listeners, and the connections that are open."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._names = Names()
        self._connections: set[Connection] = set()

    async def listen(self, name: str, port: int, server: int | str) -> asyncio.Server:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = writer.get_extra_info("peername")
            source = self._names.of(peer[1], port) if peer else CLIENT
            connection = Connection(source, name, rule_for(self._rules, source, name))
            self._connections.add(connection)
            try:
                await connection.carry(reader, writer, server)
            finally:
                self._connections.discard(connection)

        return await asyncio.start_server(accept, HOST, port, backlog=512)

    def apply(self, rules: list[Rule]) -> list[tuple[str, str]]:
        """Put rules in place of the ones before; return the pairs of the open connections that they hit."""
        self._rules = rules
        hit = set()
        for connection in list(self._connections):
            rule = rule_for(rules, connection.source, connection.target)
            connection.apply(rule)
            if rule.mode != "pass":
                hit.add((connection.source, connection.target))
        return sorted(hit)


async def serve(ports: dict[str, tuple[int, int | str]]) -> None:
    """Carry connections until the standard input ends."""
    proxy = Proxy()
    servers = [await proxy.listen(name, *pair) for name, pair in ports.items()]
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while line := await commands.readline():
        hit = proxy.apply([Rule(**each) for each in json.loads(line)])
        sys.stdout.write(json.dumps(hit) + "\n")
        sys.stdout.flush()
    for server in servers:
        server.close()


if __name__ == "__main__":
    asyncio.run(serve({name: (pair[0], pair[1]) for name, pair in json.loads(sys.argv[1]).items()}))
