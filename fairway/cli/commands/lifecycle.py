"""`fairway up` and `down`: one installation on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from getpass import getuser
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from fairway.cli.calls import admin_client, checked
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.fleet import progress as progress_module
from fairway.cli.fleet.bootstrap import Bootstrap
from fairway.cli.fleet.control import request_workers
from fairway.cli.fleet.daemon import start_detached
from fairway.cli.fleet.installation import (
    AlreadyRunning,
    check_start,
    continued,
    differing_options,
    is_resize,
    remembered_options,
    run_installation,
    running_endpoints,
    runs_otherwise,
    stop_installation,
)
from fairway.cli.fleet.options import LOOPBACK, SMOLLM2, DefaultModel, UpOptions
from fairway.cli.fleet.progress import LineProgress, StartProgress
from fairway.cli.fleet.roles import stop_bound_s, worker_names
from fairway.cli.state import Endpoints, StateDir, read_secret
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.output import err, out, plain
from fairway.cli.watch import until_drained
from fairway.client import AdminClient, FairwayError, NotFound
from fairway.client.admin.watch import wanted_replicas
from fairway.log_stream import LogStream
from fairway.v1 import controlplane_pb2 as cp


@dataclass(frozen=True, slots=True)
class RemoteAddresses:
    """``FleetAddresses`` from the command line. A gateway's name is its address."""

    registry: str
    controlplane: str
    gateways: tuple[str, ...]
    certs: Path | None  # folder of the operator's certificate; None: roles serve without TLS
    http: str  # URL of a gateway

    def tls_of(self, name: str) -> Path | None:
        is_plain = name in self.gateways and not self.http.startswith("https://")
        return None if is_plain else self.certs

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

    For a fleet that was started by other means. With certs/operator in the state folder, roles are called
    with TLS; the gateways too if --http is an https:// URL. The command can be repeated: existing resources
    stay unchanged, and a deleted deployment stays deleted.

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
    certs = state.operator_certs if state.operator_certs.exists() else None
    addresses = RemoteAddresses(registry, controlplane, tuple(gateway), certs, http)
    endpoints = _run(options, state, addresses)
    with state.writing():
        endpoints.save(state.endpoints)
    what = f"{endpoints.model} is served" if endpoints.model else "the fleet answers"
    plain(out(), f"{what}; the API key is in {state.secret('api_key')}")


def _run(options: UpOptions, state: StateDir, addresses: RemoteAddresses) -> Endpoints:
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
        http=addresses.http,
        tls_dir=str(addresses.certs or ""),
        grpc=addresses.gateways[0],
        api_key=api_key,
        admin_key=read_secret(state, "admin_key"),
        model=options.model_name if options.deploy else "",
        registry=addresses.registry,
        controlplane=addresses.controlplane,
    )


_MOST_WORKERS: Final = 64  # largest number that `fairway up` takes, also while the unit runs
_SLACK_S: Final = 30.0
_NAME: Final = re.compile(r"[A-Za-z0-9:_.@-]{1,200}")


def service(
    install: Annotated[bool, typer.Option("--install", help="Write the unit, do not print it.")] = False,
    system: Annotated[
        bool,
        typer.Option("--system", help="A unit of the system, run as this user; default: of the user."),
    ] = False,
    name: Annotated[str, typer.Option(help="Name of the unit: one for each installation.")] = "fairway",
    state_dir: Annotated[
        Path, typer.Option("--state-dir", help="Folder of state, logs and secrets.")
    ] = DEFAULT_STATE_DIR,
) -> None:
    """Print a systemd unit that starts this installation with the options of its last start.

    It restarts after a failure and drains when it is stopped. It contains no keys.

    \b
    Examples:
      fairway service
      fairway service --install && systemctl --user enable --now fairway
      sudo fairway service --system --install --state-dir /var/lib/fairway
    """
    if not _NAME.fullmatch(name):
        raise typer.BadParameter("a unit's name has letters, digits and :_.@- only", param_hint="--name")
    state = StateDir.at(state_dir)
    text = unit_of(state, remembered_options(state), system=system)
    if not install:
        plain(out(), text.rstrip())
        return
    path = _place(system=system) / f"{name}.service"
    _write(path, text, state)
    manager = "systemctl" if system else "systemctl --user"
    plain(err(), f"written: {path}")
    plain(err(), f"next: fairway down; {manager} daemon-reload && {manager} enable --now {name}")
    if not system:
        plain(err(), f"      loginctl enable-linger {getuser()}   # it also runs while nobody is logged in")


