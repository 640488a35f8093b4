"""Another user of the machine reaches neither the stores of an installation nor anything that it wrote."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from fairway.cli import embedded
from fairway.cli.fleet.record import FleetRecord
from fairway.cli.state import StateDir
from services.adapters.etcd.store import EtcdStore
from services.ports.store import Put
from services.runtime.clock import SystemClock
from tests.conftest import STARTS
from tests.support import local_servers
from tests.support.stack import Stack

KEY = "/fairway/v1/events/of-the-version-before"
NOBODY = 65534
INTRUDER = """
import json, os, socket, sys

user, paths = int(sys.argv[1]), json.load(sys.stdin)
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)

def attempt(path, is_socket):
    try:
        if is_socket:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(5)
                client.connect(path)
                return "connected"
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        return "read"
    except PermissionError:
        return "refused"

print(json.dumps({path: attempt(path, is_socket) for path, is_socket in paths}))
"""


def intrude(user: int, paths: list[Path]) -> dict[str, str]:
    """Return what became of each path when that user tried to connect to it or to read it."""
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, str(user)],
        input=json.dumps([(str(path), path.is_socket()) for path in paths]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def leave_an_older_installation(state: StateDir) -> None:
    """Put there what the version before left: stores that listened on ports, and wide modes."""
    for folder in (
        state.logs,
        state.secrets,
        state.data("etcd"),
        state.data("redis"),
        state.data("registry"),
    ):
        folder.mkdir(parents=True)
    state.log("gateway").write_text("a line\n")
    (state.data("registry") / "blob").write_text("a blob")
    peer = local_servers.free_port()

    def etcd(port: int) -> list[str]:
        return embedded.etcd_command(
            state.data("etcd"), *(f"http://127.0.0.1:{each}" for each in (port, peer))
        )

    with server(etcd, local_servers.wait_etcd) as etcd_port:
        asyncio.run(put(f"127.0.0.1:{etcd_port}"))
    with (
        server(
            lambda port: embedded.redis_command(state.data("redis"), port), local_servers.wait_redis
        ) as redis_port,
        redis.Redis(port=redis_port) as client,
    ):
        client.set("kept", "yes")
    ports = {"etcd_client": etcd_port, "etcd_peer": peer, "redis": redis_port}
    state.ports.write_text(json.dumps(ports))
    for path in (state.root, *state.root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@contextlib.contextmanager
def server(command: Callable[[int], list[str]], wait: Callable[..., None]) -> Iterator[int]:
    """Yield the port on which it serves: one that was free may be taken by the time that it binds it."""
    process, port = start(command, wait)
    try:
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def start(
    command: Callable[[int], list[str]], wait: Callable[..., None], *, tries: int = STARTS
) -> tuple[subprocess.Popen[bytes], int]:
    port = local_servers.free_port()
    process = subprocess.Popen(
        command(port),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=local_servers.die_with_parent,
    )
    try:
        wait(port, process=process)
    except local_servers.ServerFailed:
        process.kill()
        process.wait(timeout=30)
        if tries == 1:
            raise
        return start(command, wait, tries=tries - 1)
    return process, port


async def put(address: str) -> None:
    store = EtcdStore((address,), SystemClock())
    try:
        await store.commit([Put(KEY, b"kept")])
    finally:
        await store.close()


async def read(address: str) -> bytes | None:
    store = EtcdStore((address,), SystemClock())
    try:
        entry = await store.get(KEY)
        return None if entry is None else entry.value
    finally:
        await store.close()


@pytest.fixture(scope="module")
def state(installations: None) -> Iterator[StateDir]:
    """An installation of the version before, started by this one for a user whose umask forbids nothing."""
    top = Path(tempfile.mkdtemp(dir="/tmp"))  # those of pytest keep everybody out by themselves
    top.chmod(0o755)
    state = StateDir.at(top / ".fairway")
    before = os.umask(0)
    try:
        leave_an_older_installation(state)
        with Stack.started(state.root, workers=1, replicas=1, options=("--no-model",)):
            yield state
    finally:
        os.umask(before)
        shutil.rmtree(top)


def everything(state: StateDir) -> list[Path]:
    return [state.root, *state.root.rglob("*")]


def test_nobody_but_the_owner_has_a_mode_bit_on_anything(state: StateDir) -> None:
    paths = everything(state)
    assert {path.name for path in paths} >= {
        "etcd:0",
        "redis",
        "gateway.log",
        "blob",
        "api_key",
        "fleet.json",
    }
    assert {
        str(path): oct(mode) for path in paths if (mode := stat.S_IMODE(path.lstat().st_mode)) & 0o077
    } == {}


def test_stores_listen_on_no_port(state: StateDir) -> None:
    record = FleetRecord.load(state.fleet)
    assert record is not None
    for name in ("etcd", "redis"):
        listening = psutil.Process(record.children[name].pid).net_connections(kind="inet")
        assert [found for found in listening if found.status == psutil.CONN_LISTEN] == []
    gateway = psutil.Process(record.children["gateway"].pid).net_connections(kind="inet")
    assert [found for found in gateway if found.status == psutil.CONN_LISTEN], "the check finds what listens"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_connect_nor_read(state: StateDir) -> None:
    paths = everything(state)
    mine = intrude(0, paths)
    assert sum(outcome == "connected" for outcome in mine.values()) == 4, (
        "etcd, its peers' socket, Redis, the supervisor"
    )
    assert set(mine.values()) <= {"connected", "read"}
    assert set(intrude(NOBODY, paths).values()) == {"refused"}
    assert intrude(NOBODY, [state.root.parent]) == {str(state.root.parent): "read"}, (
        "the folders above are open"
    )


def test_no_command_line_shows_a_secret(state: StateDir) -> None:
    secrets = [path.read_text().strip() for path in state.secrets.iterdir()]
    assert len(secrets) >= 4
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        assert not any(secret in words for secret in secrets), process.pid


def test_data_of_the_version_before_is_there(state: StateDir) -> None:
    assert asyncio.run(read(state.etcd_address)) == b"kept"
    with redis.Redis(unix_socket_path=state.redis_address.removeprefix("unix:")) as client:
        assert client.get("kept") == b"yes"
