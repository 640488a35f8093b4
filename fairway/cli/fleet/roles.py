"""The processes of a local installation: their commands, environments, ports and probes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fairway.cli import embedded
from fairway.cli.errors import CliError
from fairway.cli.fleet.options import UpOptions, source_root
from fairway.cli.fleet.ports import HOST
from fairway.cli.fleet.probes import all_of, etcd_healthy, grpc_serving, redis_answers, tcp_open
from fairway.cli.fleet.process import ProcessSpec
from fairway.cli.state import StateDir

PREFERRED_PORTS: Final = {"gateway_http": 8080, "gateway_grpc": 50051}
# Read by the commands of `fairway`, unknown to the roles.
CLIENT_VARIABLES: Final = (
    "FAIRWAY_API_KEY",
    "FAIRWAY_ADMIN_KEY",
    "FAIRWAY_GRPC",
    "FAIRWAY_CONTROLPLANE",
    "FAIRWAY_HTTP",
)
_DEFAULT_DRAIN_S: Final = 10.0
_STORE_STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of every server of the installation."""

    ports: Mapping[str, int]
    workers: int

    def of(self, name: str) -> str:
        return f"{HOST}:{self.ports[name]}"

    @property
    def http_url(self) -> str:
        return f"http://{self.of('gateway_http')}"

    @property
    def worker_names(self) -> tuple[str, ...]:
        return tuple(f"worker-{number}" for number in range(self.workers))


def port_names(options: UpOptions) -> tuple[str, ...]:
    """Return the name of every port that an installation needs."""
    workers = tuple(f"worker-{number}" for number in range(options.workers))
    stores = ("etcd_client", "etcd_peer", "redis")
    return (*stores, "registry", "controlplane", "scheduler", *workers, "gateway_grpc", "gateway_http")


def store_specs(state: StateDir, addresses: Addresses, environ: Mapping[str, str]) -> tuple[ProcessSpec, ...]:
    """Return etcd and Redis on their embedded wheels. Raises CliError when a wheel lacks its server."""
    ports = addresses.ports
    etcd_data, redis_data = state.data("etcd"), state.data("redis")
    try:
        etcd = embedded.etcd_command(etcd_data, ports["etcd_client"], ports["etcd_peer"])
        redis = embedded.redis_command(redis_data, ports["redis"])
    except embedded.ServerMissing as exc:
        raise CliError("SERVER_MISSING", str(exc), next_step="run `make up`, which installs it") from exc
    for folder in (etcd_data, redis_data):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    env = {name: value for name, value in environ.items() if not name.startswith(("FAIRWAY_", "ETCD_"))}
    common = {"env": env, "death_signal": signal.SIGTERM, "start_s": 60.0, "stop_s": _STORE_STOP_S}
    return (
        ProcessSpec(
            name="etcd",
            argv=tuple(etcd),
            log=state.log("etcd"),
            probe=etcd_healthy(HOST, ports["etcd_client"]),
            address=addresses.of("etcd_client"),
            **common,  # type: ignore[arg-type]
        ),
        ProcessSpec(
            name="redis",
            argv=tuple(redis),
            log=state.log("redis"),
            probe=redis_answers(HOST, ports["redis"]),
            address=addresses.of("redis"),
            **common,  # type: ignore[arg-type]
        ),
    )


def role_specs(state: StateDir, addresses: Addresses, environ: Mapping[str, str]) -> tuple[ProcessSpec, ...]:
    """Return the roles in their start order; they are stopped in the reverse one."""
    return tuple(
        _role(state, addresses, environ, name)
        for name in ("registry", "controlplane", "scheduler", *addresses.worker_names, "gateway")
    )


def role_environment(
    state: StateDir, addresses: Addresses, environ: Mapping[str, str], name: str
) -> dict[str, str]:
    """Return the environment of one role: the caller's own settings, under what the installation decides."""
    inherited = {key: value for key, value in environ.items() if key not in CLIENT_VARIABLES}
    paths = [str(source_root()), *filter(None, [environ.get("PYTHONPATH", "")])]
    defaults = {
        "FAIRWAY_DRAIN_S": f"{_DEFAULT_DRAIN_S:g}",
        "PYTHONUNBUFFERED": "1",
        # gRPC's fork handlers crash a child between fork and exec while other threads are inside gRPC.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    decided = {
        "PYTHONPATH": os.pathsep.join(paths),
        "FAIRWAY_ETCD_ENDPOINTS": addresses.of("etcd_client"),
        "FAIRWAY_REDIS_URL": f"redis://{addresses.of('redis')}/0",
        "FAIRWAY_LISTEN": addresses.of("gateway_grpc" if name == "gateway" else name),
        "FAIRWAY_STATE_DIR": str(state.data(name)),
        "FAIRWAY_INTERNAL_TOKEN_FILE": str(state.secret("internal_token")),
        "FAIRWAY_TICKET_KEY_FILE": str(state.secret("ticket_key")),
        "FAIRWAY_REGISTRY": addresses.of("registry"),
    }
    if name == "gateway":
        decided["FAIRWAY_HTTP_LISTEN"] = addresses.of("gateway_http")
    if name == "controlplane":
        decided["FAIRWAY_ADMIN_KEY_FILE"] = str(state.secret("admin_key"))
    if name.startswith("worker-"):
        decided["FAIRWAY_WORKER_ID"] = name
    return {**defaults, **inherited, **decided}


def _role(state: StateDir, addresses: Addresses, environ: Mapping[str, str], name: str) -> ProcessSpec:
    env = role_environment(state, addresses, environ, name)
    state.data(name).mkdir(parents=True, exist_ok=True)
    address = env["FAIRWAY_LISTEN"]
    probe = grpc_serving(address)
    if name == "gateway":
        probe = all_of(probe, tcp_open(HOST, addresses.ports["gateway_http"]))
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", "services", name.partition("-")[0]),
        env=env,
        log=state.log(name),
        probe=probe,
        address=address,
        stop_s=_drain_s(env) + 5.0,
    )


def _drain_s(env: Mapping[str, str]) -> float:
    try:
        return float(env["FAIRWAY_DRAIN_S"])
    except ValueError:
        return _DEFAULT_DRAIN_S  # the role itself refuses the value with a message of its own