def unit_of(state: StateDir, options: UpOptions | None, *, system: bool) -> str:
    """Return the unit's text. ``options`` are those of the last start, if any."""
    script = Path(sys.executable).with_name("fairway")
    program = [str(script)] if script.exists() else [sys.executable, "-P", "-m", "fairway.cli.entry"]
    first = quoted(program[0]).replace("$$", "$")  # variables are not replaced in the program's own path
    command = " ".join((first, *map(quoted, (*program[1:], "up", "--state-dir", str(state.root)))))
    largest = replace(options or UpOptions(state_dir=str(state.root)), workers=_MOST_WORKERS)
    stop_s = stop_bound_s(state, largest, {**dict(largest.environment), **os.environ}) + _SLACK_S
    network = "Wants=network-online.target\nAfter=network-online.target\n" if system else ""
    user = f"User={getuser()}\n" if system else ""
    return f"""[Unit]
Description=Fairway in {_escaped(str(state.root))}
{network}
[Service]
Type=exec
{user}WorkingDirectory={_escaped(str(Path.cwd()))}
ExecStart={command}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={ExitCode.USAGE:d} {ExitCode.REFUSED:d}
# Only the supervisor receives SIGTERM: it drains the roles, then stops the stores, each within a bound.
KillMode=mixed
TimeoutStopSec={stop_s:.0f}
UMask=0077

[Install]
WantedBy={"multi-user" if system else "default"}.target
"""


def quoted(argument: str) -> str:
    """Return an argument of ExecStart that systemd reads as it is."""
    inner = _escaped(argument).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{inner}"'


def _escaped(text: str) -> str:
    """Return a text in which systemd expands nothing. Raises CliError for what a unit cannot contain."""
    if not text.isprintable():
        raise CliError(
            "UNUSABLE_PATH",
            f"a unit cannot contain the path {text!r}",
            next_step="use a folder without control characters in its name",
            exit_code=ExitCode.USAGE,
        )
    return text.replace("%", "%%")


def _place(*, system: bool) -> Path:
    if system:
        return Path("/etc/systemd/system")
    named = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(named) if named.startswith("/") else Path.home() / ".config") / "systemd" / "user"


