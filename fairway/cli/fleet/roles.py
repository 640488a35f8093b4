"""The processes of a local installation: their commands, environments, ports and probes."""

from __future__ import annotations

import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from fairway.cli import embedded
from fairway.cli.authority import opened_authority
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.fleet.options import EVERY_ADDRESS, LOOPBACK, UpOptions, search_path
from fairway.cli.fleet.probes import all_of, etcd_healthy, grpc_serving, redis_answers, tcp_open
from fairway.cli.fleet.supervisor import ProcessSpec
from fairway.cli.state import StateDir

PREFERRED_PORTS: Final = {"gateway_http": 8080, "gateway_grpc": 50051, "controlplane_console": 8090}
# Variables of the commands of `fairway`, and of scripts around an installation; no settings of the roles.
CLIENT_VARIABLES: Final = (
    "FAIRWAY_API_KEY",
    "FAIRWAY_ADMIN_KEY",
    "FAIRWAY_GRPC",
    "FAIRWAY_CONTROLPLANE",
    "FAIRWAY_DIR",
    "FAIRWAY_HTTP",
    "FAIRWAY_CLI_DEBUG",
    "FAIRWAY_TLS_DIR",
    "FAIRWAY_TRACES",
)
Settings = Sequence[tuple[str, str, str]]  # the type of UpOptions.settings
# Settings that the installation derives from its options, and the options of the gateways' ones.
_KV_MEMORY_BYTES: Final = 512 * 1024**2  # SmolLM2's context of 8,192 tokens takes 360 MiB
_DERIVED: Final = {
    "FAIRWAY_LISTEN": "--grpc-port",
    "FAIRWAY_HTTP_LISTEN": "--http-port",
    "FAIRWAY_CLIENT_TLS": "--insecure",
}
_LOOPBACK: Final = ("127.", "localhost")
_DEFAULT_DRAIN_S: Final = 10.0
_STORE_STOP_S: Final = 10.0
_STOP_SLACK_S: Final = 5.0  # time that a role may take beyond its drain


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of every role of the installation, and how many processes each role has."""

    ports: Mapping[str, int]
    workers: int
    gateways: int = 1
    schedulers: int = 1
    controlplanes: int = 1
    host: str = LOOPBACK  # address on which the gateways listen; other roles listen on the loopback address
    certs: Path | None = None  # folder of the operator's certificate; None: roles serve without TLS
    ordered: tuple[str, ...] = ()  # workers beyond ``workers``, as control planes ordered them
    most_ordered: int = 0

    @classmethod
    def for_options(cls, options: UpOptions, ports: Mapping[str, int]) -> Addresses:
        counts = (options.workers, options.gateways, options.schedulers, options.controlplanes)
        certs = None if options.insecure else StateDir.at(Path(options.state_dir)).operator_certs
        most_ordered = options.most_ordered
        return cls(ports, *counts, options.host, certs, options.ordered, most_ordered)

    def tls_of(self, name: str) -> Path | None:
        """Folder of the certificate for calls of a process; None: it serves without TLS."""
        is_plain = role_of(name) == "gateway" and self.host.startswith(_LOOPBACK)
        return None if is_plain else self.certs

    def of(self, name: str) -> str:
        """Address at which a program on this machine reaches the server."""
        host = self.listen_hosts.get(name, LOOPBACK)
        return f"{LOOPBACK if host == EVERY_ADDRESS else host}:{self.ports[name]}"

    @property
    def listen_hosts(self) -> dict[str, str]:
        """Listen addresses of the servers that clients call, by port name."""
        return {f"{name}_{face}": self.host for name in self.gateway_names for face in ("grpc", "http")}

    def grpc_of(self, name: str) -> str:
        """Address of the gRPC server of a role's process."""
        return self.of(f"{name}_grpc" if role_of(name) == "gateway" else name)

    def http_url(self, name: str) -> str:
        """URL of a gateway's HTTP server."""
        scheme = "http" if self.tls_of(name) is None else "https"
        return f"{scheme}://{self.of(f'{name}_http')}"

    @property
    def worker_names(self) -> tuple[str, ...]:
        return worker_names(self.workers)

    @property
    def gateway_names(self) -> tuple[str, ...]:
        return _named("gateway", self.gateways)

    @property
    def scheduler_names(self) -> tuple[str, ...]:
        return _named("scheduler", self.schedulers)

    @property
    def controlplane_names(self) -> tuple[str, ...]:
        return _named("controlplane", self.controlplanes)

    @property
    def role_names(self) -> tuple[str, ...]:
        """Every process of a role, in start order."""
        controlplanes, schedulers = self.controlplane_names, self.scheduler_names
        workers = (*self.worker_names, *self.ordered)
        return ("registry", *controlplanes, *schedulers, *workers, *self.gateway_names)


