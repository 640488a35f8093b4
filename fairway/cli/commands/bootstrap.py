"""`fairway bootstrap`: prepares a fleet that was started by other means, until a model is served."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fairway.cli.errors import CliError
from fairway.cli.fleet import progress as progress_module
from fairway.cli.fleet.bootstrap import Bootstrap
from fairway.cli.fleet.options import UpOptions
from fairway.cli.state import Endpoints, StateDir, read_secret
from fairway.cli.terminal.output import err, out, plain


@dataclass(frozen=True, slots=True)
class RemoteAddresses:
    """``FleetAddresses`` from the command line. A gateway's name is its address."""

    registry: str
    controlplane: str
    gateways: tuple[str, ...]

    def of(self, name: str) -> str:
        return {"registry": self.registry, "controlplane": self.controlplane}[name]

    def grpc_of(self, name: str) -> str:
        return name if name in self.gateways else self.gateways[0]

    @property
    def gateway_names(self) -> tuple[str, ...]:
        return self.gateways


AddressOption = Annotated[str, typer.Option(help="host:port")]


def bootstrap(
    registry: AddressOption,
    controlplane: AddressOption,
    gateway: Annotated[list[str], typer.Option(help="gRPC host:port of a gateway; once for each of them.")],
    http: Annotated[str, typer.Option(help="URL of a gateway, for endpoints.json.")] = "",
    replicas: Annotated[int, typer.Option(min=1, max=10000, help="Replicas of the deployed model.")] = 1,
    model_dir: Annotated[
        Path | None, typer.Option(help="A checkpoint folder; default: the bundled model.")
    ] = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Publish and deploy nothing.")] = False,
    ready_s: Annotated[
        float, typer.Option(min=1, help="Time limit for loading the model, in seconds.")
    ] = 600.0,
    state_dir: Annotated[
        Path,
        typer.Option(
            help="Folder with secrets/admin_key; secrets/api_key and endpoints.json are written there."
        ),
    ] = Path(".fairway"),
) -> None:
    """Create the tenant `default` with a key, publish and deploy a model, and wait until it is served.

    For a fleet that was started by other means. The command can be repeated: existing resources stay
    unchanged, and a deleted deployment stays deleted.

    \b
    Examples:
      fairway bootstrap --registry registry:9091 --controlplane controlplane:9090 --gateway gateway:50051
      fairway bootstrap --registry r:9091 --controlplane c:9090 --gateway g-0:50051 --no-model
    """
    state = StateDir.at(state_dir)
    if not read_secret(state, "admin_key"):
        raise CliError(
            "NO_KEY",
            f"there is no admin key in {state.secret('admin_key')}",
            next_step="write the control plane's key (FAIRWAY_ADMIN_KEY_FILE) to this file",
        )
    options = UpOptions(
        state_dir=str(state.root),
        replicas=replicas,
        model_dir=str(model_dir.expanduser().absolute()) if model_dir else "",
        deploy=not no_model,
        ready_s=ready_s,
    )
    addresses = RemoteAddresses(registry, controlplane, tuple(gateway))
    endpoints = _run(options, state, addresses, http)
    with state.writing():
        endpoints.save(state.endpoints)
    what = f"{endpoints.model} is served" if endpoints.model else "the fleet answers"
    plain(out(), f"{what}; the API key is in {state.secret('api_key')}")


def _run(options: UpOptions, state: StateDir, addresses: RemoteAddresses, http: str) -> Endpoints:
    progress = progress_module.LineProgress(err())
    try:
        api_key = asyncio.run(Bootstrap(options, state, addresses, progress).run())
    except CliError as exc:
        raise CliError(
            exc.reason,
            exc.message,
            next_step="see the logs of the services that it names; then run it again",
            exit_code=exc.exit_code,
        ) from exc
    return Endpoints(
        http=http,
        grpc=addresses.gateways[0],
        api_key=api_key,
        admin_key=read_secret(state, "admin_key"),
        model=options.model_name if options.deploy else "",
        registry=addresses.registry,
        controlplane=addresses.controlplane,
    )
