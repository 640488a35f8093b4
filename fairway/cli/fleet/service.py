"""`fairway service`: the systemd unit that starts the installation of a state folder."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from getpass import getuser
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.fleet.installation import remembered_options
from fairway.cli.fleet.options import UpOptions
from fairway.cli.fleet.roles import stop_bound_s
from fairway.cli.state import StateDir
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.output import err, out, plain

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