def worker_names(count: int) -> tuple[str, ...]:
    return tuple(f"worker-{number}" for number in range(count))


def role_of(name: str) -> str:
    """Return the role of a process: the part of its name before the number."""
    return name.partition("-")[0]


def _named(role: str, count: int) -> tuple[str, ...]:
    """The first process has the role's own name, so that its files and ports stay when others are added."""
    return (role, *(f"{role}-{number}" for number in range(1, count)))


def port_names(options: UpOptions) -> tuple[str, ...]:
    """Return the name of every port that an installation needs. The stores use Unix sockets instead."""
    names = []
    for name in Addresses.for_options(options, {}).role_names:
        names += [f"{name}_grpc", f"{name}_http"] if role_of(name) == "gateway" else [name]
        if role_of(name) == "controlplane":
            names.append(f"{name}_console")
        names.append(f"{name}_metrics")
    return tuple(names)


def store_specs(state: StateDir, environ: Mapping[str, str]) -> tuple[ProcessSpec, ...]:
    """Return etcd and Redis from their embedded wheels, on sockets that only this user can reach.

    Raises CliError when a wheel lacks its server.
    """
    etcd_data, redis_data = state.data("etcd"), state.data("redis")
    try:
        etcd = embedded.etcd_command(etcd_data, "unix://etcd:0", "unix://etcd-peer:0")
        redis = embedded.redis_command(redis_data, state.sockets / "redis")
    except embedded.ServerMissing as exc:
        raise CliError("SERVER_MISSING", str(exc), next_step="run `make up`, which installs it") from exc
    for folder in (etcd_data, redis_data):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    env = {name: value for name, value in environ.items() if not name.startswith(("FAIRWAY_", "ETCD_"))}
    common = {"death_signal": signal.SIGTERM, "start_s": 60.0, "stop_s": _STORE_STOP_S}
    return (
        ProcessSpec(
            name="etcd",
            argv=tuple(etcd),
            log=state.log("etcd"),
            probe=etcd_healthy(state.etcd_address),
            address=state.etcd_address,
            cwd=state.sockets,
            # With several processors, each message wakes idle threads of its runtime. One carries this load.
            env={"GOMAXPROCS": "1", **env},
            **common,  # type: ignore[arg-type]
        ),
        ProcessSpec(
            name="redis",
            argv=tuple(redis),
            log=state.log("redis"),
            probe=redis_answers(state.redis_address),
            address=state.redis_address,
            env=env,
            **common,  # type: ignore[arg-type]
        ),
    )


def role_specs(
    state: StateDir,
    addresses: Addresses,
    environ: Mapping[str, str],
    settings: Settings = (),
) -> tuple[ProcessSpec, ...]:
    """Return the roles in their start order; they are stopped in the reverse order."""
    return tuple(_role(state, addresses, environ, name, settings) for name in addresses.role_names)


