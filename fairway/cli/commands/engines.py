"""`fairway engines`: the engines of this machine, beside the one that is built in."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.connection import help_text
from fairway.cli.errors import CliError
from fairway.cli.flags import Format, OutputOption
from fairway.cli.fleet.options import search_path
from fairway.cli.fleet.roles import CLIENT_VARIABLES
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.output import err, out, plain
from fairway.engines.environment import FOLDER_VARIABLE, default_folder, installed_in, interpreter_of
from fairway.engines.install import EngineProblem, check, install, pins_file

app = typer.Typer(help="Engines: Fairway's own and vLLM, on this machine.", no_args_is_help=True)


class OtherEngine(StrEnum):
    """Engines that are installed."""

    VLLM = "vllm"


class VllmDevice(StrEnum):
    """Devices that have pins."""

    CPU = "cpu"
    CUDA = "cuda"


DirOption = Annotated[
    Path | None,
    typer.Option("--dir", help=f"Its folder; default: {FOLDER_VARIABLE}, or fairway/engines of your data."),
]
EngineArgument = Annotated[OtherEngine, typer.Argument(help="The engine.")]
_INSTALL: Final = "fairway engines install vllm"


def _folder(given: Path | None) -> Path:
    named = given or Path(os.environ.get(FOLDER_VARIABLE, ""))
    found = default_folder("vllm", DEFAULT_STATE_DIR) if named == Path() else named
    return found.expanduser().absolute()


def _install(
    engine: EngineArgument,
    device: Annotated[VllmDevice, typer.Option("--device", help="What it computes on.")] = VllmDevice.CPU,
    folder: DirOption = None,
    python: Annotated[str, typer.Option("--python", help="Its interpreter; default: this one.")] = "",
) -> None:
    """Install an engine into an environment of its own, by the pins of this release. It may be repeated.

    Packages come from where your pip is configured to take them. Workers find it at their next attempt.
    """
    place, own = _folder(folder), python or sys.executable
    try:
        done = install(
            place,
            device,
            lambda line: plain(err(), line),
            pins=pins_file(device),
            python=own,
        )
    except EngineProblem as problem:
        raise CliError("ENGINE_NOT_INSTALLED", str(problem), next_step=problem.next_step) from problem
    except OSError as error:
        step = "make it writable, or name another folder with --dir"
        raise CliError("ENGINE_NOT_INSTALLED", f"{place}: {error.strerror}", next_step=step) from error
    plain(out(), f"{engine} {done.version} for {done.device} is in {place}")


def _check(engine: EngineArgument = OtherEngine.VLLM, folder: DirOption = None) -> None:
    """Start the engine's interpreter, import what it needs, and compare its packages with the pins."""
    place = _folder(folder)
    found = installed_in(place)
    if found is None or interpreter_of(place) is None:
        raise CliError("ENGINE_NOT_INSTALLED", f"{engine} is not in {place}", next_step=f"`{_INSTALL}`")
    try:
        versions = check(place, pins=pins_file(found.device))
    except EngineProblem as problem:
        raise CliError("ENGINE_BROKEN", str(problem), next_step=problem.next_step) from problem
    except OSError as error:
        raise CliError("ENGINE_BROKEN", f"{place}: {error.strerror}", next_step=f"`{_INSTALL}`") from error
    shown = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "llguidance"))
    plain(out(), f"{engine} {found.version} for {found.device} in {place}: {shown}; as pinned")


def _list(folder: DirOption = None, output: OutputOption = Format.TABLE) -> None:
    """List the engines, their versions and where they are."""
    place = _folder(folder)
    found = installed_in(place) if interpreter_of(place) is not None else None
    try:
        own = version("fairway")
    except PackageNotFoundError:
        own = "unknown"
    rows = [
        {"name": "fairway", "state": "built in", "version": own, "device": "cpu, cuda", "folder": ""},
        {
            "name": "vllm",
            "state": "not installed" if found is None else "installed",
            "version": "" if found is None else found.version,
            "device": "" if found is None else found.device,
            "folder": "" if found is None else str(place),
        },
    ]
    if output in DOCUMENTS:
        write_document({"engines": rows}, output)
        return
    for row in rows:
        plain(out(), "  ".join(text for text in row.values() if text))
    if found is None:
        plain(err(), f"`{_INSTALL}` installs vllm")


def _follow(
    listen: Annotated[str, typer.Option("--listen", help="host:port that the leading worker names.")],
    registry: Annotated[str, typer.Option("--registry", help="host:port of the registry.")],
    address: Annotated[
        str, typer.Option("--address", help="IPv4 address of this node for its ranks.")
    ] = "127.0.0.1",
    devices: Annotated[int, typer.Option("--devices", min=1, max=64, help="Devices of this node.")] = 1,
    state_dir: Annotated[Path, typer.Option("--state-dir", help="Folder of its files.")] = DEFAULT_STATE_DIR
    / "follower",
    token: Annotated[
        Path | None,
        typer.Option("--internal-token-file", help="The services' secret; default: the setting's."),
    ] = None,
    folder: DirOption = None,
) -> None:
    """Run ranks of engines that lead from another node's worker, until SIGTERM.

    That worker has this address in FAIRWAY_FOLLOWERS. Other settings of roles come from the environment.
    """
    given = {
        "FAIRWAY_LISTEN": listen,
        "FAIRWAY_REGISTRY": registry,
        "FAIRWAY_RANKS_ADDRESS": address,
        "FAIRWAY_DEVICES": str(devices),
        "FAIRWAY_STATE_DIR": str(state_dir),
        FOLDER_VARIABLE: str(_folder(folder)),
    }
    if token is not None:
        given["FAIRWAY_INTERNAL_TOKEN_FILE"] = str(token)
    if interpreter_of(_folder(folder)) is None:
        raise CliError("ENGINE_NOT_INSTALLED", f"vllm is not in {_folder(folder)}", next_step=f"`{_INSTALL}`")
    kept = {name: value for name, value in os.environ.items() if name not in CLIENT_VARIABLES}
    command = [sys.executable, "-P", "-m", "services", "follower"]
    os.execve(sys.executable, command, kept | given | {"PYTHONPATH": search_path(os.environ)})


app.command("install", help=help_text(_install.__doc__ or "", (_INSTALL, f"{_INSTALL} --device cuda")))(
    _install
)
app.command("check", help=help_text(_check.__doc__ or "", ("fairway engines check",)))(_check)
app.command("list", help=help_text(_list.__doc__ or "", ("fairway engines list",)))(_list)
_FOLLOW: Final = "fairway engines follow --listen 10.0.0.2:9200 --registry 10.0.0.1:9091 --address 10.0.0.2"
app.command("follow", help=help_text(_follow.__doc__ or "", (_FOLLOW,)))(_follow)