def _write(path: Path, text: str, state: StateDir) -> None:
    """Write the unit unless one of another installation is there. Raises CliError."""
    try:
        own = f'--state-dir" {quoted(str(state.root))}\n'
        if path.exists() and own not in path.read_text("utf-8"):
            raise CliError(
                "UNIT_EXISTS",
                f"{path} is the unit of something else",
                next_step="choose another name with --name",
                exit_code=ExitCode.REFUSED,
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as exc:
        raise CliError(
            "UNIT_NOT_WRITTEN",
            f"cannot write {path}: {exc.strerror}",
            next_step="use sudo for --system, or print the unit and place it by hand",
        ) from exc


DRAIN_S: Final = 600.0
_LEASE_S: Final = 15.0  # a killed worker keeps its lease for some seconds
_POLL_S: Final = 0.5


def resize(state: StateDir, running: Endpoints, count: int, progress: StartProgress) -> Endpoints:
    """Return the endpoints once ``count`` workers run: those with the highest numbers come and go.

    A worker that goes is drained first. If it cannot be, nothing has changed when CliError is raised.
    """
    return asyncio.run(_resized(state, running, count, progress))


async def _resized(state: StateDir, running: Endpoints, count: int, progress: StartProgress) -> Endpoints:
    leaving = worker_names(len(running.workers))[count:]
    joining = worker_names(count)[len(running.workers) :]
    client = admin_client(
        ",".join(running.controlplanes),
        admin_key=running.admin_key,
        tls_dir=Path(running.tls_dir) if running.tls_dir else None,
    )
    async with client as admin:
        await _drain(admin, leaving, progress)
        await _forget(admin, joining)  # what an operator set for an earlier worker of that name
        found = await asyncio.to_thread(request_workers, state.control, count, progress)
        await _forget(admin, leaving)
    return found


async def _drain(admin: AdminClient, leaving: Sequence[str], progress: StartProgress) -> None:
    if not leaving:
        return
    await _require_room(admin, leaving)
    try:
        for name in leaving:
            await checked(admin.nodes.drain(name), what=f"cannot drain the node {name}")
        for name in leaving:
            await until_drained(
                admin,
                name,
                lambda name, _, detail: progress.event(name, "stopping", detail),
                timeout_s=DRAIN_S,
            )
    except BaseException:
        for name in leaving:
            await checked(admin.nodes.uncordon(name), what=f"cannot uncordon the node {name}")
        raise


async def _require_room(admin: AdminClient, leaving: Sequence[str]) -> None:
    nodes = await checked(admin.nodes.list(), what="cannot list the nodes")
    left = sum(
        node.state != cp.NODE_STATE_LOST and not node.cordoned and node.metadata.name not in leaving
        for node in nodes
    )
    deployments = await checked(admin.deployments.list(), what="cannot list the deployments")
    if large := [one for one in deployments if wanted_replicas(one) > left]:
        needs = "; ".join(f"{one.metadata.name} has {wanted_replicas(one)} replicas" for one in large)
        scale = " && ".join(f"fairway deployments scale {one.metadata.name} {left}" for one in large)
        raise CliError(
            "TOO_FEW_WORKERS",
            f"{left} workers would be left for replicas, each of which needs a worker of its own: {needs}",
            next_step=f"`{scale}`, then the same command",
            exit_code=ExitCode.REFUSED,
        )


async def _forget(admin: AdminClient, names: Sequence[str]) -> None:
    """Delete the settings of workers that do not run."""
    deadline_s = time.monotonic() + _LEASE_S
    for name in names:
        while True:
            try:
                await admin.nodes.delete(name)
                break
            except NotFound:
                break
            except FairwayError:
                if time.monotonic() > deadline_s:
                    return  # it stays listed as lost; `fairway nodes delete` removes it
            await asyncio.sleep(_POLL_S)


StateOption = Annotated[Path, typer.Option("--state-dir", help="Folder of state, logs and secrets.")]
PortOption = Annotated[
    int,
    typer.Option(min=0, max=65535, help="0: the port of the last run, else 8080 or 50051, else a free one."),
]
HostOption = Annotated[
    str,
    typer.Option(help="IPv4 address on which the gateways listen; 0.0.0.0: all. TLS beyond the loopback."),
]
ForgetOption = Annotated[bool, typer.Option("--forget", help="Start without the options of earlier starts.")]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="ROLE:VARIABLE=VALUE",
        help="A setting of one role, or of one process such as worker-1. Repeatable.",
    ),
]
ModelOption = Annotated[
    DefaultModel | None,
    typer.Option(
        help="smollm2 answers questions and is downloaded once (93 MB); tiny is part of the source and "
        "completes Python. Default: that of the last run, else smollm2.",
        show_default=False,
    ),
]


class WorkerRange(NamedTuple):
    """``most`` 0: as many as ``least``."""

    least: int
    most: int = 0


def _worker_range(text: str | WorkerRange) -> WorkerRange:
    """Return the workers of `2` or `1:4`. Raises BadParameter."""
    if isinstance(text, WorkerRange):
        return text
    least, colon, most = str(text).partition(":")
    try:
        found = WorkerRange(int(least), int(most) if colon else 0)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number of workers such as 2 or 1:4") from None
    if not 1 <= found.least <= 64 or (colon and not found.least <= found.most <= 64):
        raise typer.BadParameter(f"{text!r}: from 1 to 64 workers, the most last")
    return found


WorkersOption = Annotated[
    WorkerRange,
    typer.Option(
        parser=_worker_range, metavar="N|N:M", help="Processes; with N:M, up to M where replicas need them."
    ),
]
_STOP_S: Final = 120.0
_READER_S: Final = 0.25  # how long to wait for a slow terminal
_INSECURE: Final = (
    "warning: --insecure: nothing has TLS, and roles are identified by their token alone.\n"
    "         The gateways listen on {host}: keys, prompts and outputs travel unencrypted.\n"
    "         Other roles, stores and metrics stay on the loopback address."
)