def role_environment(
    state: StateDir, addresses: Addresses, environ: Mapping[str, str], name: str, settings: Settings = ()
) -> dict[str, str]:
    """Return the environment of one process of a role.

    The installation's values override the caller's environment, and ``settings`` for this role or this
    process override both.
    """
    inherited = {key: value for key, value in environ.items() if key not in CLIENT_VARIABLES}
    defaults = {
        "FAIRWAY_DRAIN_S": f"{_DEFAULT_DRAIN_S:g}",
        "PYTHONUNBUFFERED": "1",
        # gRPC's fork handlers crash a child between fork and exec while other threads are inside gRPC.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    role = role_of(name)
    if role == "gateway":
        # Small blocks that glibc caches for each thread keep the pages of a burst from being returned.
        defaults["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"
    required = {
        "PYTHONPATH": search_path(environ),
        "FAIRWAY_ETCD_ENDPOINTS": state.etcd_address,
        "FAIRWAY_REDIS_URL": state.redis_url,
        "FAIRWAY_LISTEN": addresses.grpc_of(name),
        "FAIRWAY_METRICS_LISTEN": addresses.of(f"{name}_metrics"),
        "FAIRWAY_STATE_DIR": str(state.data(name)),
        "FAIRWAY_INTERNAL_TOKEN_FILE": str(state.secret("internal_token")),
        "FAIRWAY_TICKET_KEY_FILE": str(state.secret("ticket_key")),
        "FAIRWAY_REGISTRY": addresses.of("registry"),
        **(
            {"FAIRWAY_INSECURE": "true"}
            if addresses.certs is None
            else {"FAIRWAY_TLS_DIR": str(addresses.certs.with_name(name))}
        ),
    }
    if role == "gateway":
        for variable, face in (("FAIRWAY_LISTEN", "grpc"), ("FAIRWAY_HTTP_LISTEN", "http")):
            required[variable] = f"{addresses.host}:{addresses.ports[f'{name}_{face}']}"
        required["FAIRWAY_ADVERTISE"] = addresses.grpc_of(name)
        defaults["FAIRWAY_FILES_DIR"] = str(state.data("files"))
        required["FAIRWAY_RECORD_KEYS_FILE"] = str(state.secret("record_keys"))
    if role == "controlplane":
        required["FAIRWAY_CONSOLE_LISTEN"] = addresses.of(f"{name}_console")
        required["FAIRWAY_ADMIN_KEY_FILE"] = str(state.secret("admin_key"))
        required["FAIRWAY_AUDIT_KEY_FILE"] = str(state.secret("audit_key"))
        defaults["FAIRWAY_USAGE_DIR"] = str(state.data("usage"))
        defaults["FAIRWAY_AUDIT_DIR"] = str(state.data("audit"))
        if addresses.most_ordered:
            command = (sys.executable, "-P", "-m", "fairway.cli.fleet.nodes", str(state.nodes))
            defaults["FAIRWAY_NODE_COMMAND"] = shlex.join(command)
            defaults["FAIRWAY_NODE_LIMIT"] = str(addresses.most_ordered)
    if role == "worker":
        required["FAIRWAY_WORKER_ID"] = name
        defaults["FAIRWAY_KV_MEMORY_BYTES"] = str(_KV_MEMORY_BYTES)
    overrides = {
        variable: value for target in (role, name) for to, variable, value in settings if to == target
    }
    return {**defaults, **inherited, **required, **overrides}


def write_certificates(state: StateDir, addresses: Addresses) -> None:
    """Make the missing and due certificates of the processes, and the operator's. They are private files.

    Gateways that listen beyond the loopback address are named by this machine's names and addresses too.
    """
    if addresses.certs is None:
        return
    with opened_authority(state.certs) as authority:
        authority.create()
        authority.issue("operator", "operator", due_only=True)
        for name in addresses.role_names:
            is_public = role_of(name) == "gateway" and addresses.tls_of(name) is not None
            authority.issue(
                role_of(name),
                name,
                dns=(socket.gethostname(),) if is_public else (),
                addresses=_own_addresses() if is_public else (),
                due_only=True,
            )


def _own_addresses() -> list[str]:
    found = {
        each.address
        for listed in psutil.net_if_addrs().values()
        for each in listed
        if each.family == socket.AF_INET
    }
    return sorted(found)


def check_settings(options: UpOptions) -> None:
    """Raise CliError when a setting is one of the installation's own, or for a process that it lacks."""
    names = Addresses.for_options(options, {}).role_names
    known = {*names, *map(role_of, names)}
    for target, variable, _ in options.settings:
        if (port_option := _DERIVED.get(variable)) is not None:
            raise CliError(
                "SETTING_OF_THE_START",
                f"{variable} of {target} follows from the options of `fairway up`",
                next_step=f"use --host and {port_option}"
                if role_of(target) == "gateway"
                else "leave it out: only the gateways listen beyond the loopback address",
                exit_code=ExitCode.USAGE,
            )
        if target not in known:
            raise CliError(
                "NO_SUCH_PROCESS",
                f"{variable} is set for {target}, which is no role and no process of this installation",
                next_step=f"name one of {', '.join(sorted(known))}",
                exit_code=ExitCode.USAGE,
            )


def _role(
    state: StateDir, addresses: Addresses, environ: Mapping[str, str], name: str, settings: Settings
) -> ProcessSpec:
    env = role_environment(state, addresses, environ, name, settings)
    state.data(name).mkdir(parents=True, exist_ok=True)
    address = addresses.grpc_of(name)
    probe = grpc_serving(address, addresses.tls_of(name))
    if role_of(name) == "gateway":
        probe = all_of(probe, tcp_open(addresses.of(f"{name}_http")))
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-P", "-m", "services", role_of(name)),
        env=env,
        log=state.log(name),
        probe=probe,
        address=address,
        secured=addresses.tls_of(name) is not None,
        stop_s=_drain_s(env) + _STOP_SLACK_S,
    )


def _drain_s(env: Mapping[str, str]) -> float:
    try:
        return float(env["FAIRWAY_DRAIN_S"])
    except ValueError:
        return _DEFAULT_DRAIN_S  # the role itself rejects the value with its own message


def stop_bound_s(state: StateDir, options: UpOptions, environ: Mapping[str, str]) -> float:
    """Return how long the processes may take to stop, one after the other."""
    addresses = Addresses.for_options(options, dict.fromkeys(port_names(options), 0))
    found = 2 * _STORE_STOP_S
    for name in addresses.role_names:
        env = role_environment(state, addresses, environ, name, options.settings)
        found += _drain_s(env) + _STOP_SLACK_S
    return found
