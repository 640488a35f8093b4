"""Server address and key of a command: from flags, then the environment, then endpoints.json.

A command for another server than the local installation's uses the login where no key is given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.state import Endpoints, StateDir
from fairway.login import LoginFailed, load, login_file, valid_login

StateDirOption = Annotated[
    Path, typer.Option("--state-dir", help="Installation whose endpoints.json is used.", show_default=True)
]
GrpcOption = Annotated[
    str,
    typer.Option(
        "--grpc",
        envvar="FAIRWAY_GRPC",
        help="host:port of the gateway; several with commas: all are used.",
        show_default=False,
    ),
]
ControlPlaneOption = Annotated[
    str,
    typer.Option(
        "--controlplane",
        envvar="FAIRWAY_CONTROLPLANE",
        help="host:port of the control plane; several with commas: the first that answers is used.",
        show_default=False,
    ),
]
HttpOption = Annotated[
    str,
    typer.Option(
        "--http", envvar="FAIRWAY_HTTP", help="URL of the HTTP API, without a path.", show_default=False
    ),
]
RegistryOption = Annotated[
    str,
    typer.Option(
        "--registry", envvar="FAIRWAY_REGISTRY", help="host:port of the registry.", show_default=False
    ),
]
ApiKeyOption = Annotated[
    str,
    typer.Option("--api-key", envvar="FAIRWAY_API_KEY", help="Key of the data plane.", show_default=False),
]
AdminKeyOption = Annotated[
    str, typer.Option("--admin-key", envvar="FAIRWAY_ADMIN_KEY", help="Operator's key.", show_default=False)
]
DEFAULT_STATE_DIR = Path(".fairway")
TLS_DIR = "FAIRWAY_TLS_DIR"  # variable with the folder of the caller's certificate


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server and the key for it; an empty key: the login.

    ``tls_dir``: the folder with the certificate of the caller and the authorities; None: it is without TLS.
    """

    address: str
    key: str
    tls_dir: Path | None = None


def gateway(address: str, api_key: str, state_dir: Path) -> Target:
    """Return the gateway to call. Raises CliError if neither flags, environment nor file name one."""
    found = _endpoints(state_dir)
    known = (_several(found.gateways, found.grpc), found.api_key) if found else ("", "")
    return _target("gateway", address, api_key, known, _of_clients(found))


def http_api(url: str, api_key: str, state_dir: Path) -> Target:
    """Return the HTTP API to call; its address is a URL. Raises CliError like ``gateway``."""
    found = _endpoints(state_dir)
    known = (found.http, found.api_key) if found else ("", "")
    target = _target("http", url, api_key, known, _of_clients(found))
    try:
        login = None if target.key else valid_login(login_file())
    except LoginFailed as exc:
        raise CliError(
            "LOGIN_ENDED",
            str(exc),
            next_step="log in again with `fairway login`",
            exit_code=ExitCode.UNAUTHENTICATED,
        ) from exc
    return target if login is None else replace(target, key=login.access_token)


def controlplane(address: str, admin_key: str, state_dir: Path) -> Target:
    """Return the control plane to call. Raises CliError like ``gateway``."""
    found = _endpoints(state_dir)
    known = (_several(found.controlplanes, found.controlplane), found.admin_key) if found else ("", "")
    return _target("controlplane", address, admin_key, known, _tls_dir(found))


def registry(address: str, admin_key: str, state_dir: Path) -> Target:
    """Return the registry to call. Raises CliError like ``gateway``."""
    found = _endpoints(state_dir)
    known = (found.registry, found.admin_key) if found else ("", "")
    return _target("registry", address, admin_key, known, _tls_dir(found))


def default_model(model: str, state_dir: Path) -> str:
    """Return ``model``, or the installation's model when it is empty. Raises CliError without either."""
    found = _endpoints(state_dir)
    name = model or (found.model if found else "")
    if not name:
        raise CliError(
            "NO_MODEL", "no model was named", next_step="add --model NAME", exit_code=ExitCode.USAGE
        )
    return name


def _several(addresses: tuple[str, ...], first: str) -> str:
    return ",".join(addresses) or first


def _endpoints(state_dir: Path) -> Endpoints | None:
    return Endpoints.load(StateDir.at(state_dir).endpoints)


def _tls_dir(found: Endpoints | None) -> Path | None:
    """Return the folder of the installation's certificate for roles; None: they serve without TLS."""
    return Path(found.tls_dir) if found is not None and found.tls_dir else None


def _of_clients(found: Endpoints | None) -> Path | None:
    """Return the same for gateways, which have TLS if their URL has."""
    return _tls_dir(found) if found is not None and found.http.startswith("https://") else None


def _target(name: str, address: str, key: str, known: tuple[str, str], tls_dir: Path | None) -> Target:
    """Return the target of the given address and key, or of the installation's.

    ``tls_dir`` and the key in ``known`` are for the addresses there; FAIRWAY_TLS_DIR is for every address.
    """
    is_own = set(address.split(",")) <= {"", *known[0].split(",")}
    if named := os.environ.get(TLS_DIR):
        tls_dir = Path(named)
    elif not is_own:
        tls_dir = None
    flag = "grpc" if name == "gateway" else name
    has_login = load(login_file()) is not None
    if is_own and not key and not (address and has_login):
        key = known[1]
    address = address or known[0]
    if not address:
        raise CliError(
            "NO_ADDRESS",
            f"there is no address of the {name}, and no installation runs here",
            next_step="start one with `fairway up`, or name one with "
            + ("--http URL" if name == "http" else f"--{flag} HOST:PORT"),
            exit_code=ExitCode.NOT_RUNNING,
        )
    if not key and not has_login:
        raise CliError(
            "NO_KEY",
            f"there is no key for the {name} at {address}; keys of an installation are for its own servers",
            next_step="log in with `fairway login`, or add "
            + ("--api-key KEY" if name in ("gateway", "http") else "--admin-key KEY"),
            exit_code=ExitCode.UNAUTHENTICATED,
        )
    if not key.isascii() or not key.isprintable():
        raise CliError(
            "BAD_KEY",
            f"the key for the {name} has invalid characters",
            next_step="copy it again, as it was printed at its creation",
            exit_code=ExitCode.UNAUTHENTICATED,
        )
    return Target(address, key, tls_dir)