def up(
    context: typer.Context,
    detach: Annotated[bool, typer.Option("--detach", help="Return once everything is READY.")] = False,
    http_port: PortOption = 0,
    grpc_port: PortOption = 0,
    workers: WorkersOption = "1",  # type: ignore[assignment]  # its parser reads it
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Replicas of the deployed model.")] = 1,
    gateways: Annotated[int, typer.Option(min=1, max=16, help="Number of gateways; all serve.")] = 1,
    schedulers: Annotated[
        int, typer.Option(min=1, max=8, help="Number of schedulers; one leads, the others stand by.")
    ] = 1,
    controlplanes: Annotated[
        int, typer.Option(min=1, max=8, help="Number of control planes; all answer, one leads.")
    ] = 1,
    settings: SettingsOption = None,
    model: ModelOption = None,
    model_dir: Annotated[Path | None, typer.Option(help="A checkpoint folder in place of --model.")] = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Publish and deploy nothing.")] = False,
    host: HostOption = LOOPBACK,
    insecure: Annotated[
        bool, typer.Option("--insecure/--secure", help="Use no TLS, neither between roles nor for clients.")
    ] = False,
    forget: ForgetOption = False,
    state_dir: StateOption = Path(".fairway"),
) -> None:
    """Start etcd, Redis, all roles and a model on this machine.

    Options that are not given are those of the last start. If it runs already, its addresses are shown; other
    --workers are started, or drained and stopped, and other options and ranges N:M are refused. Resources
    that operators changed or deleted since the first start stay unchanged.

    \b
    Examples:
      fairway up --detach --workers 2 --replicas 2
      fairway up --workers 1:4
      fairway up --model-dir ./llama-3.2-1b --http-port 8000
      fairway up --gateways 2 --schedulers 2 --set worker:FAIRWAY_KV_MEMORY_BYTES=1073741824
      fairway up --host 0.0.0.0
    """
    if model is not None and model_dir is not None:
        raise typer.BadParameter("--model and --model-dir exclude each other", param_hint="--model")
    state = StateDir.at(state_dir)
    options = UpOptions(
        state_dir=str(state.root),
        http_port=http_port,
        grpc_port=grpc_port,
        workers=workers.least,
        most_workers=workers.most,
        replicas=replicas,
        model_dir=str(model_dir.expanduser().absolute()) if model_dir else "",
        model=DefaultModel.TINY if model_dir else model or DefaultModel.SMOLLM2,
        deploy=not no_model,
        gateways=gateways,
        schedulers=schedulers,
        controlplanes=controlplanes,
        settings=tuple(_setting(text) for text in settings or ()),
        host=host,
        insecure=insecure,
    )
    _up(options, _given(context), None if forget else remembered_options(state), detach=detach)


