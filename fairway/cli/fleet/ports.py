"""Choice of ports: the remembered one while it is free, else a preferred one, else any."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from fairway.cli.errors import CliError
from fairway.cli.fleet.options import LOOPBACK
from fairway.cli.state import read_json, write_json

# Below the range that Linux and the BSDs use for outgoing connections, so that no client connection takes a
# chosen port before its server listens.
_QUIET_PORTS = range(18_000, 32_000)
_TRIES = 64
# Ports that others leave to this installation until its servers listen; their sockets close with the process.
_claims: set[tuple[str, int]] = set()


def try_bind(port: int, host: str = LOOPBACK) -> socket.socket | None:
    """Return a socket bound to ``port`` (0: any free one) of ``host``, or None when that is not possible."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))
        holder.listen(1)
    except (OSError, OverflowError):
        holder.close()
        return None
    return holder


Bind = Callable[[int, str], socket.socket | None]


def hold_free_port(host: str = LOOPBACK, bind: Bind = try_bind) -> socket.socket | None:
    """Return a socket bound to a free port, outside the range of outgoing connections if possible."""
    for _ in range(_TRIES):
        holder = bind(secrets.choice(_QUIET_PORTS), host)
        if holder is not None:
            return holder
    return try_bind(0, host)


def _claim_and_bind(port: int, host: str) -> socket.socket | None:
    """Return what ``try_bind`` does, but None for a port that another process claimed: its server starts."""
    if sys.platform != "linux" or (host, port) in _claims:
        return try_bind(port, host)
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0fairway-port-{host}-{port}")
    except OSError:
        claim.close()
        return None
    holder = try_bind(port, host)
    if holder is None:
        claim.close()
    else:
        claim.detach()
        _claims.add((host, port))
    return holder


def choose_ports(
    names: Sequence[str],
    *,
    fixed: Mapping[str, int],
    remembered: Mapping[str, int],
    preferred: Mapping[str, int],
    hosts: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Return a distinct port for each name, all free at the time of the call.

    No other process chooses one of them until this one ends.

    ``hosts``: the addresses of those that do not listen on the loopback address.

    A fixed port that is taken raises CliError; the others fall back to any free port.
    """
    chosen: dict[str, int] = {}
    with ExitStack() as held:
        for name in sorted(names, key=lambda name: name not in fixed):
            holder: socket.socket | None = None
            host = (hosts or {}).get(name, LOOPBACK)
            if name in fixed:
                holder = _claim_and_bind(fixed[name], host)
                if holder is None:
                    raise _taken(name, fixed[name], host)
            for candidate in (remembered.get(name), preferred.get(name)):
                if holder is None and candidate is not None:
                    holder = _claim_and_bind(candidate, host)
            holder = holder or hold_free_port(host, _claim_and_bind)
            if holder is None:
                raise CliError(
                    "NO_FREE_PORT",
                    f"no free port for {name} on {host}",
                    next_step="stop programs that use many ports, then try again",
                )
            held.callback(holder.close)
            chosen[name] = int(holder.getsockname()[1])
    return chosen


def load_ports(path: Path) -> dict[str, int]:
    """Return the stored ports; entries that are not ports are left out."""
    raw = read_json(path) or {}
    return {name: port for name, port in raw.items() if isinstance(port, int) and 0 < port < 65536}


def save_ports(path: Path, ports: Mapping[str, int]) -> None:
    """Store ``ports`` in addition to the other ports of earlier runs."""
    write_json(path, {**load_ports(path), **ports})


def _taken(name: str, port: int, host: str) -> CliError:
    flag = {"gateway_http": "--http-port", "gateway_grpc": "--grpc-port"}.get(name, "")
    hint = f"choose another with {flag}, or let {flag} 0 take a free one" if flag else "free the port"
    return CliError(
        "PORT_TAKEN",
        f"port {port} on {host} is taken by another program",
        next_step=f"{hint}; `ss -ltnp 'sport = :{port}'` shows which program uses it",
    )
