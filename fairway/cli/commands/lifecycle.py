"""`fairway up` and `down`: one installation on this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.fleet import progress as progress_module
from fairway.cli.fleet.daemon import start_detached
from fairway.cli.fleet.installation import (
    AlreadyRunning,
    check_start,
    continued,
    differing_options,
    remembered_options,
    run_installation,
    running_endpoints,
    runs_otherwise,
    stop_installation,
)
from fairway.cli.fleet.options import LOOPBACK, SMOLLM2, DefaultModel, UpOptions
from fairway.cli.fleet.progress import LineProgress
from fairway.cli.fleet.resize import resize
from fairway.cli.fleet.roles import stop_bound_s
from fairway.cli.state import Endpoints, StateDir
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.output import err, out, plain
from fairway.log_stream import LogStream

StateOption = Annotated[Path, typer.Option("--state-dir", help="Folder of state, logs and secrets.")]
PortOption = Annotated[
    int,
    typer.Option(min=0, max=65535, help="0: the port of the last run, else 8080 or 50051, else a free one."),
]
HostOption = Annotated[
    str, typer.Option(help="IPv4 address on which the gateways listen, without TLS; 0.0.0.0: all.")
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

_STOP_S: Final = 120.0
_READER_S: Final = 0.25  # how long to wait for a slow terminal
_EXPOSED: Final = (
    "warning: HTTP and gRPC of the gateways listen on {host} without TLS: keys, prompts and outputs travel"
    " unencrypted.\n"
    "         Use it on a trusted network, or keep the loopback address and put a TLS proxy before it.\n"
    "         Control plane, registry, workers, stores and metrics stay on the loopback address."
)


def up(
    context: typer.Context,
    detach: Annotated[bool, typer.Option("--detach", help="Return once everything is READY.")] = False,
    http_port: PortOption = 0,
    grpc_port: PortOption = 0,
    workers: Annotated[int, typer.Option(min=1, max=64)] = 1,
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
    forget: ForgetOption = False,
    state_dir: StateOption = Path(".fairway"),
) -> None:
    """Start etcd, Redis, all roles and a model on this machine.

    Options that are not given are those of the last start. If it runs already, its addresses are shown; other
    --workers are started, or drained and stopped, and other options are refused. Resources that operators
    changed or deleted since the first start stay unchanged.

    \b
    Examples:
      fairway up
      fairway up --detach --workers 2 --replicas 2
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
        workers=workers,
        replicas=replicas,
        model_dir=str(model_dir.expanduser().absolute()) if model_dir else "",
        model=DefaultModel.TINY if model_dir else model or DefaultModel.SMOLLM2,
        deploy=not no_model,
        gateways=gateways,
        schedulers=schedulers,
        controlplanes=controlplanes,
        settings=tuple(_setting(text) for text in settings or ()),
        host=host,
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
    if options.host != LOOPBACK:
        plain(err(), _EXPOSED.format(host=options.host))
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
    if differing == ["workers"]:
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
    for label, value in (
        ("HTTP", f"{endpoints.http}/v1"),
        ("gRPC", endpoints.grpc),
        ("API key", endpoints.api_key),
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


def curl_lines(endpoints: Endpoints) -> str:
    """Return a shell command on three lines that streams a completion."""
    body = {"model": endpoints.model, "prompt": _prompt(endpoints), "max_tokens": 64, "stream": True}
    return (
        f"curl -sN {endpoints.http}/v1/completions \\\n"
        f"  -H 'Authorization: Bearer {endpoints.api_key}' -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps(body)}'"
    )