def _given(context: typer.Context) -> set[str]:
    """Return the names of the options on the command line that define the installation."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    return given - {"detach", "state_dir", "forget"}


def _up(options: UpOptions, given: set[str], before: UpOptions | None, *, detach: bool) -> None:
    """Start the installation, or show that it runs. ``before``: options of the last start, if they count."""
    state = StateDir.at(Path(options.state_dir))
    if before is not None:
        options = continued(before, options, given)
    if (running := running_endpoints(state)) is not None:
        _continue(running, options, given, state)
        return
    check_start(options)
    if options.insecure:
        plain(err(), _INSECURE.format(host=options.host))
    if not detach:  # a terminal or pipe without a reader must not block a restart
        sys.stdout = LogStream.on(sys.stdout, patience_s=_READER_S)
        sys.stderr = LogStream.on(sys.stderr, patience_s=_READER_S)
    progress = progress_module.for_console(err())
    try:
        if detach:
            endpoints, fresh = start_detached(options, progress)
            progress.close()
            if fresh:
                _show_ready(endpoints, state, detached=True)
            else:
                _continue(endpoints, options, given, state)
        else:
            run_installation(options, progress, lambda endpoints: _on_ready(endpoints, state, progress))
    except AlreadyRunning as exc:
        if exc.endpoints is None:
            raise
        progress.close()
        _continue(exc.endpoints, options, given, state)
    finally:
        progress.close()


def _continue(running: Endpoints, options: UpOptions, given: set[str], state: StateDir) -> None:
    """Show that it runs, after a change of the number of its workers. Raises CliError for other changes."""
    differing = differing_options(options, given, state)
    if differing == ["workers"] and is_resize(options, state):
        before = len(running.workers)
        running = resize(state, running, options.workers, LineProgress(err()))
        plain(err(), f"workers: {before} before, {len(running.workers)} now")
    elif differing:
        raise runs_otherwise(options, differing, state)
    _show_running(running, state)


def down(state_dir: StateOption = Path(".fairway")) -> None:
    """Drain and stop everything that `fairway up` started.

    \b
    Examples:
      fairway down
      fairway down --state-dir /var/lib/fairway
    """
    state = StateDir.at(state_dir)
    options = remembered_options(state) or UpOptions(state_dir=str(state.root))
    patience_s = max(_STOP_S, stop_bound_s(state, options, {**dict(options.environment), **os.environ}))
    stopped = stop_installation(state, LineProgress(err()), patience_s=patience_s)
    plain(err(), "stopped" if stopped else f"nothing runs in {state.root}")


def _setting(text: str) -> tuple[str, str, str]:
    """Return the parts of ``worker-1:FAIRWAY_DRAIN_S=5``."""
    target, colon, rest = text.partition(":")
    variable, equals, value = rest.partition("=")
    if not (target and colon and equals and variable.startswith("FAIRWAY_")):
        raise typer.BadParameter(
            f"{text!r} is not of the form worker-1:FAIRWAY_DRAIN_S=5", param_hint="--set"
        )
    return target, variable, value


def _on_ready(endpoints: Endpoints, state: StateDir, progress: progress_module.StartProgress) -> None:
    progress.close()
    _show_ready(endpoints, state, detached=False)


def _show_running(endpoints: Endpoints, state: StateDir) -> None:
    plain(err(), f"Fairway runs already in {state.root} (process {endpoints.supervisor_pid}).")
    _show_addresses(endpoints, state)


def _show_ready(endpoints: Endpoints, state: StateDir, *, detached: bool) -> None:
    plain(out(), "")
    plain(out(), "Fairway is ready.")
    _show_addresses(endpoints, state)
    plain(out(), f"  logs      {state.logs}")
    down = command_line(state, "down")
    plain(out(), "  stop      " + (down if detached else f"Ctrl-C, or {down}"))


def _show_addresses(endpoints: Endpoints, state: StateDir) -> None:
    console = out()
    authorities = [("trust", str(_authorities(endpoints)))] if _authorities(endpoints) else []
    for label, value in (
        *authorities,
        ("HTTP", f"{endpoints.http}/v1"),
        ("gRPC", endpoints.grpc),
        ("API key", endpoints.api_key),
        ("console", endpoints.console),
        ("model", endpoints.model or "none deployed"),
    ):
        plain(console, f"  {label:<9} {value}")
    if not endpoints.model:
        return
    plain(console, "\nTry it:\n")
    for line in (
        command_line(state, "complete", _prompt(endpoints)),
        command_line(state, "chat"),
        curl_lines(endpoints),
    ):
        plain(console, line)
    plain(console)


def _prompt(endpoints: Endpoints) -> str:
    """Return a prompt that the model continues well."""
    return "Once upon a time" if endpoints.model == SMOLLM2 else "def fibonacci(n):"


def command_line(state: StateDir, *arguments: str) -> str:
    """Return a shell command that runs this `fairway` on the installation in ``state``, from this folder."""
    script = Path(sys.executable).with_name("fairway")
    found = shutil.which("fairway")
    if found is not None and script.exists() and Path(found).samefile(script):
        program = ["fairway"]
    elif script.exists():
        program = [_from_here(script)]
    else:
        program = [sys.executable, "-P", "-m", "fairway.cli.entry"]
    is_default = state.root == StateDir.at(DEFAULT_STATE_DIR).root
    place = () if is_default else ("--state-dir", _from_here(state.root))
    return shlex.join((*program, *arguments, *place))


def _from_here(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _authorities(endpoints: Endpoints) -> Path | None:
    """Return the file with which clients verify the gateways; None if these serve without TLS."""
    return Path(endpoints.tls_dir) / "ca.crt" if endpoints.http.startswith("https://") else None


def curl_lines(endpoints: Endpoints) -> str:
    """Return a shell command on three lines that streams a completion."""
    body = {"model": endpoints.model, "prompt": _prompt(endpoints), "max_tokens": 64, "stream": True}
    trust = "" if (file := _authorities(endpoints)) is None else f"--cacert {shlex.quote(str(file))} "
    return (
        f"curl -sN {trust}{endpoints.http}/v1/completions \\\n"
        f"  -H 'Authorization: Bearer {endpoints.api_key}' -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps(body)}'"
    )
