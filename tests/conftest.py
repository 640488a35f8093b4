"""Real servers for the tests: containers where a Docker engine answers, else the embedded wheels."""

from __future__ import annotations

import tests.support.grpc_forks  # noqa: F401

# isort: split

import contextlib
import gc
import os
import pwd
import signal
import socket
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog
from xdist.remote import Producer

from fairway.cli import embedded
from services.runtime.telemetry import logging
from tests.support import groups, installations, local_servers
from tests.support.object_store import ObjectStore
from tests.support.stack import Stack

ETCD_IMAGE = "quay.io/coreos/etcd:v3.6.5"
REDIS_IMAGE = "redis:7-alpine"
ROOT = Path(__file__).parents[1]
LONG_TESTS = frozenset((ROOT / "tests" / "long_tests.txt").read_text().split())
DAILY_EXAMPLES = 50  # of a property that names no number; make test-pythons draws 100
STARTS = 3  # a port that was free may be taken by the time that the server binds it


# Without this folder nobody is logged in, whoever runs the tests.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / "fairway-tests-without-login")

# No deadline per example, and no check of how fast they are drawn: on a busy machine either fails.
hypothesis.settings.register_profile(
    "daily",
    hypothesis.settings(),
    max_examples=DAILY_EXAMPLES,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("daily")


class Server:
    """A server process of a test: it can be killed, frozen and started again on the same port and data."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.port = 0
        self._peer_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return once it serves; the first start picks the ports."""
        for attempt in range(STARTS):
            if not self.port or (attempt and not self._has_served()):
                self.port, self._peer_port = local_servers.free_port(), local_servers.free_port()
            try:
                self._start_once()
                (self.folder / "served").touch()
                return
            except local_servers.ServerFailed:
                self.kill()
                if attempt == STARTS - 1:
                    raise

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def freeze(self) -> None:
        """Return once it is stopped: a signal takes a moment to reach every thread."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        deadline_s = time.monotonic() + 5.0
        while any(
            (task / "stat").read_text().rpartition(")")[2].split()[0] not in "Tt" for task in tasks.iterdir()
        ):
            assert time.monotonic() < deadline_s, "the server does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def address(self) -> str:
        return f"{embedded.LOOPBACK}:{self.port}"

    def _has_served(self) -> bool:
        return (self.folder / "served").exists()

    def _start_once(self) -> None:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        data.chmod(0o700)
        if self.name == "etcd":
            command = embedded.etcd_command(
                data, f"http://{self.address}", f"http://{embedded.LOOPBACK}:{self._peer_port}", fsync=False
            )
        else:
            command = embedded.redis_command(data, self.port)
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=local_servers.die_with_parent,
            )
        wait = local_servers.wait_etcd if self.name == "etcd" else local_servers.wait_redis
        wait(self.port, timeout_s=20.0, process=self._process)


@pytest.fixture(scope="session", autouse=True)
def production_logging() -> None:
    """Log lines are made as a role makes them; unconfigured, structlog renders every frame's variables.

    Loggers are not kept from their first use on: tests capture lines, and the simulator suspends them.
    """
    logging.configure()
    structlog.configure(cache_logger_on_first_use=False)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that no passwd file has, as in many containers, without HOME."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of a real etcd that the whole session shares: every test uses a prefix of its own."""
    command = [
        "etcd",
        "--listen-client-urls=http://0.0.0.0:2379",
        "--advertise-client-urls=http://0.0.0.0:2379",
    ]
    with _container(ETCD_IMAGE, 2379, command) as address:
        if address is not None:
            local_servers.wait_etcd(int(address.rpartition(":")[2]), host=address.rpartition(":")[0])
            yield address
            return
    with _embedded("etcd", tmp_path_factory.mktemp("etcd")) as server:
        yield server.address


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real Redis that the whole session shares: every test uses tenants of its own."""
    with _container(REDIS_IMAGE, 6379, None) as address:
        if address is not None:
            local_servers.wait_redis(int(address.rpartition(":")[2]), host=address.rpartition(":")[0])
            yield f"redis://{address}/0"
            return
    with _embedded("redis", tmp_path_factory.mktemp("redis")) as server:
        yield f"redis://{server.address}/0"


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Server]:
    """An etcd for one test to kill, freeze and restart."""
    with _embedded("etcd", tmp_path / "own-etcd") as server:
        yield server


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Server]:
    """A Redis for one test to kill, freeze and restart."""
    with _embedded("redis", tmp_path / "own-redis") as server:
        yield server


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server that the whole session shares: every test uses a prefix of its own."""
    yield from _object_store(tmp_path_factory.mktemp("s3"))


@pytest.fixture
def own_object_store(tmp_path: Path) -> Iterator[ObjectStore]:
    """An S3 server for one test to kill and freeze."""
    (tmp_path / "own-s3").mkdir()
    yield from _object_store(tmp_path / "own-s3")


def _object_store(folder: Path) -> Iterator[ObjectStore]:
    server = ObjectStore(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def _embedded(name: str, folder: Path) -> Iterator[Server]:
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(name, folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def _container(image: str, port: int, command: list[str] | None) -> Iterator[str | None]:
    """Yield the address of a container's port, or None where no engine answers or it has no such image."""
    if not _docker_has(image):
        yield None
        return
    from testcontainers.core.container import DockerContainer

    container = DockerContainer(image).with_exposed_ports(port)
    if command is not None:
        container = container.with_command(command)
    try:
        container.start()
    except Exception:  # no such image and no registry, no room, no rights: the embedded server serves as well
        with contextlib.suppress(Exception):
            container.stop()
        yield None
        return
    try:
        yield f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"
    finally:
        container.stop()


def _docker_has(image: str) -> bool:
    """Whether an engine answers and has or gets the image, in bounded time: most machines have no engine."""
    if not _docker_accepts():
        return False
    try:
        import docker

        with contextlib.closing(docker.from_env(timeout=2)) as client:
            client.ping()
            if client.images.list(name=image):
                return True
        with contextlib.closing(docker.from_env(timeout=30)) as client:
            client.images.pull(image)
            return True
    except Exception:  # no engine, no rights, no registry: the embedded server serves as well
        return False


def _docker_accepts() -> bool:
    """Whether a connection to the engine opens. The client library leaks its socket where none does.

    A stopped engine leaves its socket's file, and a user outside its group may not connect.
    """
    host = urllib.parse.urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    if host.scheme != "unix":
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(host.path)
        except OSError:
            return False
    return True


@pytest.fixture(scope="session", name=installations.GATE)
def marked_as_stack() -> None:
    """What a test or fixture that starts an installation uses."""


@pytest.fixture(scope="session")
def usual(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    """An installation with two workers and two replicas of the bundled model."""
    with _shared("usual", tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="session")
def two_gateways(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    """An installation of which gateways and control planes may be killed; its device time has a price."""
    with _shared("two_gateways", tmp_path_factory) as running:
        yield running


def _shared(name: str, folders: pytest.TempPathFactory) -> contextlib.AbstractContextManager[Stack]:
    kind = installations.KINDS[name]
    return Stack.started(
        folders.mktemp(name) / "state",
        workers=kind.workers,
        replicas=kind.replicas,
        gateways=kind.gateways,
        settings={"FAIRWAY_SHEDDING": "false", **kind.settings},
        options=kind.options,
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests of installations run, the files that have none are not imported."""
    only = config.getoption("markexpr").startswith(installations.STACK_STAGE)
    left_out = (
        only and collection_path.name.startswith("test_") and not installations.may_use_one(collection_path)
    )
    return left_out or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with installations.running(item):
        return (yield)


def pytest_itemcollected(item: pytest.Item) -> None:
    installations.mark(item)
    if "::".join(item.nodeid.partition("[")[0].split("::")[:2]) in LONG_TESTS:
        item.add_marker(pytest.mark.long)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups.sort(items)


def pytest_collection_finish() -> None:
    """The tests and what they import stay: a collection that walked them would take a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> groups.ByGroup:
    config.option.loadscopereorder = False  # else the groups with the most tests come first
    return groups.ByGroup(config, log)
