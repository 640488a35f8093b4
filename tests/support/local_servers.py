"""Servers of this machine that tests start: free ports, readiness, and an end with the test."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from fairway.cli.fleet.options import LOOPBACK
from fairway.cli.fleet.ports import hold_free_port

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


class ServerFailed(RuntimeError):
    """The server ended, or did not answer in time."""


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
