"""The containers of docker-compose.yml under test: brought up, asked, disturbed, taken away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts import compose_secrets
from tests.support.local_servers import free_port

ROOT: Final = Path(__file__).parents[2]
IMAGE: Final = "fairway:compose-test"
ROLES: Final = ("registry", "controlplane", "scheduler", "worker-0", "worker-1", "gateway")
SERVICES: Final = ("etcd", "redis", *ROLES)
SCALED: Final = ("controlplane-1", "scheduler-1", "worker-2", "worker-3", "gateway-1")
PORTS: Final = (
    "FLEET_HTTP_PORT",
    "FLEET_GRPC_PORT",
    "FLEET_HTTP_1_PORT",
    "FLEET_GRPC_1_PORT",
    "FLEET_REGISTRY_PORT",
    "FLEET_CONTROLPLANE_PORT",
    "FLEET_CONTROLPLANE_1_PORT",
    "FLEET_CONSOLE_PORT",
)
_SECONDS: Final = 420.0  # of one command; the first build installs torch
_CRASH: Final = """
import os, signal
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) not in (1, os.getpid()):
        with open(f"/proc/{name}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        if parent == 1:
            os.kill(int(name), signal.SIGKILL)
"""
_HOLDS: Final = """
import json, grpc
from google.protobuf.json_format import MessageToDict
from fairway.v1 import worker_pb2, worker_pb2_grpc
import sys
from fairway.client import tls_credentials
token = open("/run/secrets/internal_token").read().strip()
with grpc.secure_channel(sys.argv[1] + ":9100", tls_credentials("/run/fairway/tls")) as channel:
    answer = worker_pb2_grpc.WorkerServiceStub(channel).GetWorker(
        worker_pb2.GetWorkerRequest(), metadata=(("authorization", f"Bearer {token}"),), timeout=5
    )
print(json.dumps(MessageToDict(answer, preserving_proto_field_name=True)))
"""


class Failed(AssertionError):
    """A command failed; the text has its output."""


def command(*words: str, timeout_s: float = _SECONDS, env: Mapping[str, str] | None = None) -> str:
    """Return what a command printed. Raises Failed."""
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False, env=env
    )
    if done.returncode:
        raise Failed(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def compose_command() -> list[str] | None:
    """Return the words of the compose that is here: version 2, else the one in Python, else None."""
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]) and not subprocess.run([*words, "version"], capture_output=True).returncode:
            return words
    return None


def why_not() -> str:
    """Return "" when an engine answers and compose is here, else what is missing."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    if subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode:
        return "no Docker engine answers"
    return "" if compose_command() else "neither `docker compose` nor docker-compose is here"


def wait(what: str, ready: Callable[[], bool], timeout_s: float = 180.0) -> None:
    """Return once ``ready``; a command that fails counts as not ready."""
    deadline, last = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except Failed as exc:
            last = str(exc)
        time.sleep(0.25)
    raise AssertionError(f"{what}: not within {timeout_s:g} s {last}")


@dataclass(frozen=True, slots=True)
class Fleet:
    """One project of containers with a state folder, an env file and ports of its own."""

    folder: Path
    project: str
    compose: tuple[str, ...]
    ports: Mapping[str, int]

    @classmethod
    def at(cls, folder: Path, project: str) -> Fleet:
        words = compose_command()
        assert words is not None
        fleet = cls(folder, project, tuple(words), dict(zip(PORTS, _free_ports(len(PORTS)), strict=True)))
        env = folder / "env"
        compose_secrets.main(["--state", str(folder / "state"), "--env", str(env)])
        variables = {"FLEET_IMAGE": IMAGE, **{name: str(port) for name, port in fleet.ports.items()}}
        env.write_text(env.read_text() + "".join(f"{key}={value}\n" for key, value in variables.items()))
        return fleet

    @property
    def variables(self) -> dict[str, str]:
        lines = (self.folder / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines) | {"COMPOSE_PROJECT_NAME": self.project}

    @property
    def environment(self) -> dict[str, str]:
        """What the scripts of deploy/compose are run with."""
        return {**os.environ, **self.variables, "COMPOSE": " ".join(self.compose)}

    def run(self, *words: str, profile: str = "", timeout_s: float = _SECONDS) -> str:
        profiles = ["--profile", profile] if profile else []
        return command(*self.compose, *profiles, *words, timeout_s=timeout_s, env=self.environment)

    def up(self, *services: str, profile: str = "") -> None:
        """Start what is not running and wait until each service is healthy and the model is served."""
        self.run("up", "--detach", "--no-build", *services, profile=profile)
        self.wait_healthy(*(SERVICES + (SCALED if profile == "scale" else ())))
        if not services:
            self.wait_setup()

    def wait_setup(self) -> None:
        def done() -> bool:
            state = self.inspect("setup")["State"]
            assert not (state["Status"] == "exited" and state["ExitCode"]), self.logs("setup")
            return bool(state["Status"] == "exited")

        wait("setup ends", done)

    def container(self, service: str) -> str:
        names = command(
            "docker", "ps", "-aq",
            "--filter", f"label=com.docker.compose.project={self.project}",
            "--filter", f"label=com.docker.compose.service={service}",
            "--filter", "label=com.docker.compose.oneoff=False",
        ).split()  # fmt: skip
        if len(names) != 1:
            raise Failed(f"{service} has {len(names)} containers")
        return names[0]

    def inspect(self, service: str) -> dict[str, Any]:
        found = json.loads(command("docker", "inspect", self.container(service)))
        assert isinstance(found[0], dict)
        return found[0]

    def logs(self, service: str) -> str:
        done = subprocess.run(
            ["docker", "logs", "--tail", "40", self.container(service)], capture_output=True, text=True
        )
        return done.stdout + done.stderr

    def events(self, service: str) -> list[dict[str, Any]]:
        """Every event in a container's log; what an engine wrote is in its agent's, taken apart here."""
        done = subprocess.run(["docker", "logs", self.container(service)], capture_output=True, text=True)
        found: list[dict[str, Any]] = []
        for line in (done.stdout + done.stderr).splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(event := json.loads(line))
                if event.get("event") == "engine.logged":
                    found.append(json.loads(event["line"]))
        return [event for event in found if "event" in event]

    def healthy(self, service: str) -> bool:
        state = self.inspect(service)["State"]
        return bool(state["Status"] == "running" and state["Health"]["Status"] == "healthy")

    def wait_healthy(self, *services: str) -> None:
        for service in services:
            wait(f"{service} is healthy", lambda name=service: self.healthy(name))  # type: ignore[misc]

    def do(self, verb: str, service: str) -> None:
        """``docker VERB`` on the service's container."""
        command("docker", verb, self.container(service))

    def execute(self, service: str, *words: str) -> str:
        return command("docker", "exec", self.container(service), *words)

    def crash(self, service: str) -> None:
        """Kill -9 what the container runs, from inside: unlike `docker kill`, the engine starts it again."""
        before = self.inspect(service)["RestartCount"]
        with contextlib.suppress(Failed):  # the container may be gone before the command returns
            self.execute(service, "python", "-c", _CRASH)
        wait(f"{service} was restarted", lambda: self.inspect(service)["RestartCount"] > before, 60)

    def cli(self, *words: str) -> str:
        return self.run("run", "--rm", "-T", "cli", *words, profile="tools")

    def holds(self, worker: str) -> dict[str, Any]:
        """What a worker says of itself, to a control plane."""
        found = json.loads(self.execute("controlplane", "python", "-c", _HOLDS, worker))
        assert isinstance(found, dict)
        return found

    def at_rest(self, *workers: str) -> bool:
        """Each worker has one version READY and holds nothing for any request."""
        for worker in workers or ("worker-0", "worker-1"):
            versions = self.holds(worker).get("versions", [])
            if len(versions) != 1 or versions[0]["state"] != "VERSION_STATE_READY":
                return False
            if any(
                int(versions[0].get(name, 0))
                for name in ("kv_blocks_reserved", "kv_blocks_used", "running", "waiting")
            ):
                return False
        return True

    def runs(self, worker: str) -> bool:
        """The worker has a sequence that decodes."""
        return any(int(version.get("running", 0)) for version in self.holds(worker).get("versions", []))

    def busy(self) -> str:
        """Return the name of a worker that has a sequence which decodes; waits for one."""
        workers = ("worker-0", "worker-1")
        wait("a worker has a stream", lambda: any(self.runs(each) for each in workers))
        return next((each for each in workers if self.runs(each)), workers[0])

    def redis(self, *words: str) -> str:
        return self.execute(
            "redis", "redis-cli", "--no-auth-warning", "-a", self.secret("redis_password"), *words
        )

    @property
    def authorities(self) -> Path:
        """The file with which clients verify the gateways."""
        return self.folder / "state" / "certs" / "operator" / "ca.crt"

    def secret(self, name: str) -> str:
        return (self.folder / "state" / "secrets" / name).read_text().strip()

    def grpc(self, number: int = 0) -> str:
        return f"127.0.0.1:{self.ports['FLEET_GRPC_1_PORT' if number else 'FLEET_GRPC_PORT']}"

    def http(self, number: int = 0) -> str:
        return f"https://127.0.0.1:{self.ports['FLEET_HTTP_1_PORT' if number else 'FLEET_HTTP_PORT']}"

    @contextlib.contextmanager
    def cut_off(self, service: str, *networks: str) -> Iterator[None]:
        """Take the service off the networks, and put it back under its name."""
        container = self.container(service)
        names = [f"{self.project}_{network}" for network in networks]
        for name in names:
            command("docker", "network", "disconnect", name, container)
        try:
            yield
        finally:
            for name in names:
                command("docker", "network", "connect", "--alias", service, name, container)

    def remove(self) -> None:
        """End everything of the project, volumes and networks with it."""
        for profile in ("scale", "tools"):
            self.run("down", "--volumes", "--remove-orphans", profile=profile)

    def leftovers(self) -> Sequence[str]:
        label = f"label=com.docker.compose.project={self.project}"
        return [
            *command("docker", "ps", "-aq", "--filter", label).split(),
            *command("docker", "network", "ls", "-q", "--filter", label).split(),
            *command("docker", "volume", "ls", "-q", "--filter", label).split(),
        ]


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
