"""What each container may do, and what can be read from the outside."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.compose.fleet import ROLES, SERVICES, Failed, Fleet, command, wait

SECRETS = (
    "admin_key",
    "internal_token",
    "ticket_key",
    "record_keys",
    "audit_key",
    "redis_password",
    "redis_acl",
    "api_key",
)
PREBUILT = "/srv/fairway/services/worker/engine/native/prebuilt"
GIVEN = {
    "registry": {"internal_token"},
    "controlplane": {"internal_token", "admin_key", "audit_key", "redis_password"},
    "scheduler": {"internal_token", "ticket_key"},
    "worker-0": {"internal_token"},
    "worker-1": {"internal_token"},
    "gateway": {"internal_token", "ticket_key", "record_keys", "redis_password"},
    "redis": {"redis_acl"},
    "etcd": set(),
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_limits_and_no_rights(fleet: Fleet, service: str) -> None:
    found = fleet.inspect(service)
    host, user = found["HostConfig"], found["Config"]["User"]
    assert user.split(":")[0] not in ("", "0", "root")
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert not host["Privileged"]
    assert any("no-new-privileges" in option for option in host["SecurityOpt"])
    assert host["Memory"] > 0
    assert host["MemorySwap"] == host["Memory"]
    assert host["NanoCpus"] > 0
    assert host["PidsLimit"] > 0
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert host["LogConfig"]["Config"]["max-size"]
    assert int(host["LogConfig"]["Config"]["max-file"]) > 1
    if service in ROLES:
        drain_s = float(dict(each.split("=", 1) for each in found["Config"]["Env"])["FAIRWAY_DRAIN_S"])
        assert found["Config"]["StopTimeout"] > drain_s + 2


@pytest.mark.parametrize("service", ROLES)
def test_its_process_is_nobody_and_writes_nowhere_else(fleet: Fleet, service: str) -> None:
    status = fleet.execute(service, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert set(fields["Uid"].split()) == {fleet.variables["FLEET_UID"]}
    assert int(fields["CapEff"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    for path in ("/srv/fairway/x", "/etc/x", "/x"):
        with pytest.raises(Failed, match="Read-only file system"):
            fleet.execute(service, "touch", path)
    for tool in ("cc", "gcc", "c++", "g++", "make"):
        with pytest.raises(Failed):
            fleet.execute(service, "sh", "-c", f"command -v {tool}")


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_has_the_secrets_that_it_needs_and_shows_none(fleet: Fleet, service: str) -> None:
    found = fleet.inspect(service)
    mounted = {
        Path(mount["Destination"]).name
        for mount in found["Mounts"]
        if mount["Destination"].startswith("/run/secrets/")
    }
    assert mounted == GIVEN[service]
    text = json.dumps(found) + fleet.logs(service)
    assert [name for name in SECRETS if fleet.secret(name).splitlines()[0] in text] == []


def test_the_image_has_no_secret_and_little_else(fleet: Fleet) -> None:
    image = fleet.inspect("gateway")["Image"]
    history = command("docker", "history", "--no-trunc", image) + command("docker", "inspect", image)
    assert [name for name in SECRETS if fleet.secret(name).splitlines()[0] in history] == []
    assert json.loads(command("docker", "inspect", image))[0]["Config"]["User"] == "10001:10001"
    found = fleet.execute("gateway", "find", "/srv/fairway", "-maxdepth", "1", "-printf", "%f\n").split()
    assert {"tests", "scripts", ".git", ".env", ".fairway"}.isdisjoint(found)


def test_only_three_roles_are_published_and_on_the_loopback(fleet: Fleet) -> None:
    published = {}
    for service in SERVICES:
        ports = fleet.inspect(service)["NetworkSettings"]["Ports"] or {}
        hosts = {binding["HostIp"] for bindings in ports.values() for binding in bindings or ()}
        if hosts:
            published[service] = hosts
    assert published == {name: {"127.0.0.1"} for name in ("registry", "controlplane", "gateway")}
    for network in ("fleet", "state"):
        (found,) = json.loads(command("docker", "network", "inspect", f"{fleet.project}_{network}"))
        assert found["Internal"] is True


def test_redis_opens_to_the_password_alone_and_keeps_every_write(fleet: Fleet) -> None:
    assert "NOAUTH" in fleet.execute("redis", "redis-cli", "dbsize")
    asked = ("redis-cli", "--no-auth-warning", "--user", "health", "--pass", "x")
    assert fleet.execute("redis", *asked, "ping").strip() == "PONG"
    assert "NOPERM" in fleet.execute("redis", *asked, "dbsize")
    for name, value in {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
    }.items():
        assert fleet.redis("config", "get", name).split() == [name, value]


@pytest.mark.parametrize("worker", ["worker-0", "worker-1"])
def test_engines_compute_with_the_operators_of_the_image(fleet: Fleet, worker: str) -> None:
    """Torch's are slower and promise less: nothing but the log tells one from the other."""
    wait("an engine loaded", lambda: "model.loaded" in {each["event"] for each in fleet.events(worker)})
    about = [each for each in fleet.events(worker) if each["event"].startswith("operators.")]
    assert {each["event"] for each in about} == {"operators.loaded"}, about
    found = fleet.execute(worker, "find", PREBUILT, "-name", "*.so", "-printf", "%f %m %u\n").splitlines()
    made = {line.split()[0]: line.split()[1:] for line in found}
    assert {each["library"] for each in about} <= made.keys()
    assert all(rest == ["555", "root"] for rest in made.values())
    assert fleet.execute(worker, "find", "/srv/fairway", "-perm", "/022", "!", "-type", "l") == ""


def test_what_an_engine_compiles_goes_where_it_may_be_run(fleet: Fleet) -> None:
    """HOME is on the temporary file system, from which nothing runs."""
    code = (
        "from pathlib import Path; from services.runtime.process.folders import compile_folder;"
        "print(compile_folder(Path('/var/lib/fairway')))"
    )
    assert fleet.execute("worker-0", "python", "-c", code).strip() == "/var/lib/fairway/compiled"
    lines = fleet.execute("worker-0", "cat", "/proc/mounts").splitlines()
    mounts = dict(line.split()[1:4:2] for line in lines)
    assert "noexec" in mounts["/tmp"].split(",")
    assert "noexec" not in mounts["/var/lib/fairway"].split(",")


def test_an_engine_counts_the_processors_of_its_container(fleet: Fleet) -> None:
    code = "from services.runtime.process.machine import available_cpus; print(available_cpus())"
    assert int(fleet.execute("worker-0", "python", "-c", code)) == 2
    assert int(fleet.execute("scheduler", "python", "-c", code)) == 1


def test_the_file_suits_the_compose_that_is_here(fleet: Fleet) -> None:
    for profile in ("", "scale", "observability", "tools"):
        done = subprocess.run(
            [*fleet.compose, *(("--profile", profile) if profile else ()), "config"],
            capture_output=True,
            text=True,
            env=fleet.environment,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0
        assert "warning" not in done.stderr.lower()
